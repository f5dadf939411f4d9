"""Attacks on the set-up of hosts: by users of a host, and by a host on the operator and on the other hosts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.setup.delivery import Answer, applier_argv, apply_request, read_answer, read_step, remove_request
from dalsegno.setup.inspect import HostUser, parse_inspection
from dalsegno.setup.machine_accounts import refuse_open
from dalsegno.setup.machine_record import Refused
from dalsegno.setup.node_plan import NodePlan, PlannedFile, PlannedFolder
from dalsegno.spec.facts import User
from dalsegno.system.processes import Completed
from dalsegno.targets.ssh.desired import hosts_lines
from dalsegno.targets.ssh.folder import ClusterSecrets, SshFolder, read_secrets, write_secrets
from dalsegno.targets.ssh.people import AssignedIds, check_accounts, refuse_privileges
from dalsegno.targets.ssh.plan import check_hosts
from dalsegno.targets.ssh.repair import node_parts
from tests.targets.test_ssh_plans import CLUSTER, HOSTS, ON

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="to act as another user takes root")
DAEMON = 54321  # the uid of a daemon's user, who owns some of the folders
KEY = "/etc/munge/munge.key"
PLAN = NodePlan(
    "demo",
    "c0ffee",
    "head",
    folders=(PlannedFolder("/var/lib/slurm/slurmctld", 0o700),),
    files=(PlannedFile(KEY, "new key", 0o400, secret=True),),
)


@pytest.fixture
def root() -> Iterator[Path]:
    """Return a root folder that other users can reach."""
    made = Path(tempfile.mkdtemp(prefix="ds-setup-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def ask(request: bytes) -> Answer:
    done = subprocess.run(applier_argv(sys.executable), input=request, capture_output=True, timeout=60)
    return read_answer("head", done.stdout.decode() or done.stderr.decode())


def apply(root: Path) -> Answer:
    return ask(apply_request(PLAN, root=str(root), wait_s=0.0))


# Users of a host


@needs_root
def test_user_cannot_hold_the_lock_of_the_set_up(root: Path):
    folder = root / "var/lib/dalsegno"
    folder.mkdir(parents=True)
    (folder / "setup.lock").touch(0o644)  # a file of an earlier release
    apply(root)
    steal = f"import fcntl, os; fcntl.flock(os.open({str(folder / 'setup.lock')!r}, os.O_RDONLY), fcntl.LOCK_SH)"
    done = subprocess.run([sys.executable, "-c", steal], user=DAEMON, group=DAEMON, extra_groups=[], stderr=-1)
    assert done.returncode == 1 and b"PermissionError" in done.stderr
    apply(root)


def test_lock_keeps_a_second_request_away(root: Path):
    apply(root)
    with open(root / "var/lib/dalsegno/setup.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TargetError, match="another `dalsegno up`"):
            apply(root)


@needs_root
@pytest.mark.parametrize("at", ["var/lib/slurm/slurmctld", "var/lib/slurm"])
def test_root_changes_no_folder_that_a_link_of_another_user_names(root: Path, at: str):
    victim, link = root / "victim", root / at
    (victim / "slurmctld").mkdir(parents=True)
    link.parent.mkdir(parents=True)
    os.chown(link.parent, DAEMON, DAEMON)
    link.symlink_to(victim)
    before = victim.stat(), (victim / "slurmctld").stat()
    with pytest.raises(TargetError, match="a link leads to"):
        apply(root)
    after = victim.stat(), (victim / "slurmctld").stat()
    assert [each.st_mode for each in after] == [each.st_mode for each in before]


def test_links_of_root_are_followed(root: Path):
    (root / "data").mkdir()
    (root / "var").mkdir()
    (root / "var/lib").symlink_to("../data")
    apply(root)
    assert (root / "data/slurm/slurmctld").stat().st_mode & 0o777 == 0o700


def test_pipe_in_place_of_a_file_is_refused_at_once(root: Path):
    (root / "etc/munge").mkdir(parents=True)
    os.mkfifo(root / KEY[1:])
    with pytest.raises(TargetError, match="is not a file"):
        apply(root)


def test_link_in_place_of_a_file_is_neither_read_nor_written_through(root: Path):
    (root / "etc/munge").mkdir(parents=True)
    (root / "etc/shadow").write_text("secret")
    (root / KEY[1:]).symlink_to("../shadow")
    apply(root)
    copies = root / "var/lib/dalsegno/setup/backup"
    assert not copies.exists() and (root / "etc/shadow").read_text() == "secret"
    assert (root / KEY[1:]).read_text() == "new key" and not (root / KEY[1:]).is_symlink()
    ask(remove_request("c0ffee", str(root)))
    assert os.readlink(root / KEY[1:]) == "../shadow" and (root / "etc/shadow").read_text() == "secret"


# A host that is hostile


@pytest.mark.parametrize(
    "result",
    [
        {"changes": [{"kind": "planet", "name": "x", "what": "create"}]},
        {"changes": [1]},
        {"changes": [{}]},
        {"changes": 7},
        {"services": [1]},
        {"services": {"slurmd": 3}},
        {"left": 5},
    ],
)
def test_answer_that_makes_no_sense_is_an_error_of_that_host_only(result: object):
    with pytest.raises(TargetError, match="gpu-1: the setup program gave an invalid answer"):
        read_answer("gpu-1", json.dumps({"result": result}))


def test_deeply_nested_line_is_skipped():
    deep = "[" * 500_000
    assert read_step(deep) == ""
    assert read_answer("gpu-1", f'{{"result": {{}}}}\n{deep}\n').found


@pytest.mark.parametrize(
    "name",
    [
        "gpu-2 ldap.example.org", "gpu-2 NodeAddr=192.0.2.66", "gpu[1-500]", "a,b", "#", "", "localhost",
        "localhost.localdomain", "head", "gpu-1.example.org",
    ],
)  # fmt: skip
def test_host_whose_name_would_be_more_than_a_name_is_left_out(name: str):
    facts = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], hostname=name)}
    if name == "head":  # two machines have the same name, so it is unknown which is right
        facts["head"] = replace(HOSTS["head"], hostname="ip-10-0-0-1")
    faults = check_hosts(CLUSTER, facts)
    assert set(faults) == {"gpu-2"} and "calls itself" in faults["gpu-2"].what


def test_host_adds_no_name_of_another_domain_to_the_hosts_files():
    facts = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], hostname="deb.debian.org")}
    assert "debian.org" not in hosts_lines(replace(ON, facts=facts))


def test_host_cannot_make_a_user_of_the_cluster_a_system_account():
    cluster = replace(CLUSTER, users=(User("alice", (), ""),))
    facts = {**HOSTS, "gpu-2": replace(HOSTS["gpu-2"], users=(HostUser("alice", 0, 0),))}
    faults = check_accounts(cluster, facts, AssignedIds())
    assert set(faults) == {"gpu-2"} and "system account" in faults["gpu-2"].what


@pytest.mark.parametrize("group", ["sudo", "docker", "staff", "openldap"])
def test_privileged_group_must_be_allowed_by_name(group: str):
    with pytest.raises(TargetError, match=f"group `{group}` would give user `alice` rights"):
        refuse_privileges(replace(CLUSTER, users=(User("alice", (), "", groups=(group,)),)))
    refuse_privileges(replace(CLUSTER, users=(User("alice", (), "", groups=(group,), allow_privileged=(group,)),)))


def test_new_machine_with_the_name_of_one_that_left_gets_a_new_secret(tmp_path: Path):
    folder = SshFolder(tmp_path / "lab")
    write_secrets(folder, ClusterSecrets("key", "token", {"gpu-1": "one", "gpu-2": "two"}))
    write_secrets(folder, read_secrets(folder, ["gpu-1"]))
    again = read_secrets(folder, ["gpu-1", "gpu-2"])
    assert again.munge_key == "key" and again.agents["gpu-1"] == "one" and again.agents["gpu-2"] != "two"


@pytest.mark.parametrize(
    "key",
    [
        "ssh-ed25519 AAAA\n* ssh-ed25519 BBBB", "ssh-ed25519 AAAA evil.example.org", "@cert-authority * ssh-ed25519 A",
        "ssh-rsa AAAA", "ssh-ed25519", "",
    ],
)  # fmt: skip
def test_host_adds_nothing_but_its_own_key_to_the_known_hosts_of_others(key: str):
    answer = {"dalsegno": "inspection", "hostname": "gpu-2", "host_keys": [key, "ssh-ed25519 AAAAC3Nza+/x="]}
    facts = parse_inspection("gpu-2", Completed(("python3",), 0, json.dumps(answer)), 0.0)
    assert facts.host_keys == ("ssh-ed25519 AAAAC3Nza+/x=",)


def test_homes_are_not_created_where_users_could_put_something_in_their_place(tmp_path: Path):
    tmp_path.chmod(0o1777)
    with pytest.raises(Refused, match="users can change"):
        refuse_open(tmp_path)


def test_key_for_repairs_opens_no_shell_on_a_node():
    files = {file.path: file for file in node_parts("ssh-ed25519 AAAA dalsegno-lab").files}
    line = files["/root/.ssh/authorized_keys"]
    assert line.content == 'restrict,command="/opt/dalsegno/node-repair" ssh-ed25519 AAAA dalsegno-lab\n'
    assert line.block and line.mode == 0o600
    program = harmless(files["/opt/dalsegno/node-repair"].content)
    for asked in ("", "sh", "reboot; id", "reset --all", "reboot\nid"):
        done = subprocess.run(
            ["sh", "-c", program], env={"SSH_ORIGINAL_COMMAND": asked}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (2, "") and "only reboot and reset" in done.stderr


def harmless(text: str) -> str:
    """Return the program with its reboot and reset commands replaced by harmless ones, in case it accepts an order."""
    return text.replace("sleep 1; reboot; sleep 120; reboot -f", "true").replace("nvidia-smi --gpu-reset", "echo reset")
