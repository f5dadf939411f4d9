"""Injecting a fault into a node, and undoing what was injected."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from dalsegno.errors import TargetError, UsageError
from dalsegno.health.result import Remedy
from dalsegno.programs import launcher
from dalsegno.system.children import start
from dalsegno.targets.faults import XID_DEPTH, FaultOptions, InjectedFault
from dalsegno.targets.local.breaking.hardware import tell
from dalsegno.targets.local.breaking.kinds import OF_A_GPU, kind_of
from dalsegno.targets.local.breaking.network import check_rate, drop_program
from dalsegno.targets.local.breaking.processes import DAEMONS, check_runs, largest_task
from dalsegno.targets.local.breaking.records import Injected, forget, injected_into, is_current, note, remember
from dalsegno.targets.local.daemons import daemon_env
from dalsegno.targets.local.nodes import LocalNodes, find_worker, kill_worker
from dalsegno.targets.local.rack import power_off


def inject(nodes: LocalNodes, fault: InjectedFault, node: str, options: FaultOptions) -> dict[str, Any]:
    """Break a node; what was done, as facts. What lasts is written down, and its end arranged for, before it begins."""
    _check(nodes, fault, node, options)
    began, done = time.time(), _do(nodes, fault, node, options)
    remember(nodes.folder, node, _in_words(fault, options), began)
    return done


def _do(nodes: LocalNodes, fault: InjectedFault, node: str, options: FaultOptions) -> dict[str, Any]:
    if fault.name == "power-off":
        power_off(nodes, node)
        return {"is_node": nodes.is_node(node)}
    if fault.name == "worker-kill":
        return asdict(kill_worker(nodes, node, options.run, options.rank))
    done = note(nodes.folder, fault.name, node, _told(fault, options), _known(nodes, fault, node, options))
    if options.for_s is not None and fault.name != "net-cut":  # whose end is its own affair
        _undo_later(nodes, done, options.for_s)
    kind_of(fault.name).do(nodes, done)
    tell(nodes.folder, nodes.node(node), nodes.placement.gpus_simulated)
    return {**done.options, **done.undo}


def clear(nodes: LocalNodes, node: str, only: str | None = None) -> list[Injected]:
    """Undo all that was injected into a node and lasts, or only this fault; what it was."""
    _check_host(nodes, node)
    found = [fault for fault in injected_into(nodes.folder, node) if only in (None, fault.fault)]
    for fault in found:
        undo(nodes, fault)
        remember(nodes.folder, node, f"{fault.fault} is undone", time.time())
    return found


def undo(nodes: LocalNodes, fault: Injected) -> None:
    """One that a reboot has undone already is fine, and so is a node that is off."""
    if nodes.is_on(fault.node):
        kind_of(fault.fault).undo(nodes, fault)
    forget(nodes.folder, fault)
    tell(nodes.folder, nodes.node(fault.node), nodes.placement.gpus_simulated)


def undo_when_due(nodes: LocalNodes, node: str, mark: str) -> None:
    """For the timer: unless it is undone already, or another has taken its place."""
    for fault in injected_into(nodes.folder, node):
        if fault.mark == mark and is_current(nodes.folder, fault):
            undo(nodes, fault)


def _undo_later(nodes: LocalNodes, fault: Injected, for_s: float) -> None:
    argv = [*launcher(), "undo-fault", str(nodes.folder.root), fault.node, fault.mark, str(time.time() + for_s)]
    start(argv, daemon_env(nodes.folder), output=nodes.folder.log(fault.node, "faults")).close()


def _in_words(fault: InjectedFault, options: FaultOptions) -> str:
    code = f" {options.code}" if options.code is not None else ""
    return f"{fault.name}{code} is injected" + (f" for {options.for_s:g} s" if options.for_s is not None else "")


def _told(fault: InjectedFault, options: FaultOptions) -> dict[str, Any]:
    depth = options.until or (XID_DEPTH.get(options.code or 0) if fault.name == "xid" else None) or fault.mended_by
    given = {name: value for name, value in options.given().items() if name != "until"}
    return {**given, "mended_by": depth.value}


def _known(nodes: LocalNodes, fault: InjectedFault, node: str, options: FaultOptions) -> dict[str, Any]:
    """What must be known of what is there before it is broken."""
    if fault.name == "worker-hang":
        worker, process = find_worker(nodes, node, options.run, options.rank)
        return {**asdict(worker), "start": process.start}
    return largest_task(nodes, node) if fault.name == "oom" else {}


# What cannot be done is told before anything is -------------------------------------------------------------------


def _check(nodes: LocalNodes, fault: InjectedFault, node: str, options: FaultOptions) -> None:
    if fault.name == "power-off":
        _check_host(nodes, node)
    else:
        nodes.node(node)
    if fault.name == "power-off":
        nodes.check_virtual(node, "it has no power to cut")
    elif apart := kind_of(fault.name).apart:
        nodes.check_virtual(node, apart)
    if not nodes.is_on(node) and fault.name != "bad-replacement":
        already = " already" if fault.name == "power-off" else ""
        raise TargetError(f"{node} is off{already}", hint="`dalsegno up` boots it")
    if fault.name in DAEMONS:
        check_runs(nodes, node, DAEMONS[fault.name])
    if fault.name in OF_A_GPU:
        _check_gpu(nodes, node, options.gpu or 0)
    _check_amounts(options)


def _check_host(nodes: LocalNodes, name: str) -> None:
    """The head's power can be cut, too."""
    if name not in nodes.placement.addresses:
        nodes.node(name)


def _check_gpu(nodes: LocalNodes, node: str, gpu: int) -> None:
    count = nodes.node(node).gpus
    if not nodes.placement.gpus_simulated:
        raise TargetError(f"the GPUs of {node} are real", hint="set `local: {gpus: simulated}` to break them")
    if gpu >= count:
        there = f"it has {count}, counted from 0" if count else "give it some: `gpus: 8` in the cluster file"
        raise TargetError(f"{node} has no GPU {gpu}", hint=there)


def _check_amounts(options: FaultOptions) -> None:
    if options.rate is not None:
        check_rate(options.rate)
    if options.percent is not None:
        drop_program(options.percent)
    if options.until not in (None, Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE):
        raise UsageError(f"nothing is mended by `{options.until}`", hint="reset, reboot or replace")
    if options.code is not None and not 0 < options.code < 1000:
        raise UsageError(f"there is no Xid {options.code}", hint="they are numbers like 79")
