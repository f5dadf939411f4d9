"""Resume nodes that come back into service, and find nodes that have not registered with Slurm.

The targets `local`, `ssh` and `oci` use this.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dalsegno.errors import TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.slurm.parse.messages import is_absence
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.system.hanging_calls import slowness

REGISTER_S = 120.0
REMOVAL_REASON = "dalsegno:remove"
BOOT_REASON = "dalsegno:boot"


def resume_and_find_missing(slurm: SlurmClient, wanted: set[str], in_service: set[str], set_down: set[str]) -> set[str]:
    """Resume nodes whose reason to be out of service no longer holds. Return the nodes that have not registered.

    `set_down` are the nodes that this `up` set down. Such a node is resumed as soon as it responds, whatever its state:
    Slurm 24.11 may show it as MIXED while one of its jobs ends. Resumed nodes are removed from this set.

    A node that was just resumed counts as missing until a later call finds it in service, because Slurm's information
    may be from before the host was booted again.
    """
    nodes = [node for node in slurm.nodes() if node.name in wanted]
    back = {node.name for node in nodes if _is_back(node) or (node.name in set_down and node.responding)}
    resumed = back | {node.name for node in nodes if node.name in in_service and _is_spare(node)}
    for name in sorted(resumed):
        slurm.resume(name)
    set_down -= resumed
    return wanted - {node.name for node in nodes if is_registered(node) and node.name not in resumed}


def is_registered(node: NodeInfo) -> bool:
    return node.state not in (NodeState.UNKNOWN, NodeState.FUTURE) and node.responding


def _is_back(node: NodeInfo) -> bool:
    """Return whether the node responds again, and was out of service only because it was off or was going to be
    removed."""
    away = node.down and (is_absence(node.reason) or node.reason.startswith(BOOT_REASON))
    return node.responding and (away or (node.draining and node.reason.startswith(REMOVAL_REASON)))


def _is_spare(node: NodeInfo) -> bool:
    return node.draining and node.reason.startswith(SPARE_REASON)


def wait_for(done: Callable[[], bool], error: Callable[[], TargetError]) -> None:
    """Wait until `done` returns true. Raise `error` if that takes too long."""
    until = time.monotonic() + REGISTER_S * slowness()
    pause_s = 0.01
    while not done():
        if time.monotonic() > until:
            raise error()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.25)
