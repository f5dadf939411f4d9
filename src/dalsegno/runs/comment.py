"""The comment of a run's job, `dalsegno:<role>[ left=<node>,...]`, which the coordinator writes for the controller."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

OURS = "dalsegno:"
_LEFT = "left="


class JobRole(Enum):
    """The role of a Slurm job in its run."""

    MAIN = "main"
    NEXT = "next"  # the job in which the run continues after its main job
    JOIN = "join"  # a one-node job that replaces a lost node
    UNKNOWN = "unknown"  # the comment contains a different role

    @classmethod
    def _missing_(cls, value: object) -> JobRole:
        return cls.UNKNOWN


@dataclass(frozen=True)
class RunComment:
    """A parsed comment. `left` contains the job's nodes that the run has left and no longer needs."""

    role: JobRole
    left: frozenset[str] = frozenset()


def left_comment(role: JobRole, nodes: Iterable[str]) -> str:
    """Return a job's comment, which contains its role and the nodes that the run has left."""
    left = ",".join(sorted(nodes))
    return f"{OURS}{role.value}" + (f" {_LEFT}{left}" if left else "")


def read_comment(comment: str) -> RunComment | None:
    """Parse the comment of a job; return None if the job does not belong to a run."""
    if not comment.startswith(OURS):
        return None
    role, _, rest = comment.removeprefix(OURS).partition(" ")
    left = rest.removeprefix(_LEFT) if rest.startswith(_LEFT) else ""
    return RunComment(JobRole(role), frozenset(left.split(",")) if left else frozenset())


def nodes_left(comment: str) -> frozenset[str]:
    """Return the nodes that the run has left, according to the comment of its job."""
    found = read_comment(comment)
    return found.left if found else frozenset()
