"""What srun says of nodes on which it could not start anything, and of tasks that ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from dalsegno.hostlist import HostlistError, expand

# Where our package is inside a run's container, and only there: on a node whose Slurm does not know the options, srun
# starts tasks on the bare node and says nothing. There is no such file there.
INSIDE = "/.dalsegno/dalsegno"
_FAILED = re.compile(r"Task launch for (?:StepId=)?(?P<job>\d+)\S* failed on node (?P<node>[^\s:]+): (?P<why>.+)")
_OUTSIDE = re.compile(
    rf"can't open file '{INSIDE}[^\n]*\n(?:(?!srun: error: )[^\n]*\n)*srun: error: (?P<nodes>\S+): tasks? \d"
)
_REFUSED = re.compile(r"^dalsegno: (?P<node>[^\s:]+): container: (?P<why>.+)$", re.MULTILINE)  # our own plugin
_NO_PROGRAM = re.compile(r"^slurmstepd-(?P<node>[^\s:]+): error: execve\(\): (?P<program>[^:\n]+): (?P<why>.+)$", re.M)
_ENDED = re.compile(r"^srun: error: (?P<nodes>\S+): tasks? \d", re.MULTILINE)
_EXITED = re.compile(r"tasks? [\d, -]+: Exited with exit code (\d+)")


def launch_failures(text: str, job: int, nodes: Collection[str]) -> dict[str, str]:
    """Node → why, for those of `nodes` that a step of this job did not get to.

    One is enough for srun to give the step up everywhere: that the others were killed says nothing about them.
    """
    found = [each for each in _FAILED.finditer(text) if int(each["job"]) == job and each["node"] in nodes]
    return {each["node"]: each["why"].strip() for each in found}


def first_exit_code(text: str) -> int | None:
    """Of the first task that ended by itself. srun itself ends with the highest code of all, and that is often the one
    of tasks which were ended because another had failed."""
    found = _EXITED.search(text)
    return int(found[1]) if found else None


def ended_on(text: str) -> set[str]:
    """Nodes on which a task is over, however it ended. Of one that ended well srun says nothing."""
    return {node for each in _ENDED.finditer(text) for node in _expand(each["nodes"])}


def started_outside(text: str, node: str) -> bool:
    """Whether srun has started an agent on this node, but not in its container."""
    return any(node in _expand(each["nodes"]) for each in _OUTSIDE.finditer(text))


def refused_containers(text: str) -> dict[str, str]:
    """Node → why no task had its container there, the last time, as our own plugin tells it."""
    return {each["node"]: each["why"].strip() for each in _REFUSED.finditer(text)}


def why_not_started(text: str, node: str) -> str:
    """What kept a task on this node from starting, the last time; "" where it is not known."""
    refused = [why for name, why in refused_containers(text).items() if name == node]
    missing = [f"`{each['program']}`: {each['why']}" for each in _NO_PROGRAM.finditer(text) if each["node"] == node]
    return (refused or missing or [""])[-1].strip()


def _expand(nodes: str) -> list[str]:
    try:
        return expand(nodes)
    except HostlistError:
        return []
