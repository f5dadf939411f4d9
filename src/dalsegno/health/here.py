"""The machine that this runs on, with what Slurm and the cluster file expect of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from dalsegno.health.expected import expected_of
from dalsegno.health.facts import GpuFacts
from dalsegno.health.report import Gpu
from dalsegno.health.settings import FILE, Settings, read_settings
from dalsegno.health.world import Gpus, Machine

PLACES = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/opt/slurm/etc/slurm.conf")


def slurm_conf(env: Mapping[str, str]) -> Path:
    """Slurm's file, whether it is there or not."""
    if env.get("SLURM_CONF"):
        return Path(env["SLURM_CONF"])
    return next((path for path in map(Path, PLACES) if path.exists()), Path(PLACES[0]))


def node_name(env: Mapping[str, str]) -> str:
    return env.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def machine_here(
    env: Mapping[str, str] = os.environ, node: str = "", gpus: Callable[[], Gpus] | None = None
) -> Machine:
    try:
        text = slurm_conf(env).read_text(errors="replace")
    except OSError:
        text = ""
    return Machine(expected_of(node or node_name(env), text), env, gpus)


def settings_here(env: Mapping[str, str] = os.environ) -> Settings:
    """What the cluster file says of checks."""
    return read_settings(slurm_conf(env).with_name(FILE))


def passport(gpu: GpuFacts) -> Gpu:
    """What tells this GPU from all others."""
    return Gpu(gpu.index, gpu.uuid, gpu.serial, gpu.model)
