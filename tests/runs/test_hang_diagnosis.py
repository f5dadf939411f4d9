"""Tests of the diagnosis of a hanging run: real agents, real workers, and PyTorch's flight recorder over gloo."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dalsegno.runs import journal
from dalsegno.runs.coordinator.agents.hangs import HangWatch
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.why import explain_run
from tests.runs.played import Played, in_loop, played

pytestmark = pytest.mark.cluster

TRAINS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}.{generation}", rank=rank, world_size=2)
grads = torch.ones(8)
for step in range(3):
    dist.all_reduce(grads)
print("dumps to", os.environ["TORCH_FR_DUMP_TEMP_FILE"])
print("trained", flush=True)
"""
TORCH = {"modules": ("torch", "torch.distributed"), "workers_env": {"TORCHELASTIC_RUN_ID": "train"}}


async def hang_of(run: Played) -> Entry:
    """Wait until all ranks have trained, let the run hang for a second, and return the recorded report."""
    await run.until(lambda: all("trained" in run.log(rank) for rank in (0, 1)))
    run.coordinator.hangs = HangWatch(run.coordinator, 1.0)
    await run.until(lambda: "hung" in run.events())
    return next(entry for entry in journal.read(run.folder.journal) if entry["event"] == RunEvent.HUNG)


@in_loop
async def test_rank_that_left_the_collectives_is_named_with_its_line(tmp_path: Path) -> None:
    script = TRAINS + "if generation == 1:\n    time.sleep(600) if rank == 1 else dist.all_reduce(grads)\n"
    async with played(tmp_path, script, "n1", "n2", **TORCH) as run:
        hung = await hang_of(run)
        node = run.who(1)[1]
        assert (hung["ranks"], hung["nodes"], hung["collective"], hung["suspect"]) == (
            [1],
            [node],
            "all_reduce",
            "code",
        )
        assert hung["text"].startswith(f"rank 1 on {node} did not arrive: it is at {tmp_path}/train.py:")
        assert "in collective 4 of process group 0, all_reduce (8)" in hung["text"]
        assert f"dumps to {run.folder.all_stacks}/g0001-flight-" in run.log(1), "and so does torch itself"
        assert await run.ends() == 0, "the next generation trains"
        assert not os.path.exists(run.folder.flight_dump(2, 0)), "only a hang leaves a dump"


@in_loop
async def test_stopped_rank_makes_its_node_suspect(tmp_path: Path) -> None:
    script = TRAINS + "while generation == 1:\n    dist.all_reduce(grads)\n    time.sleep(0.05)\n"
    async with played(tmp_path, script, "n1", "n2", **TORCH) as run:
        await run.until(lambda: all("trained" in run.log(rank) for rank in (0, 1)))
        pid, node = run.who(1)
        os.kill(pid, signal.SIGSTOP)
        hung = await hang_of(run)
        assert (hung["ranks"], hung["nodes"], hung["suspect"]) == ([1], [node], "node")
        assert "a signal from outside has stopped the process" in hung["text"]
        assert await run.ends() == 0
        answer = explain_run(run.status, list(journal.read(run.folder.journal)))
        assert answer.sentence.startswith("run train-") and "is done after 2 generations" in answer.sentence


@pytest.mark.long
@in_loop
async def test_timeout_of_a_collective_leaves_the_stack_of_the_rank_that_did_not_arrive(tmp_path: Path) -> None:
    """`tests/runs/test_hangs.py` shows the order of events; here gloo's own timeout comes before any hang limit."""
    script = TRAINS.replace("world_size=2", "world_size=2, timeout=__import__('datetime').timedelta(seconds=1)")
    script += "if generation == 1:\n    wait() if rank == 1 else dist.all_reduce(grads)\n"
    async with played(tmp_path, script, "n1", "n2", **TORCH) as run:
        await run.until(lambda: "hung" in run.events())
        hung = next(entry for entry in journal.read(run.folder.journal) if entry["event"] == RunEvent.HUNG)
        assert hung["ranks"] == [1] and f"{tmp_path}/train.py:" in hung["text"]
        assert "in collective 4 of process group 0, all_reduce (8)" in hung["text"], "from the rank that timed out"
        assert run.events().index("failed") < run.events().index("hung")
        assert await run.ends() == 0, "the next generation trains"
