"""Tests that lost nodes do not change the final weights of a training with the library."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from dalsegno.targets.local import LocalTarget
from dalsegno.train.disk.verify import list_steps
from tests.cluster.conftest import Cli, for_runs
from tests.cluster.runs import LONG_S, Run, comm, kill, node_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

pytest.importorskip("torch")

FAULTS = ["worker"] * 7 + ["agent", "srun", "power", "power"]
SHAPE = ("-N", "4")
RANKS, NODES = 4, 6  # NODES is the number of nodes of `cluster_for_runs`
LONG = bool(os.environ.get("DALSEGNO_LONG"))
if not LONG:  # fewer nodes, because each node imports torch; three, because a third node decides which rank is wrong
    FAULTS = ["worker", "agent", "power"]
    SHAPE = ("-N", "3")
    RANKS, NODES = 3, 4
EACH = 17  # number of steps for each fault
STEPS = EACH * len(FAULTS) + 13
SEED = int(os.environ.get("DALSEGNO_CHAOS_SEED", "7"))

# Plain DDP over several buckets, with dropout, batch norm and random data: any state that is not restored changes the
# weights or the statistics of each rank. Every loss of every rank is written exactly to one file: generation, rank,
# step, loss. The file `losses.until` contains the step before which to wait, so that training does not end before a
# fault on a slow machine.
EXACT = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
from dalsegno.train import Checkpointer

folder, losses, total, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
generation, rank = os.environ["DALSEGNO_GENERATION"], int(os.environ["RANK"])
torch.manual_seed(1)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo")
layers = [torch.nn.Linear(8, 200), torch.nn.BatchNorm1d(200), torch.nn.Dropout(0.1), torch.nn.Linear(200, 200)]
layers += [torch.nn.Linear(200, 1)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
class Drift:  # differs from rank to rank, and is in every loss: one that is not restored shows at once
    value = torch.full((1,), float(rank))
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]
drift = Drift()
written = os.open(losses, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
ckpt = Checkpointer(folder, model=model, optimizer=optimizer, per_rank={"drift": drift}, memory_every=1,
                    disk_every=40)
print("from", ckpt.resumed.source if ckpt.resumed else "nothing", ckpt.step, flush=True)
def loss_of(module, batch):
    inputs, drifted = batch
    return (module(inputs) ** 2).mean() * (1 + drifted.mean() / 100)
for step in ckpt.steps(total):
    while step >= int(open(losses + ".until").read()):
        time.sleep(0.01)
    batch = torch.randn(16, 8), drift.value
    ckpt.verify(model, batch, lambda module, batch: loss_of(module, batch).backward())
    loss = loss_of(model, batch)
    drift.value = drift.value * 0.9 + loss.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    os.write(written, f"{generation} {rank} {step} {loss.item().hex()}\\n".encode())
    ckpt.done(step, loss=loss)
    time.sleep(pause)
weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
print("ddp", *sorted(name for name in model._get_ddp_logging_data() if "backward_comp" in name or "comm" in name))
"""


class Training:
    """A run of the script above in its own folder."""

    def __init__(self, cli: Cli, work: Path, steps: int, pause_s: float, *options: str, until: int = STEPS) -> None:
        self.losses_file = work / "losses"
        self.wait_before(until)
        args = (str(work / "ckpt"), str(self.losses_file), str(steps), str(pause_s))
        shape = () if "-N" in options else SHAPE
        self.run = Run.start(cli, work, *shape, *options, script=EXACT, args=args)

    def losses(self) -> list[tuple[int, int, int, str]]:
        """Return generation, rank, step and loss of every line."""
        lines = self.losses_file.read_text().splitlines() if self.losses_file.exists() else []
        return [(int(g), int(rank), int(step), loss) for g, rank, step, loss in (line.split() for line in lines)]

    def wait_before(self, step: int) -> None:
        path = self.losses_file.with_name("losses.until")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name("until").write_text(str(step))
        path.with_name("until").rename(path)

    def step(self) -> int:
        return max((step for _, _, step, _ in self.losses()), default=-1)

    def weights(self) -> set[str]:
        logs = [self.run.log(rank) for rank in range(RANKS)]
        return {line.split()[1] for log in logs for line in log.splitlines() if line.startswith("weights")}

    def starts(self) -> dict[int, tuple[str, int]]:
        """Return the source and step from which each generation so far resumed."""
        found = {}
        for generation in range(1, self.run.generation + 1):
            for line in self.run.log(0, generation).splitlines():
                if line.startswith("from"):
                    found[generation] = (line.split()[1], int(line.split()[2]))
        return found

    def sources(self) -> list[str]:
        return [source for source, _ in self.starts().values()]

    def has_copies(self) -> bool:
        """Return whether a step of the current generation has copies on two nodes."""
        safe = self.run.safe()
        return safe.place[0] == safe.generation == self.run.generation


