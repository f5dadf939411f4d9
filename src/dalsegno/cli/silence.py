"""A Slurm that does not answer, or that there is none, told from one that says no."""

from __future__ import annotations

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError, NotThere
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles

_SILENT = frozenset({SlurmTrouble.NO_CONTROLLER, SlurmTrouble.DISCONNECTED, SlurmTrouble.NO_CONNECTION})


def is_silence(fault: CommandFailed) -> bool:
    return isinstance(fault, CommandTimedOut) or not _SILENT.isdisjoint(parse_troubles(fault.stderr))


def meaning_of(fault: CommandFailed) -> DalsegnoError:
    """That there is no cluster, where Slurm's commands are installed and belong to none; else what they say."""
    return no_cluster() if SlurmTrouble.NO_SETTINGS in parse_troubles(fault.stderr) else fault


def no_cluster() -> DalsegnoError:
    hint = "`dalsegno init` and `dalsegno up` make one here; on somebody's, set SLURM_CONF as they tell you"
    return NotThere("there is no cluster yet", hint=hint)
