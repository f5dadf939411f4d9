"""Commands on many hosts: the options of ssh, interrupts, and settings of a login shell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.containers.plugstack.check import judge
from dalsegno.containers.plugstack.facts import PluginFacts
from dalsegno.containers.plugstack.hosts import (
    AT_ONCE,
    InterruptibleRunner,
    ask_host,
    local_route,
    run_on_each,
    ssh_route,
)
from dalsegno.spec.targets import Ssh, SshHostSpec, hosts_of
from dalsegno.system.processes import Completed, FakeRunner, LocalRunner, Runner


def test_ssh_never_prompts_and_user_options_precede_those_of_the_file():
    hosts = {"n1": SshHostSpec(address="10.0.0.1", user="ubuntu", port=2222, key="~/.ssh/k", jump="me@bastion:22")}
    argv, env = ssh_route({}, ["User=ada"], hosts).enter("n1", ["echo", "a b"])
    assert " ".join(argv).startswith("ssh -o BatchMode=yes -o User=ada -l ubuntu -p 2222 -i ~/.ssh/k -o ProxyCommand=")
    assert argv[-3:] == ["--", "10.0.0.1", "echo 'a b'"] and env["SSH_ASKPASS"].endswith("false")
    (through,) = [word for word in argv if word.startswith("ProxyCommand=")]
    assert through.startswith("ProxyCommand=ssh -o BatchMode=yes -p 22 -i ") and through.endswith(" -- me@bastion")
    assert ssh_route({}).enter("n2", ["true"])[0][-2:] == ["n2", "true"]


def test_options_for_keys_apply_to_the_jump_host_too_and_user_and_port_do_not():
    hosts = {"n1": SshHostSpec(address="10.0.0.1", jump="bastion")}
    options = ["StrictHostKeyChecking=accept-new", "userknownhostsfile ~/known/%h x", "Port=2222", "User = ada"]
    argv = ssh_route({}, options, hosts).enter("n1", ["true"])[0]
    (through,) = [word for word in argv if word.startswith("ProxyCommand=")]
    trusted = "-o StrictHostKeyChecking=accept-new -o 'userknownhostsfile ~/known/%%h x'"
    assert through.startswith(f"ProxyCommand=ssh -o BatchMode=yes {trusted} -o ConnectTimeout=10 ")
    assert "2222" not in through and "ada" not in through


def test_settings_of_one_host_override_those_of_all_hosts():
    ssh = Ssh(
        user="ubuntu",
        hosts={"n[1-2]": SshHostSpec(address="10.0.0.[1-2]"), "n3": SshHostSpec(address="gpu3", port=2200)},
    )
    found = hosts_of(ssh, ["n1", "n3", "n4"])
    assert {name: (host.address, host.user, host.port) for name, host in found.items()} == {
        "n1": ("10.0.0.1", "ubuntu", None),
        "n3": ("gpu3", "ubuntu", 2200),
        "n4": ("n4", "ubuntu", None),
    }


def test_each_known_error_of_ssh_has_a_fix():
    def fix(error: str) -> str:
        return judge([PluginFacts("n1", silent=f"it is down; ssh: {error}")])[0].fix

    assert "accept-new" in fix("Host key verification failed.")
    assert "IdentityFile" in fix("ada@n1: Permission denied (publickey).")
    assert "HostName" in fix("ssh: Could not resolve hostname n1: Name or service not known")
    assert "run the check again" in fix("ssh: connect to host n1 port 22: Connection timed out")
    assert "man ssh_config" in fix("command-line: line 0: Bad configuration option: nonsense")


def test_after_an_interrupt_nothing_more_is_started_on_any_host():
    runner = FakeRunner(lambda argv, _: Completed(argv, 0))

    def work(runner: Runner, number: int) -> None:
        assert isinstance(runner, InterruptibleRunner)
        if number:
            assert runner.stopped.wait(30)
        runner.run([str(number)])

    def interrupt(count: int, total: int) -> None:
        assert total == 3 * AT_ONCE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on_each(runner, work, range(3 * AT_ONCE), interrupt)
    assert runner.calls == [("0",)]


def stand_in(folder: Path, **programs: str) -> str:
    """Return a PATH with these programs first."""
    folder.mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_command_over_ssh_finds_slurm_where_a_login_shell_would(tmp_path: Path):
    (tmp_path / "slurm.conf").touch()
    (tmp_path / ".profile").write_text(f"echo welcome; export SLURM_CONF={tmp_path}/slurm.conf\n")
    answer = 'test -n "$SLURM_CONF" && echo "PluginDir = /x"'
    path = stand_in(
        tmp_path / "bin", scontrol=f"test $1 = --version && echo slurm 23.11.4 || {answer}", srun="", sbatch=""
    )
    facts = ask_host(LocalRunner(), "n1", [local_route({"PATH": path, "HOME": str(tmp_path)})], ())
    assert (facts.silent, facts.slurm, facts.conf) == ("", "23.11.4", f"{tmp_path}/slurm.conf")
