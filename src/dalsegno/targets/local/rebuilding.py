"""What the machine room does to a node: its GPUs reset, its host booted anew, another machine in its place."""

from __future__ import annotations

import secrets

from dalsegno.errors import TargetError
from dalsegno.health.result import Remedy
from dalsegno.system.files import make_folder, remove_tree, write_atomic
from dalsegno.targets.local.breaking.hardware import tell
from dalsegno.targets.local.breaking.records import Injected, forget, injected_into, note
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.nodes import Nodes
from dalsegno.targets.local.rack import power_off, power_on

BAD = "bad-replacement"


def reset_gpus(nodes: Nodes, node: str) -> None:
    if not nodes.is_on(node):
        raise TargetError(f"{node} is off", hint="reboot or replace it")
    if not nodes.placement.gpus_simulated:
        raise TargetError(f"the GPUs of {node} are this machine's own", hint="reset them there: `nvidia-smi -r`")
    mend(nodes, node, Remedy.RESET)


def reboot(nodes: Nodes, node: str) -> None:
    """Whether it is on, hangs or is off."""
    power_off(nodes, node)
    mend(nodes, node, Remedy.REBOOT)
    power_on(nodes, node)


def replace(nodes: Nodes, node: str) -> None:
    """Other GPUs, another secret, nothing of what the old machine kept."""
    power_off(nodes, node)
    remove_tree(nodes.folder.spool(node))
    make_folder(nodes.folder.spool(node))
    bad = _bad(nodes, node)
    if not (bad and bad.options.get("same")):
        write_atomic(nodes.folder.machine(node), secrets.token_hex(8), durable=False)
    draw_secret(nodes.folder, node)
    mend(nodes, node, Remedy.REPLACE)
    power_on(nodes, node)


def draw_secret(folder: Folder, node: str) -> None:
    make_folder(folder.agent_secret(node).parent, 0o700)
    write_atomic(folder.agent_secret(node), secrets.token_hex(32), 0o600, durable=False)


def mend(nodes: Nodes, node: str, remedy: Remedy) -> None:
    """What this remedy helps against is over; a machine that is said to be bad comes with a fault of its own."""
    found = injected_into(nodes.folder, node)
    for fault in found:
        if fault.fault != BAD and not remedy < fault.mended_by:
            forget(nodes.folder, fault)
    bad = _bad(nodes, node)
    if bad is not None and remedy is Remedy.REPLACE:
        _spoil(nodes.folder, bad)
    tell(nodes.folder, nodes.node(node), nodes.placement.gpus_simulated)


def _bad(nodes: Nodes, node: str) -> Injected | None:
    return next((fault for fault in injected_into(nodes.folder, node) if fault.fault == BAD), None)


def _spoil(folder: Folder, bad: Injected) -> None:
    left = int(bad.options.get("count", 1)) - 1
    if not bad.options.get("same"):
        note(folder, "ecc", bad.node, {"count": 7, "mended_by": Remedy.REPLACE.value})
    if left:
        note(folder, BAD, bad.node, {**bad.options, "count": left})
    else:
        forget(folder, bad)
