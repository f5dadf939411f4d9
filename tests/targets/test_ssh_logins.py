"""Logins on ssh hosts that the cluster file ties to jobs: what compute nodes get, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, Slurm
from dalsegno.targets.ssh.desired import host_plan
from dalsegno.targets.ssh.logins import check_job_logins
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
