"""Logins on ssh hosts: only with a job, if the cluster file says so, and accounts in LDAP. What hosts get, and what is
refused."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Directory, Group, Slurm, User
from dalsegno.system.processes import Completed, FakeRunner
from dalsegno.targets.ssh.desired import host_plan
from dalsegno.targets.ssh.directory import (
    DirectorySecrets,
    check_directory,
    directory_secrets,
    refuse_machine_groups,
    write_directory_secrets,
)
from dalsegno.targets.ssh.folder import SshFolder
from dalsegno.targets.ssh.logins import check_job_logins
from dalsegno.targets.ssh.people import AssignedIds
from dalsegno.targets.ssh.survey import refuse_impossible
from tests.targets.test_ssh_plans import CLUSTER, HOSTS, ON

PAM = {"/etc/pam.d/sshd": "@include common-account\n"}
FACTS = {name: replace(facts, files=PAM) for name, facts in HOSTS.items()}


def strict(cluster: Cluster = CLUSTER, user: str = "ops", **settings: object) -> Cluster:
    hosts = tuple(replace(host, user=user) for host in cluster.ssh.hosts)
    return replace(cluster, ssh=replace(cluster.ssh, hosts=hosts, logins_need_job=True, **settings))


def test_compute_nodes_refuse_users_without_a_job_and_admit_the_operator():
    on = replace(ON, cluster=strict(), facts=FACTS)
    plan = host_plan(on, "gpu-1")
    text = plan.file("/etc/pam.d/sshd").content
    assert "pam_slurm_adopt.so action_no_jobs=deny" in text and "quiet user = ops\n" in text
    assert "libpam-slurm-adopt" in plan.packages
    assert "PrologFlags=Contain\n" in plan.file("/etc/slurm/slurm.conf").content
    for host in ("head", "login-1"):
        assert "libpam-slurm-adopt" not in host_plan(on, host).packages
        assert all(file.path != "/etc/pam.d/sshd" for file in host_plan(on, host).files)


def test_plan_of_a_changed_host_stays_the_same():
    on = replace(ON, cluster=strict(), facts=FACTS)
    text = host_plan(on, "gpu-1").file("/etc/pam.d/sshd").content
    after = {**FACTS, "gpu-1": replace(FACTS["gpu-1"], files={"/etc/pam.d/sshd": text})}
    assert host_plan(replace(on, facts=after), "gpu-1").file("/etc/pam.d/sshd").content == text


def test_packages_of_the_file_are_trusted_to_have_the_module():
    on = replace(ON, cluster=strict(slurm_packages=("slurm-smd",), slurm_version="25.05.3"), facts=FACTS)
    assert "libpam-slurm-adopt" not in host_plan(on, "gpu-1").packages


def test_rule_is_refused_where_it_could_not_hold():
    assert check_job_logins(CLUSTER, HOSTS, tracked=False) == {}
    assert check_job_logins(strict(), FACTS, tracked=True) == {}
    faults = check_job_logins(strict(), FACTS, tracked=False)
    assert list(faults) == ["gpu-1", "gpu-2"] and "needs cgroups" in faults["gpu-1"].what
    assert "it has no /etc/pam.d/sshd" in check_job_logins(strict(), HOSTS, tracked=True)["gpu-2"].what
    other = replace(strict(), slurm=Slurm(extra={"PrologFlags": "Alloc"}))
    with pytest.raises(TargetError, match="needs the prolog flag Contain") as refused:
        check_job_logins(other, FACTS, tracked=True)
    assert refused.value.hint.startswith("write `PrologFlags: Alloc,Contain`")


# Accounts in LDAP

LDAP = replace(
    CLUSTER,
    directory=Directory(ldap=True, base="dc=example,dc=org"),
    groups=(Group("vision"),),
    users=(User("ada", (), "", groups=("vision",)),),
)
HELD = DirectorySecrets("password", "rootpw {SSHA}hash\n", "the CA", "certificate", "the key", "head 10.0.0.1")
WITH_NSS = {name: replace(facts, files={"/etc/nsswitch.conf": "passwd: files\n"}) for name, facts in HOSTS.items()}
IN_LDAP = replace(ON, cluster=LDAP, facts=WITH_NSS, directory=HELD)


def test_head_serves_the_directory_and_every_host_asks_it():
    head, node = host_plan(IN_LDAP, "head"), host_plan(IN_LDAP, "gpu-1")
    assert [service.name for service in head.services][:2] == ["slapd", "nslcd"], "before Slurm, which looks up users"
    assert [service.name for service in node.services][:1] == ["nslcd"]
    assert "slapd" in head.packages and "slapd" not in node.packages
    for plan in (head, node, host_plan(IN_LDAP, "login-1")):
        assert {"nslcd", "libnss-ldapd"} <= set(plan.packages)
        assert "uri ldaps://10.0.0.1:636/\n" in plan.file("/etc/nslcd.conf").content
        assert "passwd: files ldap\n" in plan.file("/etc/nsswitch.conf").content
        assert plan.groups == () and [user.directory for user in plan.users] == [True]


def test_secrets_of_the_directory_stay_on_the_head():
    head, node = host_plan(IN_LDAP, "head"), host_plan(IN_LDAP, "gpu-1")
    held = {"password\n", HELD.rootpw, HELD.key}
    assert not any(file.content in held for file in node.files)
    found = [file for file in head.files if file.content in held]
    assert len(found) == 3 and all(file.secret and file.mode == 0o600 for file in found)


def test_changed_accounts_are_written_again():
    def command(cluster: Cluster) -> str:
        commands = host_plan(replace(IN_LDAP, cluster=cluster), "head").commands
        return next(each.creates for each in commands if each.after == "slapd")

    assert command(LDAP) != command(replace(LDAP, users=(*LDAP.users, User("bob", (), ""))))


def test_secrets_are_made_once_and_again_for_another_address(tmp_path):
    made: list[str] = []

    def openssl(argv, stdin):
        for option in ("-keyout", "-out"):
            with open(argv[argv.index(option) + 1], "w") as file:
                file.write(f"{option} {len(made)}")
        made.append(argv[0])
        return Completed(argv, 0)

    folder, runner = SshFolder(tmp_path), FakeRunner(openssl)
    folder.secret.mkdir()
    first = directory_secrets(folder, LDAP, runner)
    write_directory_secrets(folder, first)
    assert directory_secrets(folder, LDAP, runner) == first and made == ["openssl"] * 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.secret.iterdir())
    moved = replace(LDAP, ssh=replace(LDAP.ssh, hosts=(replace(LDAP.ssh.hosts[0], address="10.9.9.9"),)))
    assert directory_secrets(folder, moved, runner).names == "head 10.9.9.9" and len(made) == 4


@pytest.mark.parametrize(("address", "known"), [("10.9.9.9", "IP Address:10.9.9.9"), ("gpu.lab", "DNS:gpu.lab")])
def test_certificate_of_the_head_has_its_address_or_its_name(tmp_path, address: str, known: str):
    cluster = replace(LDAP, ssh=replace(LDAP.ssh, hosts=(replace(LDAP.ssh.hosts[0], address=address),)))
    made = directory_secrets(SshFolder(tmp_path), cluster).certificate
    shown = subprocess.run(
        ["openssl", "x509", "-noout", "-ext", "subjectAltName"], input=made, text=True, capture_output=True, check=True
    )
    assert known in shown.stdout and "DNS:head" in shown.stdout


def test_directory_is_refused_where_it_could_not_work():
    assert check_directory(CLUSTER, HOSTS) == {} and check_directory(LDAP, WITH_NSS) == {}
    rocky = {**WITH_NSS, "gpu-1": replace(WITH_NSS["gpu-1"], os_id="rocky")}
    assert "on Debian and Ubuntu only, and it has rocky" in check_directory(LDAP, rocky)["gpu-1"].what
    refuse_machine_groups(LDAP, AssignedIds(gids={"vision": 1020001}))
    with pytest.raises(TargetError, match="group `vision` is in the files of the hosts"):
        refuse_machine_groups(LDAP, AssignedIds())
    with pytest.raises(TargetError, match="`directory` cannot change while the cluster is up"):
        refuse_impossible(CLUSTER, replace(CLUSTER, directory=LDAP.directory))
