"""Power nodes off and on from outside, as a BMC or a cloud's API does.

Callers set the node down in Slurm first: if a host comes back while Slurm still has it in a job, Slurm ends the job.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from dalsegno.errors import TargetError
from dalsegno.system.children import Process, arguments, end, marked
from dalsegno.system.files import write_atomic
from dalsegno.system.hosts import PACKAGES, boot, host_process, read_plan, reload, write_plan
from dalsegno.system.network import link_names, run_ip
from dalsegno.targets.local.network import plug_in, remove_cgroups_of
from dalsegno.targets.local.nodes import LocalNodes, hold, service_processes, tasks_of

NODE_SERVICES = ("slurmd", "node-agent")


def power_off(nodes: LocalNodes, node: str) -> None:
    """Cut the power, without warning; a node that is off stays off."""
    if nodes.virtual:
        _cut_power(nodes, node)
    else:
        _kill_all(nodes, node)


def power_on(nodes: LocalNodes, node: str) -> None:
    """Boot a node that is off, with all its services. An interrupted boot is finished by booting again."""
    if nodes.virtual:
        _boot(nodes, node)
    else:
        _start_all(nodes, node)


def _cut_power(nodes: LocalNodes, node: str) -> None:
    """Take the link down first: what the kernel sends when a dying host's connections close must reach nobody."""
    host = host_process(nodes.folder.host(node))
    if host is None:
        return
    switch, port = nodes.switch().pid, nodes.port(node)
    if port in link_names(nodes.runner, switch):  # a host whose boot was interrupted may have none
        run_ip(nodes.runner, [f"link set {port} down"], switch)
    if end([host]):
        raise TargetError(f"{node} does not die", hint="a process of it may hang in the kernel")


def _boot(nodes: LocalNodes, node: str) -> None:
    plan = read_plan(nodes.folder.host(node))
    if plan is None:
        raise TargetError(f"{node} was never booted", hint="run `dalsegno up`")
    end(_half_booted(nodes, str(plan.path)))
    remove_cgroups_of(nodes.folder, node)
    plan = replace(plan, services=tuple(replace(service, hold=False) for service in plan.services))
    write_plan(plan)
    booted = boot(nodes.runner, [plan], str(nodes.folder.root))
    plug_in(nodes.runner, nodes.placement, nodes.switch().pid, booted, new=booted.keys())


def _half_booted(nodes: LocalNodes, plan: str) -> list[Process]:
    """Return processes of an interrupted boot, which may still become the host. (Hosts that were booted together have
    each other's plans among their arguments.)"""
    ours = marked(str(nodes.folder.root))
    return [process for process in ours if arguments(process.pid)[-2:] == [PACKAGES, plan]]


def _kill_all(nodes: LocalNodes, node: str) -> None:
    """Kill the daemons and job tasks of a node on loopback ports. The supervisor that all nodes share runs on."""
    names = [nodes.service(node, name) for name in NODE_SERVICES]
    hold(nodes, node, names, True)
    end([*service_processes(nodes, node, names), *tasks_of(nodes, node)])


def _start_all(nodes: LocalNodes, node: str) -> None:
    write_atomic(nodes.folder.boot_id(node), secrets.token_hex(8), durable=False)
    hold(nodes, node, [nodes.service(node, name) for name in NODE_SERVICES], False)
    reload(nodes.folder.host(nodes.host_name(node)))
