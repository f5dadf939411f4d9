"""The systems of ssh hosts: which are used, with which packages, and what is said to be missing on the others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.setup.host_inspector import parse_os_release
from dalsegno.setup.inspect import HostFacts
from dalsegno.targets.ssh.desired import host_plan
from dalsegno.targets.ssh.plan import check_hosts, check_monitoring
from dalsegno.targets.ssh.releases import slurm_version
from tests.setup.test_inspect import inspect_this_machine
from tests.targets.test_ssh_plans import CLUSTER, HOSTS, ON

RECORDED = Path(__file__).parents[1] / "recorded"
EPEL = (
    ("mariadb-server", "10.5.27-1.el9_5"), ("munge", "0.5.13-13.el9"), ("slurm", "22.05.9-1.el9"),
    ("slurm-slurmctld", "22.05.9-1.el9"), ("slurm-slurmd", "22.05.9-1.el9"), ("slurm-slurmdbd", "22.05.9-1.el9"),
)  # fmt: skip


def hosts_of(system: str, **more: object) -> dict[str, HostFacts]:
    """Return the hosts of the cluster with another system, as its /etc/os-release describes it."""
    found = parse_os_release((RECORDED / "os-release" / system).read_text())
    same = {"os_id": found["os_id"], "os_version": found["os_version"], "os_like": tuple(found["os_like"]), **more}
    return {name: replace(each, **same) for name, each in HOSTS.items()}  # type: ignore[arg-type]


def texts(faults: dict[str, DalsegnoError]) -> dict[str, str]:
    return {host: error.what for host, error in faults.items()}


@pytest.mark.parametrize(
    ("system", "id", "version", "like"),
    [
        ("debian-12", "debian", "12", []),
        ("ubuntu-22.04", "ubuntu", "22.04", ["debian"]),
        ("ubuntu-24.04", "ubuntu", "24.04", ["debian"]),
        ("rocky-9.6", "rocky", "9.6", ["rhel", "centos", "fedora"]),
        ("rhel-9.4", "rhel", "9.4", ["fedora"]),
    ],
)
def test_system_is_read_from_os_release(system, id, version, like):
    found = parse_os_release((RECORDED / "os-release" / system).read_text())
    assert (found["os_id"], found["os_version"], found["os_like"]) == (id, version, like)


def test_ubuntu_24_04_is_used_with_the_packages_of_the_debian_family():
    facts = hosts_of("ubuntu-24.04")
    assert check_hosts(CLUSTER, facts) == {}
    assert str(slurm_version(facts["head"], CLUSTER.ssh)) == "23.11.4"
    plan = host_plan(replace(ON, facts=facts), "gpu-1")
    assert plan.packages == ("munge", "slurm-client", "slurm-wlm-basic-plugins", "slurmd", "htop")


def test_ubuntu_22_04_is_refused_unless_the_file_names_a_later_slurm():
    facts = hosts_of("ubuntu-22.04")
    found = check_hosts(CLUSTER, facts)
    assert texts(found)["gpu-1"] == "gpu-1: ubuntu 22.04 has Slurm 21.08.5, and 22.05 is the oldest that works"
    assert "slurm_packages" in found["gpu-1"].hint
    later = replace(CLUSTER.ssh, slurm_packages=("slurm-smd", "slurm-smd-slurmd"), slurm_version="25.05.3")
    assert check_hosts(replace(CLUSTER, ssh=later), facts) == {}


@pytest.mark.parametrize("system", ["rocky-9.6", "rhel-9.4"])
def test_rhel_family_is_used_if_its_repositories_have_the_packages(system):
    facts = hosts_of(system, available=EPEL)
    assert check_hosts(CLUSTER, facts) == {}
    on = replace(ON, facts=facts)
    assert str(on.slurm) == "22.05.9"
    plan = host_plan(on, "head")
    assert plan.packages[:5] == ("munge", "slurm", "slurm-slurmctld", "slurm-slurmdbd", "mariadb-server")
    assert any(file.path == "/etc/sysconfig/slurmdbd" for file in plan.files)


def test_each_host_of_the_rhel_family_is_refused_with_the_packages_that_it_lacks():
    facts = hosts_of("rhel-9.4", packages=(("munge", "0.5.13-13.el9"),), available=EPEL[:1])
    found = check_hosts(CLUSTER, facts)
    assert texts(found) == {
        "head": "head: rhel 9.4 has no package slurm, slurm-slurmctld, slurm-slurmdbd",
        "login-1": "login-1: rhel 9.4 has no package slurm",
        "gpu-1": "gpu-1: rhel 9.4 has no package slurm, slurm-slurmd",
        "gpu-2": "gpu-2: rhel 9.4 has no package slurm, slurm-slurmd",
    }
    assert "epel-release" in found["gpu-1"].hint and "ssh.slurm_packages" in found["gpu-1"].hint


def test_packages_that_the_file_names_are_left_to_dnf():
    named = replace(CLUSTER.ssh, slurm_packages=("slurm-25.05.3", "slurm-slurmd-25.05.3"), slurm_version="25.05.3")
    facts = hosts_of("rocky-9.6", available=EPEL[:2])
    assert check_hosts(replace(CLUSTER, ssh=named), facts) == {}


def test_package_files_that_the_file_names_must_be_on_every_host():
    path = "/srv/slurm/slurm-smd_25.05.3-1_amd64.deb"
    named = replace(CLUSTER, ssh=replace(CLUSTER.ssh, slurm_packages=(path,)))
    found = check_hosts(named, hosts_of("debian-12"))
    assert texts(found)["gpu-1"] == f"gpu-1: {path} is not a package there"
    facts = hosts_of("debian-12", available=((path, "25.05.3-1"),))
    assert check_hosts(named, facts) == {}
    assert str(slurm_version(facts["head"], named.ssh)) == "25.05.3"
    assert host_plan(replace(ON, cluster=named, facts=facts), "gpu-1").packages == ("munge", path, "htop")


def test_version_of_a_named_package_is_the_release_of_slurm():
    pinned = replace(CLUSTER.ssh, slurm_packages=("slurm-smd=25.05.3-1", "slurm-smd-slurmd=25.05.3-1"))
    assert str(slurm_version(hosts_of("ubuntu-22.04")["head"], pinned)) == "25.05.3"


@pytest.mark.parametrize(
    ("names", "release"),
    [
        (("libpmix2=5.0.1-1", "slurmd=24.11.5-1"), "24.11.5"),
        (("munge=0.5.15-4", "made-slurm-client=24.11.5-1"), "24.11.5"),
        (("prometheus-slurm-exporter=0.20", "slurm-24.05.1"), "23.11.4"),
        (("/srv/libpmix2_5.0.1.deb", "/srv/slurm-smd_25.05.3-1_amd64.deb"), "25.05.3"),
        (("/srv/munge-0.5.15.rpm", "/srv/slurm-25.05.4-1.el9.x86_64.rpm"), "25.05.4"),
    ],
)
def test_only_packages_of_slurm_decide_its_release(names, release):
    set_in_file = "23.11.4" if release == "23.11.4" else ""
    available = tuple(zip(FILES, ("5.0.1", "25.05.3-1", "0.5.15", "25.05.4-1"), strict=True))
    facts = hosts_of("ubuntu-24.04", available=available)["head"]
    assert str(slurm_version(facts, replace(CLUSTER.ssh, slurm_packages=names, slurm_version=set_in_file))) == release


FILES = (
    "/srv/libpmix2_5.0.1.deb", "/srv/slurm-smd_25.05.3-1_amd64.deb",
    "/srv/munge-0.5.15.rpm", "/srv/slurm-25.05.4-1.el9.x86_64.rpm",
)  # fmt: skip


def test_version_without_numbers_is_refused_on_each_host():
    named = replace(CLUSTER, ssh=replace(CLUSTER.ssh, slurm_packages=("slurmd=latest",)))
    found = check_hosts(named, hosts_of("debian-12"))
    assert texts(found)["gpu-1"] == "gpu-1: no Slurm version in 'latest'" and "slurmd=24.11.5-1" in found["gpu-1"].hint


def test_package_files_that_users_can_change_are_refused():
    path = "/home/ann/slurm.deb"
    named = replace(CLUSTER, ssh=replace(CLUSTER.ssh, slurm_packages=(path,)))
    found = check_hosts(named, hosts_of("debian-12", untrusted=(path,)))
    assert texts(found)["gpu-1"] == f"gpu-1: users can change {path}, or a folder above"


def test_python_of_rhel_9_is_refused_with_the_package_of_a_later_one():
    found = check_hosts(CLUSTER, hosts_of("rocky-9.6", packages=EPEL, python=(3, 9, 21)))
    assert texts(found)["gpu-1"] == "gpu-1: Python 3.9.21 is too old"
    assert "dnf install python3.12" in found["gpu-1"].hint


def test_prometheus_is_refused_on_the_rhel_family():
    watched = replace(CLUSTER, monitoring=replace(CLUSTER.monitoring, prometheus=True))
    found = check_monitoring(watched, hosts_of("rocky-9.6", packages=EPEL))
    assert texts(found)["gpu-1"] == "gpu-1: rocky has no packages of Prometheus and node_exporter"


def test_inspection_asks_dnf_for_packages_that_are_not_installed(tmp_path):
    asked = tmp_path / "asked"
    programs = {
        "rpm": "printf 'munge\\t0.5.13-13.el9\\n'; echo 'package slurm is not installed'",
        "dnf": f'echo "$@" > {asked}; cat {RECORDED}/dnf-4.14.0/repoquery.txt',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cat").symlink_to(shutil.which("cat") or "")  # but no dpkg-query, as on the RHEL family
    facts = inspect_this_machine({"PATH": str(tmp_path)}, "munge", "slurm", "slurm-slurmd")
    assert facts.packages == (("munge", "0.5.13-13.el9"),)
    assert ("slurm-slurmd", "22.05.9-1.el9") in facts.available
    assert asked.read_text().split()[-2:] == ["slurm", "slurm-slurmd"], "munge is installed"
