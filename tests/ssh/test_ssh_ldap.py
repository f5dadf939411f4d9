"""Accounts in LDAP on virtual hosts that are reached over ssh: slapd is on the head, and every host asks it.

The tests share a head, a login host and a node, and run in order. The last one removes the cluster.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.setup.inspect import program
from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import make_key, reason_to_skip, running_hosts
from tests.ssh.test_ssh_cluster import ranks_of_a_run, ssh_as
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
MORE = """\
users: [{name: ada, full_name: Ada Lind}]
storage: [{name: team, mount: /shared, type: existing, home: true}]
directory: {kind: ldap, base: "dc=example,dc=org"}
slurm: {accounting: false}
monitoring: {enabled: false}
health: {mode: off}
login: {names: [login]}
"""
FOLDER = "/var/lib/dalsegno/clusters/lab"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    if not all(map(Path.exists, map(Path, ("/usr/sbin/nslcd", "/usr/sbin/slapd")))) or not shutil.which("openssl"):
        pytest.skip("needs slapd, nslcd and openssl")
    folder = tmp_path_factory.mktemp("ldap")
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with running_hosts(3, folder / "hosts", names=["head", "login", "n1"], shared=shared) as rack:
        operator = Operator(folder, rack)
        operator.clear_hosts()
        operator.write(nodes="n1", more=MORE)
        operator.up()
        yield operator


def everywhere(lab: Operator, *argv: str) -> set[str]:
    return {host.run("sh", "-c", f"{' '.join(argv)} || true") for host in lab.rack.hosts}


def test_user_of_the_file_is_found_in_the_directory_by_every_host(lab):
    assert everywhere(lab, "getent", "passwd", "ada") == {"ada:*:20001:20001:Ada Lind:/shared/ada:/bin/bash\n"}
    assert everywhere(lab, "grep", "^ada:", "/etc/passwd", "/etc/group") == {""}
    assert lab.on_head("stat", "-c", "%u:%g:%a", "/shared/ada") == "20001:20001:700\n"
    assert lab.on_head("runuser", "-u", "ada", "--", "srun", "id", "-un") == "ada\n"


def test_user_added_by_command_logs_in_and_runs_jobs(lab):
    key = lab.folder / "bea-key"
    make_key(key, comment="bea@desk")
    lab.dalsegno("group", "add", "vision")
    public = Path(f"{key}.pub").read_text()
    lab.dalsegno("user", "add", "bea", "--group", "vision", "--ssh-key", "-", stdin=public)
    assert everywhere(lab, "id", "bea") == {"uid=20002(bea) gid=20002(bea) groups=20002(bea),1020001(vision)\n"}
    assert ssh_as(lab, "bea", key, "ssh", "-o", "BatchMode=yes", "n1", "hostname; pwd").out == "n1\n/shared/bea\n"
    assert ssh_as(lab, "bea", key, "srun", "id", "-Gn").out == "bea vision\n"
    assert ranks_of_a_run(lab, "bea", key, 1) == ["rank 0 of 1"]
    assert "nothing to do" in lab.up().err


def test_user_works_on_the_login_host_and_reaches_nodes_from_there(lab):
    key = lab.folder / "bea-key"
    assert ssh_as(lab, "bea", key, "hostname", host="login").out == "login\n"
    there = ssh_as(lab, "bea", key, "ssh", "-o", "BatchMode=yes", "n1", "hostname; pwd", host="login")
    assert there.out == "n1\n/shared/bea\n", there.err
    assert ssh_as(lab, "bea", key, "srun", "hostname", host="login").out == "n1\n"
    assert ranks_of_a_run(lab, "bea", key, 1, host="login") == ["rank 0 of 1"]
    assert lab.rack["login"].run("sh", "-c", "pidof slurmd slurmctld slapd || true") == ""


def test_secrets_of_the_directory_are_for_root_and_slapd_only(lab):
    password = lab.on_head("cat", f"{FOLDER}/secret/ldap-password").strip()
    assert password and password not in lab.on_head("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    files = "ldap secret/ldap-password ldap/tls/server.key ldap/rootpw.conf ldap/slapd.conf"
    found = lab.on_head("sh", "-c", f"cd {FOLDER}; stat -c '%a %U %G' {files}")
    slapd = "600 openldap openldap"
    assert found.splitlines() == ["750 root openldap", "600 root root", slapd, slapd, "640 root openldap"]
    ask = f"ldapsearch -x -LLL -H ldap://{lab.rack['head'].address} -b dc=example,dc=org"
    assert "uid: ada" in lab.rack["n1"].run("sh", "-c", f"{ask} uid=ada uid")
    refused = lab.rack["n1"].run("sh", "-c", f"{ask} -D cn=admin,dc=example,dc=org -w wrong 2>&1 || true")
    assert "Confidentiality required" in refused, "no password is accepted in clear text"


def test_host_does_not_trust_another_server(lab):
    node, ca = lab.rack["n1"], f"{FOLDER}/ldap-ca.pem"

    def restart_nslcd() -> None:
        before = node.run("pidof", "nslcd")
        node.run("sh", "-c", "kill $(pidof nslcd)")
        eventually(lambda: node.run("sh", "-c", "pidof nslcd || true") not in ("", before))
        eventually(lambda: node.run("sh", "-c", "ls /run/nslcd/socket || true"))

    other = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout /dev/null -subj /CN=other"
    )
    node.run("sh", "-c", f"{other} -out {ca} 2>/dev/null")
    restart_nslcd()
    assert node.run("sh", "-c", "getent passwd ada || true") == ""
    assert node.run("getent", "passwd", "root").startswith("root:")
    lab.up()
    restart_nslcd()
    assert eventually(lambda: node.run("sh", "-c", "getent passwd ada || true").startswith("ada:"))


def test_removed_user_is_gone_on_every_host(lab):
    lab.dalsegno("user", "rm", "bea")
    assert everywhere(lab, "getent", "passwd", "bea") == {""}
    assert lab.on_head("stat", "-c", "%u", "/shared/bea") == "20002\n"


def test_down_restores_the_hosts_and_they_remember_the_uids(lab):
    lab.dalsegno("down", "--yes")
    for host in lab.rack.hosts:
        assert "ldap" not in host.run("cat", "/etc/nsswitch.conf")
        assert host.run("sh", "-c", "pidof slapd nslcd || true") == ""
    facts = json.loads(lab.rack["head"].run("python3", "-", stdin=program().decode()))
    assert {"name": "ada", "uid": 20001, "gid": 20001, "ours": True} in facts["users"], "a new user gets another uid"
