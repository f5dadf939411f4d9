"""What srun says of nodes on which it could not start anything, and of tasks that ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

_FAILED = re.compile(r"Task launch for (?:StepId=)?(?P<job>\d+)\S* failed on node (?P<node>[^\s:]+): (?P<why>.+)")
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
