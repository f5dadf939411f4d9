"""Inject a fault into a node, and undo injected faults."""

from __future__ import annotations

import pwd
import time
from dataclasses import asdict
from typing import Any

from dalsegno.errors import NotThere, TargetError, UsageError
from dalsegno.health.result import Remedy
from dalsegno.inject.access import NodeAccess
from dalsegno.inject.faults import XID_DEPTH, FaultOptions, InjectableFault, InjectedFault
from dalsegno.inject.methods import (
    DAEMONS,
    check_rate,
    check_runs,
    drop_program,
    find_worker,
    kill_worker,
    largest_task,
    method_of,
)
from dalsegno.inject.records import FaultRecord, changing, forget, is_current, read_records, record
from dalsegno.system.children import owner

# A node can have only one of these faults at a time, because each of them replaces the only queue of the node's link.
ONE_LIMIT = ("net-slow", "link-slow")
GPU_FAULTS = ("xid", "ecc", "gpu-lost", "gpu-hot", "nvlink", "slow-gpu")


def inject(nodes: NodeAccess, fault: InjectableFault, node: str, options: FaultOptions) -> dict[str, Any]:
    """Inject a fault and return its details. A lasting fault is recorded before it begins. If it has a time limit, its
    end is scheduled too."""
    _check(nodes, fault, node, options)
    if fault.name == "power-off":
        nodes.power_off(node)
        return {"is_node": nodes.is_node(node)}
    if fault.name == "worker-kill":
        return asdict(kill_worker(nodes, node, options.run, options.rank))
    recorded_options, undo = _recorded_options(fault, options), _undo_facts(nodes, fault, node, options)
    with changing(nodes.records(node)):
        done = record(nodes.records(node), fault.name, node, recorded_options, undo)
        if options.for_s is not None and fault.name != "net-cut":  # net-cut schedules its own end
            nodes.undo_at(done, time.time() + options.for_s)
        method_of(fault.name).do(nodes, done)
        nodes.write_hardware(node)
    return {**done.options, **done.undo}


def injected(nodes: NodeAccess, node: str) -> list[InjectedFault]:
    """Return the lasting faults of a node."""
    return [as_injected(one) for one in read_records(nodes.records(node))]


def clear(nodes: NodeAccess, node: str, only: str | None = None) -> list[InjectedFault]:
    """Undo the lasting faults of a node, or only the fault `only`, and return the faults that were undone."""
    _check_host(nodes, node)
    with changing(nodes.records(node)):
        found = [fault for fault in read_records(nodes.records(node)) if only in (None, fault.fault)]
        for fault in found:
            undo(nodes, fault)
    return [as_injected(one) for one in found]


def as_injected(one: FaultRecord) -> InjectedFault:
    return InjectedFault(one.fault, one.node, one.at, one.options.get("for_s"), one.ended_by.value)


def undo(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Undo a fault and remove its record, even if a reboot has already undone the fault or the node is off."""
    if nodes.is_on(fault.node):
        method_of(fault.fault).undo(nodes, fault)
    forget(nodes.records(fault.node), fault)
    nodes.write_hardware(fault.node)


def undo_when_due(nodes: NodeAccess, node: str, mark: str) -> None:
    """Undo the fault with this mark. Do nothing if it was already undone or a newer fault replaced it."""
    folder = nodes.records(node)
    with changing(folder):
        for fault in read_records(folder):
            if fault.mark == mark and is_current(folder, fault):
                undo(nodes, fault)


def _recorded_options(fault: InjectableFault, options: FaultOptions) -> dict[str, Any]:
    depth = options.until or (XID_DEPTH.get(options.code or 0) if fault.name == "xid" else None) or fault.ended_by
    given = {name: value for name, value in options.given().items() if name != "until"}
    return {**given, "repaired_by": depth.value}


def _undo_facts(nodes: NodeAccess, fault: InjectableFault, node: str, options: FaultOptions) -> dict[str, Any]:
    """Return what the record must contain about the affected process. It must be read before the fault begins."""
    if fault.name == "worker-hang":
        worker, process = find_worker(nodes, node, options.run, options.rank)
        return {**asdict(worker), "start": process.start}
    if fault.name == "bit-flip":
        worker, process = find_worker(nodes, node, options.run, options.rank)
        uid = owner(process.pid)
        if uid is None:
            raise NotThere(f"rank {worker.rank} on {node} has ended", hint="`dalsegno runs` shows the runs")
        return {**asdict(worker), "uid": uid, "gid": pwd.getpwuid(uid).pw_gid}
    return largest_task(nodes, node) if fault.name == "oom" else {}


def _check(nodes: NodeAccess, fault: InjectableFault, node: str, options: FaultOptions) -> None:
    """Raise an error if the fault cannot be injected. Change nothing."""
    if fault.name == "power-off":
        _check_host(nodes, node)
        nodes.check_virtual(node, "it has no power to cut")
    else:
        nodes.node(node)
        if apart := method_of(fault.name).apart:
            nodes.check_virtual(node, apart)
    if not nodes.is_on(node) and fault.name != "bad-replacement":
        already = " already" if fault.name == "power-off" else ""
        raise TargetError(f"{node} is off{already}", hint="`dalsegno up` boots it")
    if fault.name in DAEMONS:
        check_runs(nodes, node, DAEMONS[fault.name])
    if fault.name == "cloud-notice" and nodes.cloud == "none":
        raise TargetError("the nodes are on no cloud", hint="set `local: {cloud: ec2}` in the cluster file, then `up`")
    if fault.name in GPU_FAULTS:
        _check_gpu(nodes, node, options.gpu or 0)
    if fault.name in ONE_LIMIT:
        _check_limit(nodes, fault, node)
    if options.peer is not None:
        _check_peer(nodes, node, options.peer)
    _check_amounts(options)


def _check_host(nodes: NodeAccess, name: str) -> None:
    """Raise an error if the name is not a host. The head and login hosts are allowed too, because they can lose
    power."""
    if not nodes.is_host(name):
        nodes.node(name)


def _check_gpu(nodes: NodeAccess, node: str, gpu: int) -> None:
    count = nodes.node(node).gpus
    if not nodes.gpus_simulated:
        raise TargetError(f"the GPUs of {node} are real", hint="set `local: {gpus: simulated}` to inject GPU faults")
    if gpu >= count:
        there = f"it has {count}, counted from 0" if count else "set `gpus: 8` in the cluster file"
        raise TargetError(f"{node} has no GPU {gpu}", hint=there)


def _check_limit(nodes: NodeAccess, fault: InjectableFault, node: str) -> None:
    others = [one.fault for one in read_records(nodes.records(node)) if one.fault in ONE_LIMIT]
    for other in others:
        if other != fault.name:
            raise TargetError(
                f"{node} already has the fault `{other}`, which limits the same cable",
                hint=f"undo it first: `dalsegno inject --clear {other} {node}`",
            )


def _check_peer(nodes: NodeAccess, node: str, peer: str) -> None:
    if not nodes.is_host(peer):
        nodes.node(peer)
    if peer == node:
        raise UsageError("a link has two ends", where="--peer", hint=f"name another node than {node}")


def _check_amounts(options: FaultOptions) -> None:
    if options.rate is not None:
        check_rate(options.rate)
    if options.percent is not None:
        drop_program(options.percent)
    if options.until not in (None, Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE):
        raise UsageError(f"`{options.until}` cannot end a fault", hint="use reset, reboot or replace")
    if options.code is not None and not 0 < options.code < 1000:
        raise UsageError(f"invalid Xid {options.code}", hint="use a number such as 79")
