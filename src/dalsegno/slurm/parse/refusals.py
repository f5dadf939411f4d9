"""Why Slurm refuses a job or an operation, in the words that salloc, sbatch and scontrol print."""

from __future__ import annotations

from enum import Enum


class SlurmRefusal(Enum):
    """What a job asks for and cannot have, or what may not be done with it."""

    MEMORY = "memory"
    FEATURE = "feature"
    NODE_NAME = "node-name"
    ACCOUNT = "account"
    QOS = "qos"
    TIME_LIMIT = "time-limit"
    POLICY = "policy"
    NO_SUCH_NODES = "no-such-nodes"  # no node there is could ever be given
    REQUEUE_DISABLED = "requeue-disabled"  # the job was submitted with --no-requeue
    UNKNOWN = "unknown"


# Slurm may print several of them: the more telling ones come first.
_WORDS = {
    "Memory specification": SlurmRefusal.MEMORY,
    "Invalid feature": SlurmRefusal.FEATURE,
    "Invalid node name": SlurmRefusal.NODE_NAME,
    "Invalid account": SlurmRefusal.ACCOUNT,
    "Invalid qos": SlurmRefusal.QOS,
    "Requested time limit": SlurmRefusal.TIME_LIMIT,
    "QOS policy": SlurmRefusal.POLICY,
    "node configuration": SlurmRefusal.NO_SUCH_NODES,
    "Requested operation is presently disabled": SlurmRefusal.REQUEUE_DISABLED,
}


def parse_refusal(text: str) -> SlurmRefusal:
    """Return the most telling refusal in what a command of Slurm has printed."""
    return next((refusal for words, refusal in _WORDS.items() if words in text), SlurmRefusal.UNKNOWN)
