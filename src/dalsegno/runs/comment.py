"""The comment of a run's job, `dalsegno:<role>[ left=<node>,...]`: how coordinator and controller tell each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

OURS = "dalsegno:"
_LEFT = "left="


class JobRole(Enum):
    """What a Slurm job is to its run."""

    MAIN = "main"
    NEXT = "next"  # in which a run goes on that is longer than its job
    JOIN = "join"  # one node in place of a lost one
    UNKNOWN = "unknown"  # anybody may write a comment

    @classmethod
    def _missing_(cls, value: object) -> JobRole:
        return cls.UNKNOWN


@dataclass(frozen=True)
class RunComment:
    """`left`: the nodes of the job that the run does not need any more."""

    role: JobRole
    left: frozenset[str] = frozenset()


def left_comment(role: JobRole, nodes: Iterable[str]) -> str:
    """Return the comment of a job of this role that has left these nodes."""
    left = ",".join(sorted(nodes))
    return f"{OURS}{role.value}" + (f" {_LEFT}{left}" if left else "")


def read_comment(comment: str) -> RunComment | None:
    """Parse the comment of a job; None for one that is not a run's."""
    if not comment.startswith(OURS):
        return None
    role, _, rest = comment.removeprefix(OURS).partition(" ")
    left = rest.removeprefix(_LEFT) if rest.startswith(_LEFT) else ""
    return RunComment(JobRole(role), frozenset(left.split(",")) if left else frozenset())


def nodes_left(comment: str) -> frozenset[str]:
    """Return the nodes that a run has left, from the comment of its job."""
    found = read_comment(comment)
    return found.left if found else frozenset()
