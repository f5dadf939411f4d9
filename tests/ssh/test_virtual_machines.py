"""Clusters on three virtual machines with systemd and cgroup v2, created over ssh: Debian 12, then Debian 13.

Each machine has its own kernel, and installs its packages as a bare host does. The head serves the homes over NFS.
The tests of a release share three machines and run in order. The last one removes the cluster.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.setup.delivery import CodeFit
from dalsegno.setup.wheels import fetch_wheels
from dalsegno.system.processes import LocalRunner
from tests.machines.host_disk import ADMIN, build_disk
from tests.machines.rack import BOOT_TIMEOUT_S, MachineRack, running_machines
from tests.ssh.cluster_operator import Operator
from tests.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]
RELEASES = {"bookworm": ("12", "22.05", (3, 11)), "trixie": ("13", "24.11", (3, 13))}
NAMES = ["head", "n1", "n2"]
MORE = """\
users: [{name: ada}]
storage: [{name: homes, mount: /people, home: true}, {name: team, mount: /team}]
monitoring: {enabled: false}
health: {reboots: {per_fault: 0}, checks: {pair-collective: off, load-product: off, load-memory: off}}
"""
UNITS = {
    "head": ["nfs-server", "munge", "dalsegno-mariadb", "slurmdbd", "slurmctld", "dalsegno-controller"],
    "n1": ["munge", "slurmd", "dalsegno-node-agent"],
    "n2": ["munge", "slurmd", "dalsegno-node-agent"],
}
AS_ADA = ("runuser", "-l", "ada", "-c")
SLOW_S = 600.0 * PATIENCE  # emulated machines take minutes where others take seconds


def reason_to_skip() -> str:
    """Return why virtual machines cannot run here, or an empty string."""
    programs = ("debootstrap", "qemu-system-x86_64", "qemu-img", "mke2fs", "ssh")
    missing = [name for name in programs if not shutil.which(name)]
    return f"needs {', '.join(missing)}" if missing else "" if os.geteuid() == 0 else "needs root"


@pytest.fixture(scope="module", params=list(RELEASES))
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp(request.param)
    with running_machines(build_disk(request.param), place / "hosts", NAMES) as rack:
        yield operator_of(place, rack, RELEASES[request.param][2])


def operator_of(place: Path, rack: MachineRack, python: tuple[int, int]) -> Operator:
    """Return the operator of the machines. Their network has no package index, so a wheel is fetched first."""
    operator = Operator(place, rack, enter=rack.enter, timeout_s=1800)
    if python != CodeFit.here().python:
        fetch_wheels(LocalRunner(), place / "home/wheels", CodeFit(python, CodeFit.here().machine))
    operator.write(more=MORE, user=ADMIN)
    return operator


def units(lab: Operator, asked: str, host: str, names: list[str]) -> set[str]:
    return set(lab.rack[host].shell(f"systemctl {asked} {' '.join(names)} || true").split())


def states(lab: Operator) -> dict[str, str]:
    return dict(line.split() for line in lab.on_head("sinfo", "-hNo", "%N %T").splitlines())


def reasons(lab: Operator) -> dict[str, str]:
    return dict(line.split("|", 1) for line in lab.on_head("sinfo", "-hNo", "%N|%E").splitlines())


def phases(lab: Operator) -> dict[str, str]:
    """Return the phases of the nodes. On a slow machine, a node in service is also suspected at times."""
    answer = {node["node"]: node["phase"] for node in json.loads(lab.dalsegno("nodes", "--json").out)}
    return {name: "in service" if phase == "suspected" else phase for name, phase in answer.items()}


def is_up(lab: Operator) -> bool:
    """Return whether everything runs. On a slow machine, a host does not answer in time once in a while."""
    status = json.loads(lab.dalsegno("status", "--json").out)
    return status["phase"] == "up" and all(each["running"] for each in status["daemons"])


def test_plan_shows_systemd_and_cgroups_and_changes_nothing(lab):
    shown = lab.dalsegno("plan", str(lab.file)).out
    assert shown.count("systemd, cgroup v2") == 3
    assert "head, n1, n2: mounts /people, /team" in shown and "n1, n2: starts munge, slurmd, node-agent" in shown
    for host in lab.rack.hosts:
        assert host.shell("ls -d /etc/slurm /opt/dalsegno /var/lib/dalsegno 2>/dev/null || true") == ""


def test_up_creates_the_cluster_with_units_that_start_at_boot(lab):
    lab.up()
    for host, names in UNITS.items():
        assert units(lab, "is-active", host, names) == {"active"}, host
        assert units(lab, "is-enabled", host, names) == {"enabled"}, host
        assert lab.rack[host].run("systemctl", "--failed", "--no-legend") == "", host
    assert states(lab) == {"n1": "idle", "n2": "idle"}
    assert eventually(lambda: is_up(lab), timeout_s=SLOW_S, every_s=2)


def test_database_of_the_distribution_neither_runs_nor_starts_at_boot(lab):
    assert units(lab, "is-active", "head", ["mariadb"]) == {"inactive"}
    assert units(lab, "is-enabled", "head", ["mariadb"]) == {"disabled"}
    assert lab.on_head("pgrep", "-c", "mariadbd") == "1\n"


def test_jobs_of_a_user_run_on_both_nodes_in_a_home_that_the_head_serves(lab):
    lab.on_head(*AS_ADA, "echo hello > greeting")
    script = "hostname; pwd; cat greeting; stat -c %i greeting; findmnt -nro FSTYPE -T ."
    answer = lab.on_head(*AS_ADA, f"srun -N2 --label sh -c '{script}'")
    by_task = [sorted(line[3:] for line in answer.splitlines() if line.startswith(f"{task}: ")) for task in (0, 1)]
    inode = lab.on_head("stat", "-c", "%i", "/people/ada/greeting").strip()
    shared = ["/people/ada", "hello", inode, "nfs4"]
    assert sorted(by_task) == sorted(sorted([node, *shared]) for node in ("n1", "n2"))
    check = json.loads(lab.dalsegno("storage", "check", "homes", "--quick", "--json").out)
    assert check["ok"] and check["user"] == "ada"


def test_root_of_a_node_has_no_rights_of_root_on_the_storage(lab):
    lab.rack["n1"].run("touch", "/team/by-root")
    assert lab.on_head("stat", "-c", "%U", "/team/by-root") == "nobody\n"
    lab.on_head("sh", "-c", "umask 077; echo secret > /team/private")
    assert lab.rack["n1"].try_run("cat /team/private").returncode == 1


def test_jobs_are_accounted(lab):
    wanted = ["ada", "COMPLETED"]
    assert eventually(lambda: lab.on_head("sacct", "-aXno", "user,state").split()[:2] == wanted, timeout_s=SLOW_S)


def test_jobs_are_limited_to_their_memory_and_cores_with_cgroup_v2(lab):
    script = 'nproc; cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup | sed "s,/task_[^/]*$,,")/memory.max'
    assert lab.on_head(*AS_ADA, f"srun -c1 --mem=200M sh -c '{script}'").split() == ["1", str(200 << 20)]
    greedy = "python3 -c 'bytearray(400 << 20)'"
    job = lab.on_head(*AS_ADA, f'sbatch --parsable --wait --mem=100M --wrap "{greedy}" || true').strip()
    accounted = f"sacct -j {job} -Xno state%20"
    assert eventually(lambda: lab.on_head("sh", "-c", accounted).split() == ["OUT_OF_MEMORY"], timeout_s=SLOW_S)


SCRIPT = "#!/bin/sh\nwhile :; do echo rank $RANK generation $DALSEGNO_GENERATION; sleep 1; done\n"


@pytest.fixture(scope="module")
def run(lab: Operator) -> str:
    """The id of a run on both nodes."""
    lab.on_head("sh", "-c", "cat > /people/ada/train.sh; chmod 755 /people/ada/train.sh", stdin=SCRIPT)
    return lab.on_head(*AS_ADA, "dalsegno run --no-preload --detach -N 2 ./train.sh").strip()


def trains(lab: Operator, run: str, generation: int) -> bool:
    """Return whether both ranks write in this generation or a later one."""
    rows = [line.split() for line in lab.on_head(*AS_ADA, f"dalsegno logs {run}").splitlines()]
    found = [row[row.index("rank") :] for row in rows if "rank" in row and len(row) > row.index("rank") + 3]
    return {row[1] for row in found if row[3].isdigit() and int(row[3]) >= generation} == {"0", "1"}


def test_run_continues_after_a_worker_was_killed(lab, run):
    assert eventually(lambda: trains(lab, run, 1), timeout_s=SLOW_S, every_s=2)
    lab.rack["n2"].run("pkill", "-9", "-u", "ada", "-x", "train.sh")
    assert eventually(lambda: trains(lab, run, 2), timeout_s=SLOW_S, every_s=2)


def test_node_without_power_is_detected_and_its_run_continues_after_it_has_booted(lab, run):
    node = lab.rack["n2"]
    before = node.wait_for_boot()
    node.cut_power()
    assert eventually(lambda: phases(lab)["n2"] != "in service", timeout_s=SLOW_S, every_s=2)
    node.power_on()
    node.wait_for_boot(other_than=before)
    assert eventually(lambda: phases(lab) == {"n1": "in service", "n2": "in service"}, timeout_s=SLOW_S, every_s=2)
    assert units(lab, "is-active", "n2", UNITS["n2"]) == {"active"}
    assert node.run("findmnt", "-nro", "FSTYPE", "/people") == "nfs4\n"
    assert eventually(lambda: trains(lab, run, 3), timeout_s=SLOW_S, every_s=2)
    lab.on_head(*AS_ADA, f"dalsegno cancel {run}")
    assert eventually(lambda: lab.on_head("squeue", "-h") == "", timeout_s=SLOW_S, every_s=2)


def test_node_waits_for_the_file_server_and_returns_without_a_reboot(lab):
    boots = {name: lab.rack[name].wait_for_boot() for name in ("n1", "n2")}
    waits = "dalsegno:drain:file-systems[server]"
    lab.on_head("systemctl", "stop", "nfs-server")
    try:
        assert eventually(lambda: any(r.startswith(waits) for r in reasons(lab).values()), SLOW_S, every_s=2)
    finally:
        lab.on_head("systemctl", "start", "nfs-server")
    assert eventually(lambda: states(lab) == {"n1": "idle", "n2": "idle"}, timeout_s=SLOW_S, every_s=2)
    assert {name: lab.rack[name].wait_for_boot() for name in boots} == boots
    assert lab.on_head(*AS_ADA, "srun -N2 cat greeting") == "hello\nhello\n"


def test_head_starts_everything_again_when_it_boots(lab):
    head = lab.rack["head"]
    before = head.wait_for_boot()
    head.try_run("systemctl reboot")
    head.wait_for_boot(other_than=before)
    assert eventually(lambda: units(lab, "is-active", "head", UNITS["head"]) == {"active"}, timeout_s=BOOT_TIMEOUT_S)
    assert units(lab, "is-active", "head", ["mariadb"]) == {"inactive"}
    assert eventually(lambda: states(lab) == {"n1": "idle", "n2": "idle"}, timeout_s=SLOW_S, every_s=2)
    assert lab.on_head(*AS_ADA, "srun -N2 cat greeting") == "hello\nhello\n"


def test_second_up_changes_nothing(lab):
    assert "nothing to do" in lab.up().err


def test_down_restores_every_host(lab):
    assert lab.dalsegno("down", "--yes").err.rstrip().endswith("nothing of it is left")
    for host in lab.rack.hosts:
        left = "ls -d /opt/dalsegno /var/lib/dalsegno/clusters/* /etc/systemd/system/dalsegno-* 2>/dev/null"
        assert host.shell(f"{left}; pgrep 'slurm|mariadbd' || true") == ""
        assert "Dal Segno" not in host.run("cat", "/etc/hosts", "/etc/fstab")
        assert host.shell("findmnt /people || findmnt /team || true") == ""
        assert host.run("systemctl", "--failed", "--no-legend") == ""
    assert lab.on_head("sh", "-c", "cat /srv/dalsegno/homes/ada/greeting") == "hello\n"
    assert lab.on_head("exportfs", "-s") == ""
