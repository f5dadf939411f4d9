"""Runs, spares and recovery on nodes that Slurm boots for jobs and powers down when they are idle.

slurmctld is real, with ParallelCluster's settings of power saving. A machine is a slurmd in a PID namespace, which the
resume program starts. In ParallelCluster, its daemons start EC2 instances instead, and clustermgtd powers down lost
nodes. Here, the controller's own order powers them down.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import read
from dalsegno.runs.status import read_status
from dalsegno.system.processes import Completed, LocalRunner
from dalsegno.targets.parallelcluster.head import PclusterHead
from tests.cluster.foreign import ON_DEMAND, ForeignCluster, foreign_cluster, install
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have an ordinary user of its own"),
]

TRAIN = """
import os, sys, time
print("generation", os.environ["DALSEGNO_GENERATION"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""
WAIT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[ForeignCluster]:
    with foreign_cluster(on_demand=True) as cluster:
        install(cluster)
        yield cluster


class HeadRunner:
    """Runs the commands of the head's side in the namespace of the cluster's slurmctld."""

    def __init__(self, cluster: ForeignCluster) -> None:
        self._inside, self._runner = cluster.inside, LocalRunner()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        plain = [Path(argv[0]).name, *argv[1:]]
        return self._runner.run([*self._inside, *plain], stdin=stdin, timeout_s=timeout_s)


@pytest.fixture
def watcher(cluster: ForeignCluster) -> Iterator[Callable[[], str]]:
    """Run the controller with permission to act on all nodes. Yield a function that returns its events."""
    admin = cluster.root / "admin"
    admin.mkdir(exist_ok=True)
    cluster.ok_as_root("dalsegno", "adopt", "-o", f"{admin}/cluster.yaml", "--force")
    process = cluster.start_as_root("dalsegno", "adopt", "watch", f"{admin}/cluster.yaml")
    eventually(lambda: "only reports" in cluster.as_root("dalsegno", "automation", "status"))
    cluster.ok_as_root("dalsegno", "adopt", "arm", "train", f"{admin}/cluster.yaml")
    yield lambda: cluster.ok_as_root("dalsegno", "events")
    process.terminate()
    process.wait(30)


def start(cluster: ForeignCluster, *options: str) -> RunFolder:
    (cluster.home / "train.py").write_text(TRAIN)
    words = ("--detach", *options, "--framework", "jax", "--preload", "json", "train.py", f"{cluster.home}/stop")
    name = cluster.ok("dalsegno", "run", *words).strip()
    return RunFolder(cluster.home / ".local/state/dalsegno/runs" / name)


def nodes_of(run: RunFolder) -> list[str]:
    """Return the nodes of the run's newest generation; none before the first one."""
    formed = [each for each in read(run.journal) if each["event"] == "generation"] if run.journal.exists() else []
    return list(formed[-1]["nodes"]) if formed else []


def told(cluster: ForeignCluster, run: RunFolder) -> str:
    log = run.coordinator_log
    return "\n".join([
        str(read_status(run.status)), *(str(each) for each in list(read(run.journal))[-20:]),
        log.read_text()[-2000:] if log.exists() else "", cluster.as_root("sinfo", "-N", "-o", "%N %T %E"),
        cluster.as_root("squeue"), *cluster.powered(),
    ])  # fmt: skip


def wait_for(cluster: ForeignCluster, run: RunFolder, done: Callable[[], bool]) -> None:
    try:
        eventually(done, WAIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{told(cluster, run)}") from None


def test_run_boots_its_nodes_replaces_lost_ones_and_leaves_idle_ones_to_slurm(cluster: ForeignCluster, watcher):
    assert set(cluster.states().values()) == {"idle~"} and cluster.powered() == []
    run = start(cluster, "--nodes", "2", "--spares", "1")
    wait_for(cluster, run, lambda: len(nodes_of(run)) == 2)
    booted = [line.split()[1] for line in cluster.powered()]
    assert len(booted) == 3, "two nodes and a spare"
    first, second = nodes_of(run)
    (spare,) = set(booted) - {first, second}
    (unused,) = set(ON_DEMAND) - set(booted)
    wait_for(cluster, run, lambda: ready(run).count(spare) == 1)
    cluster.lose(second)
    wait_for(cluster, run, lambda: nodes_of(run) == [first, spare])
    # There is no spare left, so Slurm boots a node.
    cluster.lose(spare)
    wait_for(cluster, run, lambda: nodes_of(run) == [first, unused])
    assert f"up {unused}" in cluster.powered()
    # Slurm powers down the lost nodes. One of them boots with a new machine, and becomes the run's spare.
    wait_for(cluster, run, lambda: ready(run).count(second) + ready(run).count(spare) == 3)
    again = second if ready(run).count(second) == 2 else spare
    assert [line for line in cluster.powered() if again in line] == [f"up {again}", f"down {again}", f"up {again}"]
    cluster.lose(unused)
    wait_for(cluster, run, lambda: nodes_of(run) == [first, again])
    assert cluster.powered().count(f"down {again}") == 1, "an idle spare belongs to the job, so Slurm keeps it"
    (cluster.home / "stop").touch()
    wait_for(cluster, run, lambda: (status := read_status(run.status)) is not None and status.over)
    (cluster.home / "stop").unlink()
    status = read_status(run.status)
    assert status is not None and status.exit_code == 0, told(cluster, run)
    wait_for(cluster, run, lambda: set(cluster.states().values()) == {"idle~"})
    events = watcher().splitlines()
    assert [line for line in events if first in line] == [], "it was powered up and down, and never lost"
    assert not any("fell silent" in line for line in events), "nodes that are off do not look like a broken network"
    assert [line for line in cluster.powered() if first in line] == [f"up {first}", f"down {first}"]
    assert any("in service: Slurm has powered it down" in line for line in events), events
    wait_for(cluster, run, lambda: not out_of_service(watcher().splitlines()))


def out_of_service(events: Sequence[str]) -> set[str]:
    """Return the nodes in phase `needs admin` that have not returned to service."""
    found: set[str] = set()
    for line in events:
        node = line.split()[2]
        if "needs admin" in line:
            found.add(node)
        elif f"{node}  in service: " in line:
            found.discard(node)
    return found


def test_order_that_replaces_a_dynamic_node_gives_it_a_new_machine(cluster: ForeignCluster):
    node = ON_DEMAND[0]
    head = PclusterHead(cluster.root / "head" / "clusters" / "campus", HeadRunner(cluster))
    cluster.ok("srun", "-w", node, "true", timeout_s=WAIT_S)
    old = (cluster.root / "machines" / node).read_text()
    cluster.ok_as_root("scontrol", "update", f"nodename={node}", "state=drain", "reason=dalsegno:replace:gpu-lost[79]")
    head.replace(node)
    eventually(lambda: cluster.states()[node] == "idle~", WAIT_S)
    assert cluster.powered()[-1] == f"down {node}"
    cluster.ok("srun", "-w", node, "true", timeout_s=WAIT_S)
    assert (cluster.root / "machines" / node).read_text() != old
    eventually(lambda: cluster.states()[node] == "idle~", WAIT_S)


def ready(run: RunFolder) -> list[str]:
    """Return the nodes whose agents became ready, in order. A node with a new machine is there twice."""
    return [str(each["node"]) for each in read(run.journal) if each["event"] == "ready"]
