"""Taking a node's host away and putting another in its place, from outside: what a BMC or a cloud's API does.

Slurm is not told here: whoever asks has set the node down before (a host that comes back under a job ends all of it).
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
    """Gone from one moment to the next; off already is fine."""
    if nodes.virtual:
        _cut_power(nodes, node)
    else:
        _kill_all(nodes, node)


def power_on(nodes: LocalNodes, node: str) -> None:
    """Boot a node that is off, with all its services. One that was cut short is finished by doing it again."""
    if nodes.virtual:
        _boot(nodes, node)
    else:
        _start_all(nodes, node)


def _cut_power(nodes: LocalNodes, node: str) -> None:
    """The cable first: what the kernel says for a dying host's connections must reach no one."""
    host = host_process(nodes.folder.host(node))
    if host is None:
        return
    switch, port = nodes.switch().pid, nodes.port(node)
    if port in link_names(nodes.runner, switch):  # a host whose boot was cut short may have none
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
    """Of a boot whose booter was killed: it may still be about to become the host. (Hosts that were booted together
    have each other's plans among their arguments.)"""
    ours = marked(str(nodes.folder.root))
    return [process for process in ours if arguments(process.pid)[-2:] == [PACKAGES, plan]]


def _kill_all(nodes: LocalNodes, node: str) -> None:
    """On loopback ports: its daemons and its jobs' tasks. Its supervisor, which is everybody's, lives on."""
    names = [nodes.service(node, name) for name in NODE_SERVICES]
    hold(nodes, node, names, True)
    end([*service_processes(nodes, node, names), *tasks_of(nodes, node)])


def _start_all(nodes: LocalNodes, node: str) -> None:
    write_atomic(nodes.folder.boot_id(node), secrets.token_hex(8), durable=False)
    hold(nodes, node, [nodes.service(node, name) for name in NODE_SERVICES], False)
    reload(nodes.folder.host(nodes.host_name(node)))
