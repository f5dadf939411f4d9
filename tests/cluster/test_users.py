"""Users that are added to a running cluster: they run jobs, and cannot reach the files and jobs of others."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.system.machine import program
from dalsegno.targets.folder import read_applied
from dalsegno.targets.local.directory import OWNERS, open_directory
from dalsegno.targets.local.folder import Folder, read_state
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="users of their own need virtual hosts, and these need root"),
]

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIC1aPzJYH3oHhY0Y5cZ0Zk1zq8zq8zq8zq8zq8zq8zq8 ada@laptop"
FILE = f"""
name: one
target: local
partitions:
  - {{name: train, nodes: 2, cpus: 4, memory: 2G, gpus: 4, gpu_type: h100}}
slurm: {{enforce: [associations, limits, qos], qos: [{{name: high}}]}}
accounts: [{{name: lab}}, {{name: other}}]
users:
  - {{name: ada, full_name: "Ada O'Neil (PI)", ssh_keys: ["{KEY}"], accounts: [lab]}}
groups: [{{name: team, gid: 5005}}]
health: {{mode: observe}}
"""
LDAP = f"{FILE}directory: {{kind: ldap}}\n"


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cli]:
    """Return a cluster whose accounts are in LDAP, with one user in its file."""
    if program("slapd") is None:
        pytest.skip("slapd is not installed: `./test` installs it")
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(LDAP))
        yield cli


def folder(cli: Cli) -> Folder:
    return Folder(cli.home / "clusters/one")


def in_directory(cli: Cli) -> dict[str, tuple[int, str]]:
    """Return the uid and the full name of every user in the directory."""
    applied, state = read_applied(folder(cli)), read_state(folder(cli))
    assert applied is not None and state is not None
    users = open_directory(applied, folder(cli), state.placement).read().users
    return {user.name: (user.uid, user.full_name) for user in users.values()}


def associations(cli: Cli, user: str) -> list[str]:
    """Return the accounts of a user in Slurm's database, with their limits and QOS."""
    fields = "format=Account,GrpTRES,QOS"
    return cli.ok("shell", "--", "sacctmgr", "-nP", "show", "assoc", f"user={user}", fields).split()


def as_user(cli: Cli, user: str, *command: str) -> str:
    return cli.ok("shell", "--user", user, "--", *command)


def test_users_of_the_file_are_in_the_directory_and_on_every_host(cluster: Cli) -> None:
    assert in_directory(cluster) == {"ada": (20001, "Ada O'Neil (PI)")}
    found = as_user(cluster, "ada", "srun", "-N2", "-w", "train-[1-2]", "getent", "passwd", "ada")
    assert found.split("\n")[0].split(":")[4] == "Ada O'Neil (PI)"
    home = folder(cluster).homes / "ada"
    assert (home.stat().st_uid, stat.S_IMODE(home.stat().st_mode)) == (20001, 0o700)
    assert KEY in (home / ".ssh/authorized_keys").read_text()
    assert "nothing to do" in cluster.ok("plan", cluster.file(LDAP))


