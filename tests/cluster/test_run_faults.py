"""Tests of faults in one run. Each fault costs as little time as possible, and harmless faults cost none.

The tests with the fixture `run` share one run and execute in order. Each leaves the run with four nodes in training.
`./test --long` repeats all of them with torch; test_train.py and test_headline_figures.py always use it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli
from tests.cluster.runs import DDP, IN_STEP, LONG_S, QUICK, Run, comm, kill, node_of, now
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# On an idle machine, a dead host is detected after 1.5 s, and the next step follows after 2.5 s, as benchmarks measure.
# Here other tests may run at the same time, or the machine may be emulated. Slurm alone would need minutes.
DETECTED_S = 20.0 * PATIENCE
STEPPED_S = 60.0 * PATIENCE


Start = Callable[..., Run]


@pytest.fixture(scope="module", params=["sockets", pytest.param("torch", marks=pytest.mark.long)])
def start(request: pytest.FixtureRequest, cluster_for_runs: Cli) -> Start:
    """Return a function that starts a run with this name and options."""
    own, script = ((), DDP) if request.param == "torch" else (QUICK, IN_STEP)
    folder = cluster_for_runs.home / request.param

    def start(name: str, *options: str) -> Run:
        return Run.start(cluster_for_runs, folder / name, *own, *options, "-J", name, script=script)

    return start


@pytest.fixture(scope="module")
def long_run(start: Start) -> Run:
    return start("long", "-N", "4", "--spares", "2", "--max-restarts", "20")


@pytest.fixture
def run(long_run: Run) -> Run:
    """Return the run with four nodes in training and two spares."""
    return whole(long_run, spares=2)


@pytest.fixture
def with_a_spare(long_run: Run) -> Run:
    """Return the run with at least one spare. The other one may still be importing torch after it was rebooted."""
    return whole(long_run, spares=1)


def whole(run: Run, spares: int) -> Run:
    if len(run.spares) < 2:
        run.cli.ok("up")
    run.wait_for_step(after=now(), timeout_s=LONG_S)
    run.wait_for_spares(spares)
    return run


def power_off(cli: Cli, node: str) -> None:
    """Cut the power directly. The command would take a moment to start, and some faults must coincide."""
    LocalTarget(cli.home / "clusters/one", cache=cli.home / "cache").power_off(node)


def broken(run: Run, fault: Callable[[], object]) -> float:
    """Break a run so that its generation ends. Return the seconds until all ranks had made a step."""
    before, at = run.generation, now()
    fault()
    took = run.wait_for_step(before + 1, at, timeout_s=LONG_S) - at
    print(f"generation {run.generation} made its first step {took:.2f} s after the fault")
    return took


def dark_for(run: Run, node: str, rank: int, generation: int) -> tuple[float, float]:
    """Return the seconds from a power cut to its detection, and to the next step.

    The last line of the lost rank gives the time of the power cut.
    """
    dark_at = [each.at for each in run.writes() if (each.generation, each.rank) == (generation, rank)][-1]
    lost_at = next(each["at"] for each in run.journal("lost", since=dark_at) if each["node"] == node)
    known, stepped = lost_at - dark_at, run.wait_for_step(generation + 1, dark_at, LONG_S) - dark_at
    print(f"{node} dark: known after {known:.2f} s, next step after {stepped:.2f} s")
    return known, stepped


@contextmanager
def nothing_restarts(run: Run) -> Iterator[None]:
    generation, workers, lost = run.generation, run.workers(), len(run.journal("lost"))
    yield
    assert (run.generation, run.workers(), len(run.journal("lost"))) == (generation, workers, lost), run.tail()


def test_ranks_train_across_four_hosts(run: Run):
    assert len(set(run.nodes)) == 4 and run.generation == 1
    assert all("nodes 4 of 4\n" in run.log(rank) for rank in range(4))
    assert set(run.workers()) == {0, 1, 2, 3}


def test_killed_worker_costs_one_restart_and_keeps_ranks(run: Run):
    nodes, restarts = run.nodes, run.restarts
    assert broken(run, lambda: kill(run.workers()[2])) < STEPPED_S
    assert (run.nodes, run.restarts) == (nodes, restarts + 1)


def test_killed_srun_is_restarted_in_the_same_job(run: Run):
    before, jobs = run.agents(), run.status.jobs
    (srun,) = run.sruns()
    # Six agents import torch again at the same time. As at the first start, that took 90 s on a busy machine.
    imported_s = max(each["seconds"] for each in run.journal("ready"))
    assert broken(run, lambda: kill(srun)) < STEPPED_S + imported_s
    run.wait_for_spares(2)
    assert run.status.jobs == jobs
    assert run.agents().keys() == before.keys() and not set(run.agents().values()) & set(before.values())


def test_workers_survive_a_killed_coordinator(run: Run):
    at, workers, generation = now(), run.workers(), run.generation
    kill(run.coordinator())
    run.wait_for(lambda: run.journal("came back", since=at), LONG_S)
    run.wait_for_step(after=now())
    assert (run.workers(), run.generation) == (workers, generation)
    nodes = run.nodes
    broken(run, lambda: kill(run.workers()[1]))
    assert run.nodes == nodes


def test_killed_slurmd_restarts_nothing(run: Run):
    with nothing_restarts(run):
        at = now()
        stop_slurmd(run.cli, run.nodes[1])
        run.wait_for_step(after=at + 3)
    run.cli.ok("up")


def stop_slurmd(cli: Cli, node: str) -> None:
    cli.ok("shell", "--node", node, "--", "pkill", "-9", "-x", "slurmd")  # pkill sees only the processes of this host


def test_agent_stopped_for_three_seconds_restarts_nothing(run: Run):
    agent = run.agents()[run.nodes[2]]
    with nothing_restarts(run):
        at = now()
        kill(agent, signal.SIGSTOP)
        try:
            run.wait_for_step(after=at + 3)
        finally:
            kill(agent, signal.SIGCONT)
        run.wait_for_step(after=now() + 1)


@pytest.mark.long  # in the ordinary suite, other tests keep all cores busy
def test_busy_cores_restart_nothing(run: Run):
    with nothing_restarts(run):
        at = now()
        busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
        try:
            run.wait_for_step(after=at + 3)
        finally:
            for each in busy:
                each.kill()
                each.wait()


def test_short_packet_loss_restarts_nothing(run: Run):
    with nothing_restarts(run):
        at = now()
        run.cli.ok("inject", "net-cut", run.nodes[1], "--for", "0.3s")
        run.wait_for_step(after=at + 3)


def test_a_killed_warm_parent_costs_no_restart(run: Run):
    node, restarts = run.nodes[3], run.restarts
    broken(run, lambda: kill(run.warm_parents()[node]))
    assert (run.restarts, len(run.nodes)) == (restarts, 4)
    run.wait_for_spares(2)


def test_killed_agent_is_replaced_by_a_spare_and_its_workers_end(run: Run):
    nodes, restarts, jobs, lost_worker = run.nodes, run.restarts, run.status.jobs, run.workers()[1]
    broken(run, lambda: kill(run.agents()[nodes[1]]))
    run.wait_for(lambda: not os.path.exists(f"/proc/{lost_worker}"))  # the worker has ended, and its host has reaped it
    assert run.nodes == [nodes[0], run.nodes[1], *nodes[2:]] and run.nodes[1] != nodes[1]
    run.wait_for_spares(2)
    assert nodes[1] in run.spares
    assert (run.status.jobs, run.restarts) == (jobs, restarts)


def test_host_cut_off_for_five_seconds_is_replaced_and_fenced(run: Run):
    nodes, generation = run.nodes, run.generation
    broken(run, lambda: run.cli.ok("inject", "net-cut", nodes[2], "--for", "5s"))
    assert run.generation == generation + 1
    assert run.nodes == [*nodes[:2], run.nodes[2], nodes[3]] and run.nodes[2] != nodes[2]
    run.wait_for_spares(2)
    assert nodes[2] in run.spares
    run.assert_fenced()


@pytest.mark.parametrize("rank", [1, 0])
def test_a_host_without_power_is_replaced_by_a_spare(with_a_spare: Run, rank: int):
    run = with_a_spare
    nodes, generation, restarts = run.nodes, run.generation, run.restarts
    run.cli.ok("inject", "power-off", nodes[rank])
    run.wait_for_step(generation + 1)
    known, stepped = dark_for(run, nodes[rank], rank, generation)
    assert known < DETECTED_S and stepped < STEPPED_S
    assert run.restarts == restarts
    assert [one for number, one in enumerate(run.nodes) if number != rank] == [
        one for one in nodes if one != nodes[rank]
    ]


def test_two_hosts_lost_at_once_are_replaced_by_two_spares(run: Run):
    nodes, generation = run.nodes, run.generation
    for rank in (2, 3):
        power_off(run.cli, nodes[rank])
    run.wait_for_step(generation + 1)
    run.wait_for(lambda: not {*nodes[2:]} & {*run.nodes})
    run.wait_for_step(after=now())
    assert run.nodes[:2] == nodes[:2]


def test_host_lost_during_worker_stop_does_not_delay_the_next_generation(with_a_spare: Run):
    run = with_a_spare
    nodes, generation = run.nodes, run.generation
    kill(run.agents()[nodes[3]], signal.SIGSTOP)  # the agent is alive, but does not report that its worker stopped
    kill(run.workers()[0])
    run.wait_for(lambda: run.journal("failed")[-1]["generation"] == generation)
    run.wait_for(lambda: not {0, 1, 2} & set(run.workers()))
    assert run.generation == generation
    power_off(run.cli, nodes[3])
    run.wait_for_step(generation + 1)
    assert run.nodes[:3] == nodes[:3] and run.nodes[3] != nodes[3]


def test_host_lost_before_worker_start_does_not_delay_the_others(with_a_spare: Run):
    run = with_a_spare
    nodes, generation = run.nodes, run.generation
    kill(run.warm_parents()[nodes[1]], signal.SIGSTOP)
    kill(run.workers()[2])
    run.wait_for_generation(generation + 1)
    power_off(run.cli, nodes[1])
    run.wait_for_step(generation + 2, timeout_s=LONG_S)
    assert nodes[1] not in run.nodes


def test_run_ends_with_success_after_all_faults_and_leaves_nothing(with_a_spare: Run):
    run = with_a_spare
    assert run.finish() == 0
    assert run.status.message == "done"
    run.assert_fenced()
    run.no_trace()


def test_one_node_job_joins_a_run_without_spare_even_during_its_start(start: Start, cluster_for_runs: Cli):
    module = cluster_for_runs.home / "slow/slow_to_import.py"
    module.parent.mkdir(exist_ok=True)
    module.write_text("import time\ntime.sleep(3)\n")
    run = start("alone", "-N", "2", "--preload", module.stem, "--env", f"PYTHONPATH={module.parent}")
    run.wait_for(lambda: len(run.warm_parents()) == 2, LONG_S)
    first = sorted(run.agents())
    power_off(run.cli, first[1])  # the warm parent of this node is still importing
    run.wait_for_step(timeout_s=LONG_S)
    assert first[0] in run.nodes and first[1] not in run.nodes
    nodes, generation = run.nodes, run.generation
    power_off(run.cli, nodes[0])
    run.wait_for_step(generation + 1, timeout_s=LONG_S)
    assert run.nodes[1] == nodes[1] and run.nodes[0] not in (*nodes, first[1])
    assert run.restarts == 0 and len(run.status.jobs) > 1
    run.cli.ok("up")
    assert run.finish() == 0
    run.no_trace()


def test_elastic_run_continues_smaller_and_grows_back(start: Start):
    run = start("elastic", "-N", "2:4", "--exclude", "train-5,train-6")
    run.wait_for_step(timeout_s=LONG_S)
    run.wait_for(lambda: len(run.nodes) == 4, LONG_S)
    run.wait_for_step(after=now())
    nodes, generation = run.nodes, run.generation
    power_off(run.cli, nodes[1])
    run.wait_for_step(generation + 1)
    assert set(run.nodes) == {*nodes} - {nodes[1]}
    run.wait_for(lambda: "running on 3 of 4 nodes: the effective batch is smaller" in run.status.message)
    assert "nodes 3 of 4\n" in run.log(0)
    run.cli.ok("up")
    run.wait_for(lambda: len(run.nodes) == 4, LONG_S)
    run.wait_for_step(after=now())
    assert "nodes 4 of 4\n" in run.log(0) and run.restarts == 0
    assert run.finish() == 0
    run.no_trace()


def test_run_with_damaged_state_restarts_in_another_job(start: Start):
    run = start("damaged", "-N", "2")
    run.wait_for_step(timeout_s=LONG_S)
    at, (job,), coordinator = now(), run.status.jobs, run.coordinator()
    assert coordinator is not None
    os.kill(coordinator, signal.SIGSTOP)  # stopped, so that it writes nothing more
    run.folder.state.write_text("{")
    kill(coordinator)
    run.wait_for(lambda: run.journal("granted", since=at), LONG_S)
    (note,) = [each["text"] for each in run.journal("note", since=at) if "starts over" in each["text"]]
    assert f"scancel --name={run.id}" in note
    run.wait_for_step(after=run.journal("granted")[-1]["at"], timeout_s=LONG_S)
    assert job not in run.status.jobs and len(run.status.jobs) == 1
    assert run.finish() == 0
    run.no_trace()


# Reports every step, without torch and without a Checkpointer.
STEP = "    tell(step)\n"
REPORTING = "from dalsegno.train import report\n" + IN_STEP.replace(STEP, f"{STEP}    report(step, loss=0.5)\n")


@pytest.fixture(scope="module")
def standby_run(cluster_for_runs: Cli) -> Run:
    """Return a run on two nodes and a spare, each of which prepares a standby worker."""
    folder = cluster_for_runs.home / "standby"
    options = (*QUICK, "-N", "2", "--spares", "1", "--standby", "1", "-J", "standby")
    return Run.start(cluster_for_runs, folder, *options, script=REPORTING)


def test_standby_workers_replace_killed_ones_in_a_run_that_reports_its_steps(standby_run: Run):
    run = standby_run
    run.wait_for(lambda: len(standbys(run)) == 3, LONG_S)
    waiting, (spare,) = standbys(run), run.spares
    run.wait_for(lambda: json.loads(run.cli.ok("runs", "show", run.id, "--json"))["progress"]["figures"]["loss"] == 0.5)
    assert broken(run, lambda: kill(run.workers()[1])) < STEPPED_S
    after = {node_of(pid): pid for pid in run.workers().values()}
    assert after == {node: pid for node, pid in waiting.items() if node != spare}, "the same processes, with new names"


def test_worker_on_a_promoted_spare_is_the_standby_that_waited_there(standby_run: Run):
    run = standby_run
    run.wait_for(lambda: len(standbys(run)) == 3, LONG_S)
    waiting, (spare,), nodes, generation = standbys(run), run.spares, run.nodes, run.generation
    power_off(run.cli, nodes[1])
    run.wait_for_step(generation + 1)
    assert run.nodes == [nodes[0], spare]
    assert run.workers() == {0: waiting[nodes[0]], 1: waiting[spare]}
    run.cli.ok("up")
    assert run.finish() == 0
    run.no_trace()


def standbys(run: Run) -> dict[str, int]:
    """Return the standby workers by node."""
    found = [pid for pid in run.processes() if comm(pid).startswith("ds:s") and comm(pid) != "ds:store"]
    return {node_of(pid): pid for pid in found}
