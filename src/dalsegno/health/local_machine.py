"""The local machine, and the hardware and settings that Slurm and the cluster file specify for it."""

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
from dalsegno.health.node_reader import Gpus, LocalNode
from dalsegno.health.settings import FILE, Settings, read_settings
from dalsegno.health.telemetry import VARIABLE as TELEMETRY
from dalsegno.system.children import ancestors, arguments, environment

# Slurm runs prologs and health checks with an almost empty environment that does not name slurm.conf, so these settings
# are read from slurmd's process


NODE = "SLURMD_NODENAME"
CONF = "SLURM_CONF"
_TAKEN = (CONF, TELEMETRY, "PATH")


def env_here(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment. If slurmd is an ancestor of this process, add slurmd's settings that are missing."""
    for pid in ancestors(os.getpid()) if env.get(NODE) else ():
        argv = arguments(pid)
        if argv and os.path.basename(argv[0]) == "slurmd":
            return {**slurmd_settings(argv, environment(pid)), **env}
    return dict(env)


def slurmd_settings(argv: list[str], environ: list[bytes]) -> dict[str, str]:
    """Return the settings of a slurmd with this command line and environment; option `-f` takes precedence."""
    pairs = (entry.decode(errors="surrogateescape").partition("=") for entry in environ)
    found = {name: value for name, _, value in pairs if name in _TAKEN and value}
    files = [value for option, value in pairwise(argv) if option == "-f"]
    files += [word[2:] for word in argv[1:] if word.startswith("-f") and len(word) > 2]
    return {**found, CONF: files[-1]} if files else found


# Settings and facts of this machine


PLACES = (
    "/etc/slurm/slurm.conf",
    "/etc/slurm-llnl/slurm.conf",
    "/opt/slurm/etc/slurm.conf",
    "/run/slurm/conf/slurm.conf",  # the path on a host that gets its files from slurmctld
)


def slurm_conf(env: Mapping[str, str]) -> Path:
    """Return the path of slurm.conf, whether it exists or not."""
    if env.get("SLURM_CONF"):
        return Path(env["SLURM_CONF"])
    return next((path for path in map(Path, PLACES) if path.exists()), Path(PLACES[0]))


def node_name(env: Mapping[str, str]) -> str:
    return env.get(NODE) or socket.gethostname().split(".")[0]


def machine_here(
    env: Mapping[str, str] = os.environ, node: str = "", gpus: Callable[[], Gpus] | None = None, cloud_file: str = ""
) -> LocalNode:
    conf = slurm_conf(env)
    try:
        text = conf.read_text(errors="replace")
    except OSError:
        text = ""
    expected = expected_of(node or node_name(env), text)
    why = _missing_reason(expected, conf, bool(text), env)
    return LocalNode(replace(expected, missing_reason=why, cloud_file=cloud_file), env, gpus)


def _missing_reason(expected: Expected, conf: Path, is_there: bool, env: Mapping[str, str]) -> str:
    """Return why slurm.conf has no line for this node; "" if it has one, or if Slurm does not run here."""
    if expected.named or not env.get(NODE):
        return ""
    if not is_there:
        return f"{conf} cannot be read and no other slurm.conf was found: set SLURM_CONF"
    return f"{conf} has no line for {expected.node}"


def settings_here(env: Mapping[str, str] = os.environ) -> Settings:
    """Return the check settings from the cluster file."""
    return read_settings(slurm_conf(env).with_name(FILE))


def identify_gpu(gpu: GpuFacts) -> GpuIdentity:
    """Return the identity of a GPU."""
    return GpuIdentity(gpu.index, gpu.uuid, gpu.serial, gpu.model)
