"""Packages through the real dnf and rpm, on a virtual host from which apt and dpkg are hidden.

Debian has dnf, rpm and createrepo-c. The host takes made-up packages from a repository in a folder. This shows our use
of dnf. It does not show that a distribution of the RHEL family has the packages of a cluster.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.setup.delivery import (
    Answer,
    ChangeAction,
    ChangeKind,
    MachineChange,
    applier_argv,
    apply_request,
    compare_request,
    read_answer,
    remove_request,
)
from dalsegno.setup.inspect import program
from dalsegno.setup.node_plan import NodePlan
from tests.machines.chroot import folder
from tests.ssh.hosts import VirtualHost, reason_to_skip, running_hosts

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]
SPEC = """\
Name: {name}
Version: {version}
Release: 1
Summary: A made-up package
License: MIT
BuildArch: noarch
%description
A made-up package.
%install
mkdir -p %{{buildroot}}/usr/share/{name}
echo {version} > %{{buildroot}}/usr/share/{name}/version
%files
/usr/share/{name}
"""
REPOSITORY = "[made-up]\nname=made-up\nbaseurl=file:///srv/repository\ngpgcheck=0\n"
# Debian's rpm keeps its database in the home of each user. The RHEL family has it in /var/lib.
DATABASE = "%_dbpath /var/lib/rpm\n"
SET_UP = """\
set -e
export DEBIAN_FRONTEND=noninteractive
dpkg --install /shared/*.deb
mkdir -p /srv/repository /etc/yum.repos.d /var/lib/rpm
for spec in /srv/*.spec; do
  rpmbuild -bb --quiet --define '_topdir /srv/build' --define '_rpmdir /srv/repository' "$spec"
done
createrepo_c --quiet /srv/repository
mv /usr/bin/dpkg-query /usr/bin/apt-get /srv
"""


def debian_packages() -> Path:
    """Return the folder with dnf, rpm, createrepo-c and what they need. It is filled once, from Debian's mirror."""
    debs = folder() / "dnf"
    if not (debs / "complete").exists():
        (debs / "partial").mkdir(parents=True, exist_ok=True)
        words = ["apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", "--reinstall"]
        words += ["-o", f"Dir::Cache::archives={debs}", "install", "dnf", "rpm", "createrepo-c"]
        subprocess.run(words, check=True, timeout=300, stdin=subprocess.DEVNULL)
        (debs / "complete").touch()
    return debs


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHost]:
    """A host with dnf and a repository that has `tiny` in two versions, and `other`."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with running_hosts(1, tmp_path_factory.mktemp("dnf") / "hosts", shared=debian_packages()) as rack:
        found = rack.hosts[0]
        texts = {f"/srv/{name}-{version}.spec": SPEC.format(name=name, version=version) for name, version in RPMS}
        for path, text in {**texts, "/etc/rpm/macros": DATABASE, "/etc/yum.repos.d/made-up.repo": REPOSITORY}.items():
            found.run("sh", "-c", f"mkdir -p $(dirname {path}); cat > {path}", stdin=text)
        found.run("sh", "-c", SET_UP)
        yield found


RPMS = [("tiny", "1.0"), ("tiny", "2.0"), ("other", "1.0"), ("third", "1.0")]


def ask(host: VirtualHost, request: bytes) -> Answer:
    done = host.run("sh", "-c", f"{shlex.join(applier_argv())} || true", stdin=request.decode())
    return read_answer(host.name, done)


def plan(*packages: str) -> NodePlan:
    return NodePlan("lab", "c0ffee", "host-1", packages=packages)


def installing(*names: str) -> tuple[MachineChange, ...]:
    return tuple(MachineChange(ChangeKind.PACKAGE, name, ChangeAction.INSTALL) for name in names)


def policy(host: VirtualHost) -> str:
    """Return the policy for starting daemons, which the host may have from the machine."""
    return host.run("sh", "-c", "cat /usr/sbin/policy-rc.d 2>/dev/null || true")


def inspected(host: VirtualHost, *names: str) -> dict[str, dict[str, str]]:
    facts = json.loads(host.run("python3", "-", *names, stdin=program().decode()))
    return {"installed": facts["packages"], "available": facts["available"]}


def test_inspection_finds_packages_that_dnf_can_install(host):
    names = ("tiny", "other", "missing")
    assert inspected(host, *names) == {"installed": {}, "available": {"tiny": "2.0-1", "other": "1.0-1"}}


def test_packages_of_a_plan_are_installed_once(host):
    wanted, before = plan("tiny=1.0-1", "other"), policy(host)
    assert ask(host, compare_request(wanted)).changes == installing("tiny-1.0-1", "other")
    assert ask(host, apply_request(wanted)).changes == installing("tiny-1.0-1", "other")
    assert host.run("rpm", "-q", "tiny", "other").split() == ["tiny-1.0-1.noarch", "other-1.0-1.noarch"]
    assert host.run("cat", "/usr/share/tiny/version") == "1.0\n"
    assert policy(host) == before
    assert ask(host, compare_request(wanted)).changes == ()
    assert inspected(host, "tiny", "other") == {"installed": {"tiny": "1.0-1", "other": "1.0-1"}, "available": {}}


def test_later_version_in_the_plan_is_installed(host):
    assert ask(host, apply_request(plan("tiny=2.0-1"))).changes == installing("tiny-2.0-1")
    assert host.run("cat", "/usr/share/tiny/version") == "2.0\n"


def test_package_is_installed_from_a_file(host):
    path = "/srv/repository/noarch/third-1.0-1.noarch.rpm"
    assert inspected(host, path) == {"installed": {}, "available": {path: "1.0-1"}}
    assert ask(host, apply_request(plan(path))).changes == installing(path)
    assert host.run("rpm", "-q", "third").strip() == "third-1.0-1.noarch"
    assert ask(host, compare_request(plan(path))).changes == ()


def test_missing_package_is_named_with_the_output_of_dnf(host):
    before = policy(host)
    with pytest.raises(TargetError, match="missing") as refused:
        ask(host, apply_request(plan("tiny", "missing")))
    assert "dnf -y install missing" in refused.value.what and "package manager" in refused.value.hint
    assert policy(host) == before


def test_removal_keeps_packages(host):
    ask(host, remove_request("c0ffee"))
    assert host.run("rpm", "-q", "tiny").strip() == "tiny-2.0-1.noarch"
