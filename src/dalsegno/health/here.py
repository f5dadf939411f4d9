"""The machine that this runs on, with what Slurm and the cluster file expect of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from dalsegno.health.expected import Expected, expected_of
from dalsegno.health.facts import GpuFacts
from dalsegno.health.messages import GpuIdentity
from dalsegno.health.settings import FILE, Settings, read_settings
from dalsegno.health.telemetry import VARIABLE as TELEMETRY
from dalsegno.health.world import Gpus, LocalNode
from dalsegno.system.children import ancestors, arguments, environment

# ---- What is known of a node to the slurmd that started us. Slurm gives prologs and health checks an almost empty
# environment, without the slurm.conf that slurmd itself goes by.


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


# ---- The machine that this runs on, with what Slurm and the cluster file expect of it.


PLACES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/run/slurm/conf/slurm.conf",  # of a slurmd that gets its files from slurmctld
)


def slurm_conf(env: Mapping[str, str]) -> Path:
    """Slurm's file, whether it is there or not."""
    if env.get("SLURM_CONF"):
        return Path(env["SLURM_CONF"])
    return next((path for path in map(Path, PLACES) if path.exists()), Path(PLACES[0]))


def node_name(env: Mapping[str, str]) -> str:
    return env.get(NODE) or socket.gethostname().split(".")[0]


def machine_here(
    env: Mapping[str, str] = os.environ, node: str = "", gpus: Callable[[], Gpus] | None = None
) -> LocalNode:
    conf = slurm_conf(env)
    try:
        text = conf.read_text(errors="replace")
    except OSError:
        text = ""
    expected = expected_of(node or node_name(env), text)
    return LocalNode(replace(expected, untold=_untold(expected, conf, bool(text), env)), env, gpus)


def _untold(expected: Expected, conf: Path, is_there: bool, env: Mapping[str, str]) -> str:
    """Where Slurm has called us there is a file that tells of the node: not to see it is no machine without."""
    if expected.named or not env.get(NODE):
        return ""
    if not is_there:
        return f"{conf} cannot be read, and no other slurm.conf is known: set SLURM_CONF"
    return f"{conf} has no line for {expected.node}"


def settings_here(env: Mapping[str, str] = os.environ) -> Settings:
    """What the cluster file says of checks."""
    return read_settings(slurm_conf(env).with_name(FILE))


def passport(gpu: GpuFacts) -> GpuIdentity:
    """What tells this GPU from all others."""
    return GpuIdentity(gpu.index, gpu.uuid, gpu.serial, gpu.model)
