"""Slurm's files, answers and commands: render, parse, ask.

The names below are loaded when first used: a command that only needs a host list pays for nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dalsegno.slurm.accounts_info import AccountsInfo
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.slurm.job_info import JobInfo
    from dalsegno.slurm.layout import Cgroups, Dbd, Host, Layout, NodePlace, Paths, Programs, Storage, Timeouts
    from dalsegno.slurm.node_info import NodeInfo
    from dalsegno.slurm.parse.ping import ControllerPing
    from dalsegno.slurm.parse.sdiag import Diagnostics
    from dalsegno.slurm.parse.sinfo import PartitionInfo
    from dalsegno.slurm.parse.text import ParseError
    from dalsegno.slurm.render import (
        SPARE_REASON,
        accounting_commands,
        render_cgroup_conf,
        render_gres_conf,
        render_slurm_conf,
        render_slurmdbd_conf,
        render_topology_conf,
        reservation_commands,
    )
    from dalsegno.slurm.states import JobState, NodeFlag, NodeState
    from dalsegno.slurm.version import Version

__all__ = [
    "SPARE_REASON",
    "AccountsInfo",
    "Cgroups",
    "ControllerPing",
    "Dbd",
    "Diagnostics",
    "Host",
    "JobInfo",
    "JobState",
    "Layout",
    "NodeFlag",
    "NodeInfo",
    "NodePlace",
    "NodeState",
    "ParseError",
    "PartitionInfo",
    "Paths",
    "Programs",
    "SlurmClient",
    "Storage",
    "Timeouts",
    "Version",
    "accounting_commands",
    "render_cgroup_conf",
    "render_gres_conf",
    "render_slurm_conf",
    "render_slurmdbd_conf",
    "render_topology_conf",
    "reservation_commands",
]

_HOMES = {
    "accounts_info": ("AccountsInfo",),
    "client": ("SlurmClient",),
    "job_info": ("JobInfo",),
    "layout": ("Cgroups", "Dbd", "Host", "Layout", "NodePlace", "Paths", "Programs", "Storage", "Timeouts"),
    "node_info": ("NodeInfo",),
    "parse.ping": ("ControllerPing",),
    "parse.sdiag": ("Diagnostics",),
    "parse.sinfo": ("PartitionInfo",),
    "parse.text": ("ParseError",),
    "render": (
        "SPARE_REASON",
        "accounting_commands",
        "render_cgroup_conf",
        "render_gres_conf",
        "render_slurm_conf",
        "render_slurmdbd_conf",
        "render_topology_conf",
        "reservation_commands",
    ),
    "states": ("JobState", "NodeFlag", "NodeState"),
    "version": ("Version",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
