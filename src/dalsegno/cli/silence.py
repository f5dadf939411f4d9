"""A Slurm that does not answer, or that there is none, told from one that says no."""

from __future__ import annotations

from dalsegno.errors import CommandFailed, DalsegnoError, NotThere

_SIGNS = ("no answer within", "Unable to contact slurm controller", "Zero Bytes were transmitted", "connect failure")
# What Slurm's commands say where no slurm.conf is known to them.
_NO_SETTINGS = ("configuration source", "fetch_config", "slurm.conf: No such file")


def is_silence(fault: CommandFailed) -> bool:
    return any(sign in fault.stderr for sign in _SIGNS)


def meaning_of(fault: CommandFailed) -> DalsegnoError:
    """That there is no cluster, where Slurm's commands are installed and belong to none; else what they say."""
    return no_cluster() if any(words in fault.stderr for words in _NO_SETTINGS) else fault


def no_cluster() -> DalsegnoError:
    hint = "`dalsegno init` and `dalsegno up` make one here; on somebody's, set SLURM_CONF as they tell you"
    return NotThere("there is no cluster yet", hint=hint)
