"""What is known of a node to the slurmd that started us. Slurm gives prologs and health checks an almost empty
environment, without the slurm.conf that slurmd itself goes by."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise

from dalsegno.health.telemetry import VARIABLE as TELEMETRY
from dalsegno.system.procfs import ancestors, arguments, environment

NODE = "SLURMD_NODENAME"
CONF = "SLURM_CONF"
_TAKEN = (CONF, TELEMETRY, "PATH")


def env_here(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment; where Slurm has started us, with what its slurmd has beside it."""
    for pid in ancestors(os.getpid()) if env.get(NODE) else ():
        words = arguments(pid)
        if words and os.path.basename(words[0]) == "slurmd":
            return {**slurmds_own(words, environment(pid)), **env}
    return dict(env)


def slurmds_own(words: list[str], environ: list[bytes]) -> dict[str, str]:
    """Of a slurmd with this command line and environment: the file it was told goes before the one it was given."""
    pairs = (entry.decode(errors="surrogateescape").partition("=") for entry in environ)
    found = {name: value for name, _, value in pairs if name in _TAKEN and value}
    told = [value for option, value in pairwise(words) if option == "-f"]
    told += [word[2:] for word in words[1:] if word.startswith("-f") and len(word) > 2]
    return {**found, CONF: told[-1]} if told else found
