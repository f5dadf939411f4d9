"""A cluster on virtual hosts with Debian 13, whose Slurm is 24.11 and whose Python is 3.13.

debootstrap makes the root of the hosts once, below $DALSEGNO_MACHINES. The hosts have only their own network, like all
virtual hosts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machines.chroot import Chroot, folder
from tests.ssh.cluster_operator import Operator
from tests.ssh.hosts import reason_to_skip, running_hosts
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]
PACKAGES = (
    "openssh-server sudo ca-certificates iproute2 procps python3 munge slurm-client slurm-wlm-basic-plugins slurmd "
    "slurmctld slurmdbd slurm-wlm-mysql-plugin mariadb-server"
)
INSTALL = (
    "printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d; apt-get -qq update; "
    f"DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install {PACKAGES}; "
    "code=$?; rm /usr/sbin/policy-rc.d; exit $code"
)
MORE = """\
users: [{name: ada}]
storage: [{name: team, mount: /shared, type: existing, home: true}]
monitoring: {enabled: false}
health: {mode: observe}
"""


def debian_13() -> Path:
    """Return a root folder with Debian 13 and the packages of all hosts."""
    machine = Chroot("trixie")
    machine.root = folder() / "trixie-hosts"
    complete = machine.root / "complete"
    if not complete.exists():
        machine.build(fresh=True)
        assert machine.run(["sh", "-c", INSTALL], where="/", network=True) == 0, "the packages were not installed"
        complete.touch()
    return machine.root


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    reason = reason_to_skip() or ("" if shutil.which("debootstrap") else "needs debootstrap")
    if reason:
        pytest.skip(reason)
    root, place = debian_13(), tmp_path_factory.mktemp("trixie")
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with running_hosts(3, place / "hosts", names=["head", "n1", "n2"], shared=shared, root=root) as rack:
        operator = Operator(place, rack)
        operator.write(more=MORE)
        operator.up()
        yield operator


def test_hosts_have_debian_13_and_its_slurm(lab):
    assert 'VERSION_ID="13"' in lab.on_head("cat", "/etc/os-release")
    assert lab.on_head("sinfo", "--version").startswith("slurm-wlm 24.11")
    assert "24.11" in json.loads(lab.dalsegno("status", "--json").out)["facts"]["Slurm"]


def test_jobs_of_a_user_run_on_all_nodes_and_are_accounted(lab):
    assert sorted(lab.on_head("runuser", "-u", "ada", "--", "srun", "-N2", "hostname").split()) == ["n1", "n2"]
    assert eventually(lambda: lab.on_head("sacct", "-aXno", "user,state").split() == ["ada", "COMPLETED"])


def test_run_continues_after_a_worker_was_killed(lab):
    script = "#!/bin/sh\nwhile :; do echo rank $RANK generation $DALSEGNO_GENERATION; sleep 0.1; done\n"
    lab.on_head("sh", "-c", "cat > /shared/ada/train.sh; chmod 755 /shared/ada/train.sh", stdin=script)
    as_ada = ["runuser", "-l", "ada", "-c"]
    run = lab.on_head(*as_ada, "dalsegno run --no-preload --detach -N 2 ./train.sh").strip()
    assert eventually(lambda: "rank 1 generation 1" in lab.on_head(*as_ada, f"dalsegno logs {run}"), every_s=0.5)
    lab.rack["n2"].run("pkill", "-9", "-u", "ada", "-f", "train.sh")
    assert eventually(lambda: "rank 0 generation 2" in lab.on_head(*as_ada, f"dalsegno logs {run}"), every_s=0.5)
    lab.on_head(*as_ada, f"dalsegno cancel {run}")


def test_second_up_changes_nothing_and_down_leaves_nothing(lab):
    assert "nothing to do" in lab.up().err
    lab.dalsegno("down", "--yes")
    for host in lab.rack.hosts:
        assert host.run("sh", "-c", "ls /opt; pidof slurmctld slurmd munged mariadbd || true") == ""
    assert os.path.isdir(lab.folder / "shared/ada")
