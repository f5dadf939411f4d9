"""Parse the output of salloc, and srun's messages about tasks that could not start or that ended."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.hostlist import HostlistError, expand

_GRANTED = re.compile(r"(Granted|Pending) job allocation (\d+)")
_SALLOC_NAME = re.compile(r"salloc: (?:error: )?")
# The path of Dal Segno's package inside a run's container. If a node's Slurm does not know the container options, srun
# silently starts tasks outside the container, where this path does not exist.
INSIDE = "/.dalsegno/dalsegno"
_NO_CONTAINER = 125  # NO_CONTAINER in `native/enter.h`
_FAILED = re.compile(r"Task launch for (?:StepId=)?(?P<job>\d+)\S* failed on node (?P<node>[^\s:]+): (?P<why>.+)")
_OUTSIDE = re.compile(
    rf"can't open file '{INSIDE}[^\n]*\n(?:(?!srun: error: )[^\n]*\n)*srun: error: (?P<nodes>\S+): tasks? \d"
)
# A message of Dal Segno's plugin. The code in brackets decides; the text is for people. Older plugins print no code.
# This message is the plugin's only channel to a run: the plugin runs in slurmstepd, which knows neither the run nor its
# folder. The exit code 125 alone is not reliable. srun ends with the highest exit code of all tasks, and the tasks that
# srun kills hide the 125. srun's line about each task shows the 125, but srun also reports 125 for a program that exits
# with 125 inside its container.
_REFUSED = re.compile(rf"^dalsegno: (?P<node>[^\s:]+): container(?:\[{_NO_CONTAINER}\])?: (?P<why>.+)$", re.MULTILINE)
_NO_PROGRAM = re.compile(r"^slurmstepd-(?P<node>[^\s:]+): error: execve\(\): (?P<program>[^:\n]+): (?P<why>.+)$", re.M)
_ENDED = re.compile(r"^srun: error: (?P<nodes>\S+): tasks? \d", re.MULTILINE)
_EXITED = re.compile(r"tasks? [\d, -]+: Exited with exit code (\d+)")


@dataclass(frozen=True)
class SallocAnswer:
    """The job that salloc waits for or was granted, and its last message."""

    job: int | None = None
    granted: bool = False
    last_words: str = ""


def parse_salloc(text: str) -> SallocAnswer:
    found = _GRANTED.findall(text)
    if not found:
        return SallocAnswer(last_words=_last_message(text))
    word, job = found[-1]
    return SallocAnswer(int(job), word == "Granted", _last_message(text))


def _last_message(text: str) -> str:
    """Return salloc's last message, without its `salloc:` prefix."""
    lines = [_SALLOC_NAME.sub("", line).strip() for line in text.splitlines() if line.startswith("salloc:")]
    return next((line for line in reversed(lines) if line and "Relinquishing" not in line), "")


def launch_failures(text: str, job: int, nodes: Collection[str]) -> dict[str, str]:
    """Return which of `nodes` could not launch a step of this job, with the reason for each.

    If one node fails, srun ends the step on all nodes, so the killed tasks on other nodes are not failures.
    """
    found = [each for each in _FAILED.finditer(text) if int(each["job"]) == job and each["node"] in nodes]
    return {each["node"]: each["why"].strip() for each in found}


def first_exit_code(text: str) -> int | None:
    """Return the exit code of the first task that exited by itself; None if there is none.

    srun exits with the highest exit code of all tasks, which often comes from a task that was killed after the failure.
    """
    found = _EXITED.search(text)
    return int(found[1]) if found else None


def ended_on(text: str) -> set[str]:
    """Return the nodes on which a task ended with an error or a signal. srun does not report successful tasks."""
    return {node for each in _ENDED.finditer(text) for node in _expand(each["nodes"])}


def started_outside(text: str, node: str) -> bool:
    """Return whether srun started an agent on this node outside its container."""
    return any(node in _expand(each["nodes"]) for each in _OUTSIDE.finditer(text))


def refused_containers(text: str) -> dict[str, str]:
    """Return the nodes on which Dal Segno's plugin could not start a container, with the last reason for each."""
    return {each["node"]: each["why"].strip() for each in _REFUSED.finditer(text)}


def why_not_started(text: str, node: str) -> str:
    """Return the last reason why a task on this node could not start; "" if unknown."""
    refused = [why for name, why in refused_containers(text).items() if name == node]
    missing = [f"`{each['program']}`: {each['why']}" for each in _NO_PROGRAM.finditer(text) if each["node"] == node]
    return (refused or missing or [""])[-1].strip()


def _expand(nodes: str) -> list[str]:
    try:
        return expand(nodes)
    except HostlistError:
        return []
