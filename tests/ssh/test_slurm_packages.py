"""Clusters with Slurm packages that the cluster file names: from a repository of the operator, and from files.

The packages are Debian's own with other names and another version. Like those of SchedMD, they replace the packages of
the distribution, and create no user `slurm`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import reason_to_skip, running_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]
PARTS = ("slurm-client", "slurm-wlm-basic-plugins", "slurmd", "slurmctld", "slurmdbd", "slurm-wlm-mysql-plugin")
VERSION = "22.05.8-0made1"
MORE = "users: [{name: ada}]\nmonitoring: {enabled: false}\nhealth: {mode: off}\n"


def own_name(package: str) -> str:
    return f"made-{package}"


def repack(package: str, file: Path, folder: Path) -> Path:
    """Make a package with the files and scripts of another one, under its own name and version."""
    tree = folder / package
    subprocess.run(["dpkg-deb", "--raw-extract", file, tree], check=True, timeout=60)
    control = tree / "DEBIAN/control"
    fields = dict(re.findall(r"^([\w-]+): (.*(?:\n .*)*)", control.read_text(), re.MULTILINE))
    old = fields["Version"]
    depends = [re.sub(r" \(= .*?\)", f" (= {VERSION})", each) if each.split()[0] in PARTS else each
               for each in fields.get("Depends", "").split(", ")]  # fmt: skip
    renamed = [own_name(each) if each.split()[0] in PARTS else each for each in depends]
    fields |= {"Package": own_name(package), "Version": VERSION, "Depends": ", ".join(renamed)}
    fields |= {"Provides": f"{package} (= {old})", "Conflicts": package, "Replaces": package}
    fields.pop("Recommends", None)
    control.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    preinst = tree / "DEBIAN/preinst"
    if preinst.exists():
        preinst.write_text(re.sub(r"^\s*adduser .*", ":", preinst.read_text(), flags=re.MULTILINE))
    made = folder / f"{own_name(package)}_{VERSION}_{fields['Architecture']}.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, made], check=True, timeout=60)
    shutil.rmtree(tree)
    return made


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, which is also a repository of apt."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    if not shutil.which("dpkg-scanpackages"):
        pytest.skip("needs dpkg-dev")
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run(["apt-get", "-qq", "download", *PARTS], cwd=folder, check=True, timeout=300)
    for package in PARTS:
        (file,) = folder.glob(f"{package}_*.deb")
        repack(package, file, folder)
        file.unlink()
    listed = subprocess.run(["dpkg-scanpackages", "."], cwd=folder, check=True, timeout=60, capture_output=True)
    (folder / "Packages").write_bytes(listed.stdout)
    return folder


@pytest.fixture(params=["names", "files"])
def lab(request: pytest.FixtureRequest, packages: Path, tmp_path: Path) -> Iterator[Operator]:
    """Two hosts that know only the operator's packages, by name or as files."""
    with running_hosts(2, tmp_path / "hosts", names=["head", "n1"]) as rack:
        operator = Operator(tmp_path, rack)
        operator.clear_hosts()
        for host in rack.hosts:
            provide(operator, host.name, packages, repository=request.param == "names")
        names = [own_name(package) for package in PARTS]
        files = [f"/srv/slurm/{path.name}" for path in sorted(packages.glob("*.deb"))]
        setting = f"slurm_packages: [{', '.join(names)}]\n  slurm_version: {VERSION.partition('-')[0]}"
        if request.param == "files":  # which tell the release themselves
            setting = f"slurm_packages: [{', '.join(files)}]"
        operator.write(nodes="n1", more=MORE)
        operator.file.write_text(operator.file.read_text().replace("ssh:\n", f"ssh:\n  {setting}\n"))
        yield operator


def provide(operator: Operator, host: str, packages: Path, *, repository: bool) -> None:
    machine = operator.rack[host]
    machine.run("sh", "-c", "rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/*; mkdir -p /srv/slurm")
    for path in (*packages.glob("*.deb"), packages / "Packages"):
        with path.open("rb") as file:
            enter = ["nsenter", "-t", str(machine.pid), "-m", "-r", "-w", "--", "tee", f"/srv/slurm/{path.name}"]
            subprocess.run(enter, stdin=file, stdout=subprocess.DEVNULL, check=True, timeout=60)
    if repository:
        machine.run("sh", "-c", "echo 'deb [trusted=yes] file:/srv/slurm ./' > /etc/apt/sources.list")
    machine.run("userdel", "slurm")


def test_named_packages_are_installed_and_the_cluster_runs_jobs(lab):
    lab.up()
    assert lab.on_head("runuser", "-u", "ada", "--", "srun", "hostname") == "n1\n"
    assert eventually(lambda: lab.on_head("sacct", "-aXno", "user,state").split()) == ["ada", "COMPLETED"]
    for host in lab.rack.hosts:
        query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *map(own_name, PARTS)]
        assert set(host.run(*query).splitlines()) == {f"{own_name(package)} {VERSION}" for package in PARTS}
        assert host.run("sh", "-c", "dpkg-query -W -f '${db:Status-Status}' slurmd") != "installed"
        assert host.run("id", "-u", "slurm") == "64030\n"
    assert "nothing to do" in lab.up().err
    down = lab.dalsegno("down", "--yes").err
    assert "packages stay installed" in down and "nothing of it is left" in down


def test_file_that_users_can_change_is_refused(lab):
    path = next(iter(re.findall(r"/srv/slurm/[^,\]]+", lab.file.read_text())), "")
    if not path:
        pytest.skip("packages are named")
    lab.rack["n1"].run("chmod", "666", path)
    assert f"leaves out n1: users can change {path}" in lab.dalsegno("plan", str(lab.file), code=None).out
    lab.rack["n1"].run("rm", path)
    shown = lab.dalsegno("plan", str(lab.file), code=None)
    assert f"n1: {path} is not a package there" in shown.out + shown.err
    assert os.path.basename(path) in shown.out + shown.err
