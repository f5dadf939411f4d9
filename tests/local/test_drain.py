"""Waiting for nodes that were booted again."""

from __future__ import annotations

from dalsegno.slurm.client import SlurmClient
from dalsegno.system.processes import FakeRunner
from dalsegno.targets.local.drain import resume_and_find_missing

NODE = "NodeName=gpu-1 CPUTot=4 RealMemory=2000 State={state} Partitions=train {reason}"
BOOTING = NODE.format(state="DOWN", reason="Reason=dalsegno:boot [root@1794808453]")
SILENT = NODE.format(state="DOWN+NOT_RESPONDING", reason="Reason=dalsegno:boot [root@1794808453]")
IN_SERVICE = NODE.format(state="IDLE", reason="")


def look(answer: str) -> tuple[set[str], bool]:
    """Return the missing nodes, and whether the node was resumed."""
    runner = FakeRunner(lambda argv, _: answer if "show" in argv else "")
    missing = resume_and_find_missing(SlurmClient(runner, {}), {"gpu-1"}, {"gpu-1"})
    return missing, any("State=RESUME" in argv for argv in runner.calls)


def test_node_that_is_resumed_counts_as_missing_until_it_is_in_service() -> None:
    assert look(BOOTING) == ({"gpu-1"}, True)
    assert look(IN_SERVICE) == (set(), False)


def test_node_that_does_not_answer_is_missing_and_not_resumed() -> None:
    assert look(SILENT) == ({"gpu-1"}, False)
