"""Repairs on many hosts: what ssh is told, how many at once, and files that arrive whole or not at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dalsegno.cli.containers_words import failures
from dalsegno.containers.native import HEADER, header_version
from dalsegno.containers.plugstack.asking import ask_host, script
from dalsegno.containers.plugstack.compiling import Parcel, compile_on, pack
from dalsegno.containers.plugstack.crowd import AT_ONCE, Stoppable, each_of
from dalsegno.containers.plugstack.facts import HostFacts
from dalsegno.containers.plugstack.judge import judge
from dalsegno.containers.plugstack.mending import NotMended
from dalsegno.containers.plugstack.repairs import decide_repairs
from dalsegno.containers.plugstack.ways import by_ssh, here
from dalsegno.errors import DalsegnoError
from dalsegno.spec.targets import Host, Ssh, hosts_of
from dalsegno.system.processes import Completed, FakeRunner, LocalRunner, Runner
from tests.waiting import eventually


def test_ssh_never_asks_and_the_users_own_options_come_before_those_of_the_file():
    hosts = {"n1": Host(address="10.0.0.1", user="ubuntu", port=2222, key="~/.ssh/k", jump="me@bastion:22")}
    argv, env = by_ssh({}, ["User=ada"], hosts).enter("n1", ["echo", "a b"])
    assert " ".join(argv).startswith("ssh -o BatchMode=yes -o User=ada -l ubuntu -p 2222 -i ~/.ssh/k -o ProxyCommand=")
    assert argv[-3:] == ["--", "10.0.0.1", "echo 'a b'"] and env["SSH_ASKPASS"].endswith("false")
    (through,) = [word for word in argv if word.startswith("ProxyCommand=")]
    assert through.startswith("ProxyCommand=ssh -o BatchMode=yes -p 22 -i ") and through.endswith(" -- me@bastion")
    assert by_ssh({}).enter("n2", ["true"])[0][-2:] == ["n2", "true"]


def test_whom_to_trust_is_said_of_the_host_on_the_way_too_and_where_to_go_is_not():
    hosts = {"n1": Host(address="10.0.0.1", jump="bastion")}
    options = ["StrictHostKeyChecking=accept-new", "userknownhostsfile ~/known/%h x", "Port=2222", "User = ada"]
    argv = by_ssh({}, options, hosts).enter("n1", ["true"])[0]
    (through,) = [word for word in argv if word.startswith("ProxyCommand=")]
    trusted = "-o StrictHostKeyChecking=accept-new -o 'userknownhostsfile ~/known/%%h x'"
    assert through.startswith(f"ProxyCommand=ssh -o BatchMode=yes {trusted} -o ConnectTimeout=10 ")
    assert "2222" not in through and "ada" not in through


def test_a_cluster_files_hosts_have_what_is_said_of_all_unless_they_say_otherwise():
    ssh = Ssh(user="ubuntu", hosts={"n[1-2]": Host(address="10.0.0.[1-2]"), "n3": Host(address="gpu3", port=2200)})
    found = hosts_of(ssh, ["n1", "n3", "n4"])
    assert {name: (host.address, host.user, host.port) for name, host in found.items()} == {
        "n1": ("10.0.0.1", "ubuntu", None),
        "n3": ("gpu3", "ubuntu", 2200),
        "n4": ("n4", "ubuntu", None),
    }


def test_what_ssh_said_is_answered_with_what_to_do():
    def fix(said: str) -> str:
        return judge([HostFacts("n1", silent=f"it is down; ssh: {said}")])[0].fix

    assert "accept-new" in fix("Host key verification failed.")
    assert "IdentityFile" in fix("ada@n1: Permission denied (publickey).")
    assert "HostName" in fix("ssh: Could not resolve hostname n1: Name or service not known")
    assert "run the same again" in fix("ssh: connect to host n1 port 22: Connection timed out")
    assert "man ssh_config" in fix("command-line: line 0: Bad configuration option: nonsense")


def test_a_host_with_another_slurm_gets_no_plugin_that_would_not_load():
    facts = {"conf": "/etc/slurm/slurm.conf", "stack": "/etc/slurm/plugstack.conf"}
    hosts = [
        HostFacts("head", True, slurm="23.11.4", **facts),
        HostFacts("n1", slurm="23.02.1", **facts),
        HostFacts("n2", **facts),
    ]
    assert [each.host for each in decide_repairs(hosts, False, "b1")[0]] == ["head"]
    assert "(23.02.1) to the version that others have: 23.11.4" in judge(hosts)[1].fix
    assert "Slurm's own commands are not found there" in judge(hosts)[2].what


def test_the_same_failure_of_many_hosts_is_told_once_and_with_a_hint_that_fits():
    refused, gone = NotMended("ssh: mkdir: Permission denied"), NotMended("ssh: Connection reset")
    told = failures([("n1", refused), ("n3", gone), ("n2", refused)])
    assert [what for what, _ in told] == [
        "n[1-2] could not be mended: ssh: mkdir: Permission denied",
        "n3 could not be mended: ssh: Connection reset",
    ]
    assert "sudo" in told[0][1] and "run the same again" in told[1][1]


def test_after_an_interrupt_nothing_more_is_begun_anywhere():
    runner = FakeRunner(lambda argv, _: Completed(argv, 0))

    def work(runner: Runner, number: int) -> None:
        assert isinstance(runner, Stoppable)
        if number:
            assert runner.stopped.wait(30)
        runner.run([str(number)])

    def interrupt(count: int, total: int) -> None:
        assert total == 3 * AT_ONCE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        each_of(runner, work, range(3 * AT_ONCE), interrupt)
    assert runner.calls == [("0",)]


# What a log-in shell knows, and a compiler ------------------------------------------------------------------------


def stand_in(folder: Path, **programs: str) -> str:
    """A PATH that has these first."""
    folder.mkdir()
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_command_over_ssh_finds_slurm_where_a_log_in_shell_would(tmp_path: Path):
    (tmp_path / "slurm.conf").touch()
    (tmp_path / ".profile").write_text(f"echo welcome; export SLURM_CONF={tmp_path}/slurm.conf\n")
    answer = 'test -n "$SLURM_CONF" && echo "PluginDir = /x"'
    path = stand_in(
        tmp_path / "bin", scontrol=f"test $1 = --version && echo slurm 23.11.4 || {answer}", srun="", sbatch=""
    )
    facts = ask_host(LocalRunner(), "n1", [here({"PATH": path, "HOME": str(tmp_path)})], ())
    assert (facts.silent, facts.slurm, facts.conf) == ("", "23.11.4", f"{tmp_path}/slurm.conf")


def test_a_plugin_that_slurm_would_refuse_is_not_compiled(tmp_path: Path):
    path = stand_in(tmp_path / "bin", scontrol="echo slurm 1.02.3")
    with pytest.raises(
        DalsegnoError, match=r"could not be compiled on head: here: .* and Slurm itself is 1\.2\.3"
    ) as caught:
        compile_on(LocalRunner(), [here({"PATH": path})], "head")
    assert "libslurm-dev" in caught.value.hint


def test_compile_error_on_a_host_shows_the_compilers_own_lines(tmp_path: Path):
    version = header_version(HEADER.read_text())
    gcc = "echo In file included from start.c:1:; echo start.c:85:9: error: unknown type name hostlist_t; exit 1"
    path = stand_in(tmp_path / "bin", scontrol=f"echo slurm-wlm {version}", gcc=gcc)
    with pytest.raises(DalsegnoError, match=r"does not compile with Slurm .* on head") as caught:
        compile_on(LocalRunner(), [here({"PATH": path})], "head")
    assert "`gcc -idirafter /usr/include -std=gnu11" in caught.value.what
    assert caught.value.what.endswith("\n  start.c:85:9: error: unknown type name hostlist_t")
    assert "report it" in caught.value.hint and "apt-get" not in caught.value.hint


# What arrives ----------------------------------------------------------------------------------------------------


@pytest.fixture
def parcel(tmp_path: Path) -> Parcel:
    (tmp_path / "from").mkdir()
    for name in ("sh", "true"):  # programs of this machine
        (tmp_path / f"from/{name}").write_bytes(Path(f"/bin/{name}").read_bytes())
    return pack(sorted((tmp_path / "from").iterdir()))


def install(parcel: Parcel, target: Path) -> subprocess.CompletedProcess[str]:
    argv = ["sh", "-c", script("trust.sh", "install.sh"), "sh", parcel.sha256, str(target), str(target.parent / "kept")]
    return subprocess.run(argv, input=parcel.data, capture_output=True, text=True, timeout=60, check=False)


def test_files_are_there_whole_and_a_damaged_one_is_put_back(tmp_path: Path, parcel: Parcel):
    target = tmp_path / "a folder/b1"
    assert install(parcel, target).stdout == "ds:done\n"
    before = (target / "true").stat()
    assert sorted(path.name for path in target.iterdir()) == ["sh", "true"]
    (target / "sh").write_text("half")
    assert install(parcel, target).stdout == "ds:done\n"
    assert (target / "sh").read_bytes() == Path("/bin/sh").read_bytes()
    assert (target / "true").stat().st_ino == before.st_ino
    assert sorted(path.name for path in target.iterdir()) == ["sh", "true"]


def test_what_was_cut_off_on_its_way_changes_nothing(tmp_path: Path, parcel: Parcel):
    size = len(parcel.data)
    for kept in (0, size // 2, size - 8):
        done = install(Parcel(parcel.data[:kept], parcel.sha256), tmp_path / "to/b1")
        assert done.returncode == 1 and "did not arrive whole" in done.stderr
    assert list((tmp_path / "to/b1").iterdir()) == []


def test_one_that_is_killed_while_files_come_is_followed_by_one_that_has_them_whole(tmp_path: Path, parcel: Parcel):
    target = tmp_path / "to/b1"
    argv = ["sh", "-c", script("trust.sh", "install.sh"), "sh", parcel.sha256, str(target)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, text=True) as running:
        assert running.stdin
        running.stdin.write(parcel.data[: len(parcel.data) // 2])
        running.stdin.flush()
        eventually(lambda: any(path.stat().st_size for path in target.glob(".new.*/archive")))
        running.kill()
    assert [path.name for path in target.iterdir() if not path.name.startswith(".new.")] == []
    assert install(parcel, target).stdout == "ds:done\n"
    (left,) = target.glob(".new.*")  # it is of no use to anybody, and goes when it is old
    os.utime(left, (0, 0))
    assert install(parcel, target).stdout == "ds:done\n"
    assert sorted(path.name for path in target.iterdir()) == ["sh", "true"]


def test_a_program_for_another_machine_is_not_put_in_place(tmp_path: Path):
    (tmp_path / "plugin.so").write_bytes(Path("/bin/true").read_bytes()[:18] + b"\xff\xff" + b"\0" * 4000)
    done = install(pack([tmp_path / "plugin.so"]), tmp_path / "to/b1")
    assert done.returncode == 1 and "it does not run here: " in done.stderr
    assert list((tmp_path / "to/b1").iterdir()) == []


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, parcel: Parcel):
    """What lies there is loaded by slurmd."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = install(parcel, tmp_path / "open/b1")
    assert done.returncode == 1 and "open is not" in done.stderr and "alone" in done.stderr
    (tmp_path / "open/inner").mkdir(mode=0o755)  # and a folder in it is no better
    done = install(parcel, tmp_path / "open/inner/b1")
    assert done.returncode == 1 and f"{tmp_path}/open is not" in done.stderr
    assert list((tmp_path / "open/inner/b1").iterdir()) == []
