"""Tests of waiting for nodes that were booted again."""

from __future__ import annotations

from dalsegno.slurm.client import SlurmClient
from dalsegno.system.processes import FakeRunner
from dalsegno.targets.registration import resume_and_find_missing

NODE = (
    "NodeName=gpu-1 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.00 AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=(null) GresDrain=N/A NodeAddr=127.0.0.1 NodeHostName=vm Port=6818 Version=24.11.5 "
    "RealMemory=2000 AllocMem=0 FreeMem=900 Sockets=1 Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 "
    "Owner=N/A MCS_label=N/A Partitions=train  BootTime=1794805539 SlurmdStartTime=1794808449 "
    "LastBusyTime=1794808453 ResumeAfterTime=None CfgTRES=cpu=4 AllocTRES= CurrentWatts=0 AveWatts=0  {reason}\n"
)
BOOTING = NODE.format(state="DOWN", reason="Reason=dalsegno:boot [root@1794808453]")
SILENT = NODE.format(state="DOWN+NOT_RESPONDING", reason="Reason=dalsegno:boot [root@1794808453]")
ENDING = NODE.format(state="MIXED", reason="Reason=dalsegno:boot [root@1794808453]")
IN_SERVICE = NODE.format(state="IDLE", reason="")


def look(answer: str, set_down: set[str] | None = None) -> tuple[set[str], bool]:
    """Return the missing nodes, and whether the node was resumed."""
    runner = FakeRunner(lambda argv, _: answer if "show" in argv else "")
    missing = resume_and_find_missing(
        SlurmClient(runner, {}), {"gpu-1"}, {"gpu-1"}, set() if set_down is None else set_down
    )
    return missing, any("State=RESUME" in argv for argv in runner.calls)


def test_resumed_node_is_missing_until_in_service() -> None:
    assert look(BOOTING) == ({"gpu-1"}, True)
    assert look(IN_SERVICE) == (set(), False)


def test_node_that_does_not_answer_is_missing_and_not_resumed() -> None:
    assert look(SILENT) == ({"gpu-1"}, False)


def test_down_node_is_resumed_once_while_its_job_ends() -> None:
    set_down = {"gpu-1"}
    assert look(ENDING, set_down) == ({"gpu-1"}, True)
    assert look(ENDING, set_down) == (set(), False)