def test_secrets_of_the_directory_can_be_read_by_slapd_and_root_only(cluster: Cli) -> None:
    ldap = folder(cluster).ldap
    for secret in (ldap / "rootpw.conf", ldap / "tls/server.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert secret.owner() in OWNERS, "slapd reads it after it has given up the rights of root"


def test_added_user_works_and_cannot_reach_others(cluster: Cli) -> None:
    keys = cluster.home / "bea.pub"
    keys.write_text(f"# laptop\n{KEY}\n")
    said = cluster.run(
        "user", "add", "bea", "--full-name", "Bea Öst", "--ssh-key", str(keys), "--account", "lab", "--qos", "high",
        "--max-gpus", "2", "--group", "team",
    )  # fmt: skip
    assert said.code == 0 and "adds user bea (uid 20002)" in said.err and "bea joins team" in said.err, said.err
    assert in_directory(cluster)["bea"] == (20002, "Bea Öst")
    # She runs jobs as herself, on every node.
    assert as_user(cluster, "bea", "srun", "-N2", "id", "-un").split() == ["bea", "bea"]
    assert as_user(cluster, "bea", "srun", "id", "-Gn").split() == ["bea", "team"]
    assert associations(cluster, "bea") == ["lab|gres/gpu=2|high"]
    # She can neither read the files of other users nor cancel their jobs.
    as_user(cluster, "ada", "sh", "-c", "echo mine > ~/secret; chmod 644 ~/secret")
    secret = str(folder(cluster).homes / "ada/secret")
    read = cluster.run("shell", "--user", "bea", "--", "srun", "cat", secret)
    assert read.code != 0 and "Permission denied" in read.err and "mine" not in read.out
    job = as_user(cluster, "ada", "sbatch", "--parsable", "-o/dev/null", "--wrap", "sleep 300").strip()
    cancel = cluster.run("shell", "--user", "bea", "--", "scancel", job)
    assert "Access/permission denied" in cancel.err + cancel.out
    assert as_user(cluster, "ada", "squeue", "-h", "-j", job, "-o", "%u").strip() == "ada"
    as_user(cluster, "ada", "scancel", job)
    # Her limit holds.
    too_many = as_user(cluster, "bea", "sbatch", "--parsable", "--gpus-per-node=4", "-o/dev/null", "--wrap", "true")
    why = "AssocGrpGRES"
    eventually(lambda: why in as_user(cluster, "bea", "squeue", "-h", "-j", too_many.strip(), "-o", "%r"))
    assert "has jobs" in cluster.run("user", "rm", "bea").err
    as_user(cluster, "bea", "scancel", too_many.strip())


def test_file_and_commands_agree(cluster: Cli) -> None:
    assert "nothing to do" in cluster.ok("plan", cluster.file(LDAP))
    users = {each["name"]: each for each in json.loads(cluster.ok("user", "ls", "--json"))}
    assert (users["ada"]["from"], users["bea"]["from"]) == ("file", "command")
    assert users["bea"]["max_gpus"] == 2 and users["bea"]["entry"] == "uid=bea,ou=People,dc=local"
    job = as_user(cluster, "ada", "sbatch", "--parsable", "-o/dev/null", "--wrap", "sleep 300").strip()
    refused = cluster.run("user", "rm", "ada")  # the error names the file first, because ending her job would not help
    as_user(cluster, "ada", "scancel", job)
    assert refused.code == 2 and "user `ada` is in the cluster file" in refused.err
    assert "bea" in cluster.ok("group", "ls") and "Bea Öst" in cluster.ok("user", "show", "bea")


def test_user_is_changed_and_the_second_change_does_nothing(cluster: Cli) -> None:
    change = ("user", "edit", "bea", "--full-name", "Bea Öst-Ek", "--max-gpus", "none", "--group", "", "--ssh-key", "")
    assert "changes user bea (full name, SSH keys)" in cluster.run(*change).err
    assert in_directory(cluster)["bea"] == (20002, "Bea Öst-Ek")
    assert as_user(cluster, "bea", "id", "-Gn").split() == ["bea"]
    assert KEY not in (folder(cluster).homes / "bea/.ssh/authorized_keys").read_text()
    assert "nothing to do" in cluster.run(*change).err
    cluster.ok("user", "edit", "bea", "--account", "other")
    assert associations(cluster, "bea") == ["other||high"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["bea"], "there is a user `bea` already"),
        (["x,ou=People"], "`name` cannot be `x,ou=People`"),
        (["games"], "`games` is a system account of this machine"),
        (["zoe", "--uid", "65534"], "uid 65534 of user `zoe` belongs to nobody on this machine"),
        (["zoe", "--uid", "20001"], "uid 20001 of user `zoe` belongs to ada, who is or was a user of the cluster"),
        (["zoe", "--group", "9876"], "group `privilege` would give user `zoe` rights over this machine"),
    ],
)
def test_refused_user_changes_nothing(cluster: Cli, options: list[str], says: str) -> None:
    refused = cluster.run("user", "add", *options)
    assert refused.code in (1, 2) and says in refused.err and "hint: " in refused.err, refused.err
    assert set(in_directory(cluster)) == {"ada", "bea"}


def test_removed_user_keeps_home_and_uid(cluster: Cli) -> None:
    as_user(cluster, "bea", "sh", "-c", "echo kept > ~/file")
    said = cluster.run("user", "rm", "bea").err
    home = folder(cluster).homes / "bea"
    assert "removes user bea" in said and f"kept {home}" in said
    assert (home / "file").read_text() == "kept\n" and set(in_directory(cluster)) == {"ada"}
    assert "has no user `bea`" in cluster.run("shell", "--user", "bea", "--", "true").err
    assert associations(cluster, "bea") == []
    cluster.ok("user", "add", "zoe")
    assert in_directory(cluster)["zoe"][0] == 20003  # bea's uid is not reused
    cluster.ok("user", "rm", "zoe", "--remove-home")
    assert not (folder(cluster).homes / "zoe").exists()
    assert "nothing to do" in cluster.ok("plan", cluster.file(LDAP))