@pytest.fixture(scope="module")
def stopped(cluster_for_runs: Cli, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return a completed training whose ranks were ordered once to save and leave."""
    training = Training(cluster_for_runs, tmp_path_factory.mktemp("stopped"), STEPS, 0.02, until=20)
    run = training.run
    run.wait_for(lambda: training.step() > 10, LONG_S)
    os.kill(next(iter(run.agents().values())), signal.SIGUSR2)  # the signal that Slurm sends before the time limit
    run.wait_for(lambda: run.journal("signal"))
    training.wait_before(STEPS)
    assert run.wait_for_end(2 * LONG_S) == 0, run.tail()
    run.no_trace()
    return training


@pytest.fixture(scope="module")
def undisturbed(stopped: Training, cluster_for_runs: Cli, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Return the training that the others are compared with.

    Only the long suite runs a training without a stop. The short suite uses the stopped training instead: state that is
    lost at a stop would still show, because other faults happen at other steps.
    """
    if not LONG:
        return stopped
    training = Training(cluster_for_runs, tmp_path_factory.mktemp("undisturbed"), STEPS, 0.0)
    assert training.run.wait_for_end(2 * LONG_S) == 0, training.run.tail()
    training.run.no_trace()
    return training


def test_ddp_measures_how_long_a_rank_waits_for_others(undisturbed: Training) -> None:
    """`train/progress.py` reads these names; another version of torch may use others."""
    (measured,) = [line for line in undisturbed.run.log(0).splitlines() if line.startswith("ddp")]
    assert {"backward_comm_time", "backward_compute_comm_overlap_time"} <= set(measured.split())


def test_weights_are_bit_identical_after_kills_and_power_cuts(
    undisturbed: Training, cluster_for_runs: Cli, tmp_path: Path
) -> None:
    cli, dice = cluster_for_runs, random.Random(SEED)
    training = Training(cli, tmp_path, STEPS, 0.02, "--spares", "1", "--max-restarts", "100", until=EACH)
    run = training.run
    target = LocalTarget(cli.home / "clusters/one", cache=cli.home / "cache")
    faults = dice.sample(FAULTS, len(FAULTS))
    safe: dict[int, int] = {}  # node -> the newest safe step before the generation was ended
    for number, fault in enumerate(faults):
        reached = training.step()
        training.wait_before((number + 1) * EACH)
        run.wait_for(lambda reached=reached: training.step() > reached + 3, LONG_S)  # type: ignore[misc]
        time.sleep(dice.random() * 0.3)
        if fault != "worker" or number == 0:
            run.wait_for(training.has_copies, LONG_S)  # the loss of two nodes in a row may cost a step
        safe[run.generation] = max(0, run.safe().place[1], *safe.values())
        if fault == "power":
            target.power_off(dice.choice(run.nodes))
            cli.ok("up")
        else:
            run.wait_for(lambda fault=fault: kill_one(run, fault, dice))  # type: ignore[misc]
            print(fault, "at step", training.step(), flush=True)
    training.wait_before(STEPS)
    assert run.wait_for_end(2 * LONG_S) == 0, run.tail()
    assert training.weights() == undisturbed.weights()
    expected = {(rank, step): loss for _, rank, step, loss in undisturbed.losses()}
    seen = {(rank, step, loss) for _, rank, step, loss in training.losses()}
    assert seen == {(rank, step, loss) for (rank, step), loss in expected.items()}, "the loss curve is not continuous"
    starts = training.starts()
    assert len(starts) >= 0.7 * len(FAULTS), "most faults cost a generation; a spare's agent, or two at once, do not"
    assert {"memory"} <= {source for generation, (source, _) in starts.items() if generation > 1} <= {"memory", "disk"}
    for ended, step in safe.items():
        later = {generation: start for generation, start in starts.items() if generation > ended}
        assert all(began >= step for _, began in later.values()), f"{step} was safe in {ended}, and not in {later}"
    run.no_trace()


def kill_one(run: Run, kind: str, dice: random.Random) -> bool:
    """Kill one process. Raise an error if there is none because the run is still recovering."""
    victims = {"worker": run.workers, "agent": run.agents, "srun": run.sruns}[kind]()
    kill(dice.choice(sorted(victims.values() if isinstance(victims, dict) else victims)))
    return True


def test_node_with_a_flipped_bit_is_drained_and_the_weights_stay_bit_identical(
    undisturbed: Training, cluster_for_runs: Cli, tmp_path: Path
) -> None:
    """The bit is wrong in every backward pass from step 44 on, so the weights of all ranks are wrong until the check at
    step 48. The check at step 40 passed, and the checkpoint of step 40 is the newest that can be trusted.

    The node is convicted by the ranks of two other nodes, which got the same result."""
    cli = cluster_for_runs
    cli.ok("up", cli.file(for_runs(NODES).replace("mode: observe", "mode: auto")))
    training = Training(cli, tmp_path, STEPS, 0.0, "--spares", "1", "--verify-every", "8", until=44)
    run = training.run
    run.wait_for(lambda: training.step() == 43 and run.spares and list_steps(tmp_path / "ckpt"), LONG_S)
    members, (spare,) = run.nodes, run.spares
    cli.ok("inject", "bit-flip", members[1], "--run", run.id)
    training.wait_before(STEPS)
    assert run.wait_for_end(2 * LONG_S) == 0, run.tail()
    assert sorted(run.nodes) == sorted({*members, spare} - {members[1]})
    assert training.starts()[2] == ("disk", 40)
    assert training.weights() == undisturbed.weights() != set()
    assert {step for generation, _, step, _ in training.losses() if generation == 1} == set(range(48))
    (found,) = run.journal("corruption")
    assert (found["node"], found["step"], found["trusted"], found["ranks"]) == (members[1], 48, 40, [1])
    drained = cli.ok("shell", "--", "scontrol", "show", "node", members[1])
    votes = rf"rank 1 got \w{{8}}, ranks 0 on {members[0]} and 2 on {members[2]} got \w{{8}}"
    assert re.search(rf"Reason=dalsegno:drain:corruption wrong gradients in step 48: {votes}", drained), drained
    assert f"{members[1]}: wrong gradients in step 48" in cli.ok("why", run.id)
    cli.ok("up", cli.file(for_runs(NODES)))
    cli.ok("inject", "--clear", members[1])
    cli.ok("shell", "--", "scontrol", "update", f"NodeName={members[1]}", "State=RESUME")
    run.no_trace()


@pytest.mark.long
def test_run_says_that_late_copies_made_it_resume_from_disk(cluster_for_runs: Cli, tmp_path: Path) -> None:
    cli = cluster_for_runs
    training = Training(cli, tmp_path, 60, 0.01, "-N", "2", "--spares", "1", until=10)
    run = training.run
    run.wait_for(lambda: training.step() > 5 and training.has_copies(), LONG_S)
    (keeper,) = [pid for pid in run.processes() if comm(pid) == "ds:keeper" and node_of(pid) == run.nodes[1]]
    os.kill(keeper, signal.SIGSTOP)  # stopped, as if it got no CPU time, so that rank 1 is no longer copied
    training.wait_before(45)
    run.wait_for(lambda: run.safe().floor and any(path.name.endswith("40") for path in list_steps(tmp_path / "ckpt")))
    training.wait_before(50)
    run.wait_for(lambda: training.step() == 49)
    LocalTarget(cli.home / "clusters/one", cache=cli.home / "cache").power_off(run.nodes[1])
    training.wait_before(60)
    assert run.wait_for_end(LONG_S) == 0, run.tail()
    assert training.starts()[2] == ("disk", 40)
    (note,) = [each["text"] for each in run.journal("note") if each["text"].startswith("resumed from disk")]
    late = r"step 40: the newest memory snapshot \(step 4\d\) was incomplete: rank 1's copy was missing on its buddy"
    assert re.search(late, note), note
    assert note in cli.ok("why", run.id)
    cli.ok("up")
    run.no_trace()


@pytest.mark.long
def test_shrinking_and_growing_run_resumes_from_memory(cluster_for_runs: Cli, tmp_path: Path) -> None:
    cli = cluster_for_runs
    training = Training(cli, tmp_path, 40, 0.02, "-N", "3:4", "--exclude", "train-5,train-6", until=10)
    run = training.run
    run.wait_for(lambda: len(run.nodes) == 4, LONG_S)  # a node that is very late finds the others already training
    whole = run.generation
    training.wait_before(20)
    run.wait_for(lambda: training.step() > 5 and training.has_copies(), LONG_S)
    LocalTarget(cli.home / "clusters/one", cache=cli.home / "cache").power_off(run.nodes[-1])
    training.wait_before(30)  # in each generation, steps are made and copied
    run.wait_for(lambda: whole + 1 in training.starts() and training.has_copies(), LONG_S)
    cli.ok("up")
    run.wait_for(lambda: whole + 2 in training.starts(), LONG_S)
    training.wait_before(40)
    assert run.wait_for_end(LONG_S) == 0, run.tail()
    assert [len(each["nodes"]) for each in run.journal("generation") if each["generation"] >= whole] == [4, 3, 4]
    assert [training.starts()[whole + number][0] for number in (1, 2)] == ["memory", "memory"]
    run.no_trace()


def test_all_ranks_save_the_same_step_when_a_node_must_leave(stopped: Training, undisturbed: Training) -> None:
    ends = {max(step for g, rank, step, _ in stopped.losses() if (g, rank) == (1, each)) for each in range(RANKS)}
    assert len(ends) == 1, "all ranks have stopped after the same step"
    assert stopped.sources() == ["nothing", "disk"]
    assert min(step for g, _, step, _ in stopped.losses() if g == 2) == ends.pop() + 1, "no step is done twice"
    assert stopped.weights() == undisturbed.weights() != set()
