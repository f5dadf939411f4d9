"""Why Slurm refuses a job or an operation, or gives no answer, in the words that its commands print."""

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


class SlurmTrouble(Enum):
    """Why a command of Slurm got no answer from its daemons."""

    NO_SETTINGS = "no-settings"  # no slurm.conf is known to the command
    NO_CONTROLLER = "no-controller"
    DISCONNECTED = "disconnected"
    NO_CONNECTION = "no-connection"
    NO_DATABASE = "no-database"
    NO_ACCOUNTING = "no-accounting"
    AUTHENTICATION = "authentication"


_TROUBLES = {
    "configuration source": SlurmTrouble.NO_SETTINGS,
    "fetch_config": SlurmTrouble.NO_SETTINGS,
    "slurm.conf: No such file": SlurmTrouble.NO_SETTINGS,
    "Unable to contact slurm controller": SlurmTrouble.NO_CONTROLLER,
    "Zero Bytes were transmitted": SlurmTrouble.DISCONNECTED,
    "connect failure": SlurmTrouble.NO_CONNECTION,
    "Connection refused": SlurmTrouble.NO_DATABASE,
    "accounting storage is disabled": SlurmTrouble.NO_ACCOUNTING,
    "authentication": SlurmTrouble.AUTHENTICATION,
    "Invalid credential": SlurmTrouble.AUTHENTICATION,
}


def parse_troubles(text: str) -> tuple[SlurmTrouble, ...]:
    """Return all troubles that a command of Slurm names, the deepest first; () for any other error."""
    return tuple(dict.fromkeys(trouble for words, trouble in _TROUBLES.items() if words in text))