def test_group_that_may_run_containers_on_oci_is_given_if_it_is_allowed_by_name(cluster: Cli) -> None:
    refused = cluster.run("user", "add", "kim", "--group", "9876", "--allow-privileged", "docker")
    assert refused.code == 1 and "group `privilege` would give user `kim` rights over this machine" in refused.err
    cluster.ok("user", "add", "kim", "--group", "9876", "--allow-privileged", "privilege")
    assert as_user(cluster, "kim", "srun", "-N2", "id", "-Gn").split() == ["kim", "privilege"] * 2
    ids = as_user(cluster, "kim", "srun", "id", "-G").split()
    assert ids[1:] == ["9876"] and ids[0] != "9876", "a further group, not the first one"
    assert "privilege" not in as_user(cluster, "ada", "id", "-Gn")
    cluster.ok("user", "rm", "kim", "--remove-home")
    assert "nothing to do" in cluster.ok("plan", cluster.file(LDAP))


SSHD = """
Port 2222
HostKey {folder}/host_key
PidFile none
PasswordAuthentication no
UsePAM no
"""


@pytest.mark.skipif(program("sshd") is None, reason="sshd is not installed: `./test` installs it")
def test_added_user_logs_in_with_the_key(cluster: Cli) -> None:
    place = cluster.home / "ssh"
    place.mkdir(mode=0o700)
    for name in ("host_key", "sam", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / name)], check=True)
    (place / "sshd.conf").write_text(SSHD.format(folder=place))
    cluster.ok("user", "add", "sam", "--ssh-key", str(place / "sam.pub"))
    state = read_state(folder(cluster))
    assert state is not None
    start = f"mkdir -p /run/sshd && exec {program('sshd')} -D -e -f {place}/sshd.conf"
    server = cluster.start("shell", "--node", "head", "--", "sh", "-c", start)

    def login(key: str, user: str) -> subprocess.CompletedProcess[str]:
        options = [
            "-oBatchMode=yes",
            "-oStrictHostKeyChecking=no",
            f"-oUserKnownHostsFile={place}/known",
            "-oIdentityAgent=none",
        ]
        argv = [
            "ssh",
            "-F",
            "none",
            *options,
            "-i",
            str(place / key),
            "-p",
            "2222",
            f"{user}@{state.placement.addresses['head']}",
        ]
        return subprocess.run([*argv, "id -un; pwd"], capture_output=True, text=True, timeout=30, check=False)

    try:
        eventually(lambda: login("sam", "sam").returncode == 0)
        assert login("sam", "sam").stdout.split() == ["sam", str(folder(cluster).homes / "sam")]
        assert "Permission denied" in login("other", "sam").stderr
        assert "Permission denied" in login("sam", "ada").stderr
        cluster.ok("user", "edit", "sam", "--ssh-key", "")
        assert "Permission denied" in login("sam", "sam").stderr
    finally:
        server.terminate()
        server.wait(20)
    cluster.ok("user", "rm", "sam", "--remove-home")


def test_directory_that_stopped_is_started_again_with_its_accounts(cluster: Cli) -> None:
    pid = folder(cluster).ldap / "db/slapd.pid"
    cluster.ok("shell", "--node", "head", "--", "sh", "-c", f"kill -9 $(cat {pid})")
    eventually(lambda: "starts slapd on head" in cluster.ok("plan", cluster.file(LDAP)))
    assert "user" not in cluster.ok("plan", cluster.file(LDAP))
    cluster.ok("up", cluster.file(LDAP))
    assert set(in_directory(cluster)) == {"ada"}
    assert "nothing to do" in cluster.ok("plan", cluster.file(LDAP))


def test_directory_keeps_its_secrets(cluster: Cli) -> None:
    for path in (folder(cluster).ldap, folder(cluster).ldap_password, folder(cluster).secret / "ldap-ca.key"):
        assert path.stat().st_mode & 0o007 == 0
    password = folder(cluster).ldap_password.read_text().strip()
    processes = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert not any(password.encode() in _read(path) for path in processes)
    read = cluster.run("shell", "--user", "ada", "--", "ls", str(folder(cluster).ldap))
    assert "Permission denied" in read.err


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_cluster_without_ldap_has_the_same_commands(cli: Cli) -> None:
    cli.ok("up", cli.file(FILE))
    cli.ok("group", "add", "extra")
    said = cli.run("user", "add", "bea", "-g", "extra")
    assert said.code == 0 and "adds user bea (uid 20002)" in said.err, said.err
    assert as_user(cli, "bea", "srun", "id", "-Gn").split() == ["bea", "extra"]
    cli.ok("up", cli.file(FILE))  # she stays, although the file does not name her
    assert as_user(cli, "bea", "srun", "hostname").startswith("train-")
    cli.ok("group", "edit", "extra", "--remove", "bea")
    cli.ok("group", "rm", "extra")
    assert as_user(cli, "bea", "id", "-Gn").split() == ["bea"]
    cli.ok("user", "rm", "bea", "--remove-home")
    assert [each["name"] for each in json.loads(cli.ok("user", "ls", "--json"))] == ["ada"]
    assert "nothing to do" in cli.ok("plan", cli.file(FILE))
