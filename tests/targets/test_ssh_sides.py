"""Both sides of a cluster on ssh hosts: the operator's machine, which forwards commands, and the head."""

from __future__ import annotations

import json
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.cli.forwarding import cluster_named
from dalsegno.cli.main import cli
from dalsegno.errors import CommandFailed, NotThere, TargetError
from dalsegno.spec.facts import Cluster, Node, Partition, SshAccess, SshHost, facts_to_json
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.base import CanForward, CanReboot, ClusterPhase
from dalsegno.targets.folder import ClusterRole
from dalsegno.targets.registry import is_elsewhere, open_existing
from dalsegno.targets.ssh.folder import SshFolder, SshStage, SshState, write_ssh_state
from dalsegno.targets.ssh.head import HeadTarget
from dalsegno.targets.ssh.repair import head_parts
from dalsegno.targets.ssh.target import SshTarget

HOSTS = (
    SshHost("head", "192.0.2.10", "ops", key="/keys/ops"),
    SshHost("gpu-1", "192.0.2.11", "ops", 2222, power_cycle=("ipmitool", "-H", "10.1.0.1", "power", "cycle")),
)
SSH = SshAccess(HOSTS, known_hosts="/keys/known_hosts")
CLUSTER = Cluster("lab", "ssh", (Node("gpu-1", 8, 1024),), (Partition("train", ("gpu-1",)),), ssh=SSH)
STATE = SshState(SshStage.UP, "c0ffee", "head", SSH)


def make(home: Path, state: SshState, cluster: Cluster = CLUSTER) -> Path:
    folder = SshFolder(home / "clusters" / "lab")
    write_ssh_state(folder, state)
    folder.applied.write_text(json.dumps(facts_to_json(cluster)))
    return folder.root


def test_operator_forwards_commands_to_the_head(tmp_path):
    target = open_existing(make(tmp_path, STATE))
    assert isinstance(target, CanForward)
    argv = target.forward(["run", "-N", "2", "train.py", "a b"]).argv
    assert argv[0] == "ssh"
    assert "UserKnownHostsFile=/keys/known_hosts" in argv
    assert argv[-2:] == ["192.0.2.10", "/usr/local/bin/dalsegno run -N 2 train.py 'a b'"]
    assert is_elsewhere(target.folder.root)


def test_login_user_is_asked_on_the_head_of_any_name(tmp_path):
    named = replace(SSH, hosts=(replace(HOSTS[0], name="gpu01"), HOSTS[1]))
    target = open_existing(make(tmp_path, replace(STATE, head="gpu01", ssh=named)))
    assert isinstance(target, CanForward)
    assert target.on_head(["id", "-un"]).argv[-2:] == ["192.0.2.10", "id -un"]


def test_shell_of_the_operator_reaches_each_host_with_its_settings(tmp_path):
    target = open_existing(make(tmp_path, STATE))
    argv = target.shell(["hostname"], {}, "/", host="gpu-1").argv
    assert argv[argv.index("-p") + 1] == "2222"
    assert argv[-2:] == ["192.0.2.11", "hostname"]
    with pytest.raises(NotThere, match="there is no host `gpu-9`") as unknown:
        target.shell(["hostname"], {}, "/", host="gpu-9")
    assert unknown.value.hint == "hosts: head, gpu-1"


def test_head_is_not_elsewhere_and_refuses_changes(tmp_path):
    target = open_existing(make(tmp_path, replace(STATE, role=ClusterRole.HEAD, operator="ada@desk")))
    assert not isinstance(target, CanForward)
    assert not is_elsewhere(tmp_path / "clusters/lab")
    with pytest.raises(TargetError, match="was created from another machine by ada@desk, and is changed from there"):
        target.plan(CLUSTER)


def test_shell_as_another_user_gets_neither_the_terminal_nor_the_environment_of_root(tmp_path):
    target = open_existing(make(tmp_path, replace(STATE, role=ClusterRole.HEAD)))
    entry = target.shell(["id"], {"TERM": "xterm", "SSH_AUTH_SOCK": "/tmp/agent"}, "/", user="nobody")
    assert entry.uid == pwd.getpwnam("nobody").pw_uid  # with a uid, the command gets a separate terminal
    assert entry.argv == ["runuser", "-u", "nobody", "--", "id"]
    assert entry.env["TERM"] == "xterm" and entry.env["USER"] == "nobody" and "SSH_AUTH_SOCK" not in entry.env
    with pytest.raises(NotThere, match="there is no user `mallory`"):
        target.shell(["id"], {}, "/", user="mallory")


def test_head_reboots_nodes_with_the_command_of_the_file(tmp_path):
    root = make(tmp_path, replace(STATE, role=ClusterRole.HEAD))
    assert isinstance(open_existing(root), CanReboot)
    folder = SshFolder(root)
    (parts,) = [each for each in head_parts(folder, "key", SSH).files if each.path == str(folder.power)]
    assert parts.mode == 0o600 and parts.secret
    folder.power.parent.mkdir()
    folder.power.write_text(parts.content)
    runner = FakeRunner({HOSTS[1].power_cycle: ""})
    HeadTarget(root, runner).reboot("gpu-1")
    assert runner.calls == [HOSTS[1].power_cycle]
    broken = FakeRunner(lambda argv, stdin: Completed(argv, 1, stderr="no answer from the BMC"))
    with pytest.raises(CommandFailed, match="no answer from the BMC") as failed:
        HeadTarget(root, broken).reboot("gpu-1")
    assert "ssh.power_cycle" in failed.value.hint


def test_head_without_a_power_command_reboots_and_resets_over_ssh(tmp_path):
    plain = replace(SSH, hosts=(HOSTS[0], replace(HOSTS[1], power_cycle=())))
    root = make(tmp_path, replace(STATE, role=ClusterRole.HEAD), replace(CLUSTER, ssh=plain))
    runner = FakeRunner(lambda argv, stdin: Completed(argv, 0))
    target = HeadTarget(root, runner)
    target.reboot("gpu-1")
    target.reset_gpus("gpu-1")
    assert [call[-3:] for call in runner.calls] == [("--", HOSTS[1].address, order) for order in ("reboot", "reset")]
    assert all("StrictHostKeyChecking=yes" in call for call in runner.calls)
    assert target.machines()["gpu-1"] == f"the machine of gpu-1 at {HOSTS[1].address}"


def test_damaged_state_is_shown_as_such(tmp_path):
    root = make(tmp_path, STATE)
    (root / "state.json").write_text('{"target": "ssh", "phase": 3}')
    target = open_existing(root)
    assert isinstance(target, SshTarget)
    assert target.summary().phase is ClusterPhase.DAMAGED


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("nodes --cluster lab", "lab"),
        ("run -M lab -N 2 train.py", "lab"),
        ("events --cluster=lab", "lab"),
        ("run train.py --cluster theirs", None),
        ("run -- ./a --cluster theirs", None),
        ("nodes show gpu-1", None),
        ("nodes --cluster", None),
    ],
)
def test_cluster_is_named_before_the_arguments_of_a_script(words, name):
    assert cluster_named(words.split(), cli) == name
