"""Doing a plan: every step is safe to do again, so an interrupted `up` is finished by the next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.hostlist import compress
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.hosts import HostPlan, boot, host_process, reload, write_plan
from dalsegno.system.machine import Machine
from dalsegno.system.processes import Runner
from dalsegno.system.procfs import Process
from dalsegno.targets.base import Say
from dalsegno.targets.local import furnish
from dalsegno.targets.local.accounting import register_cluster, update_people, update_reservations
from dalsegno.targets.local.cables import plug_in
from dalsegno.targets.local.daemons import hold_all, port_answers, socket_answers, start_services, wait_until
from dalsegno.targets.local.database import fill_database
from dalsegno.targets.local.drain import drain_and_wait, wait_for_nodes
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import BACKUP, LOOPBACK, SWITCH, VIRTUAL
from dalsegno.targets.local.plan import LocalPlan
from dalsegno.targets.local.remove import remove_hosts
from dalsegno.targets.local.store import MAKING, UP, State, write_applied, write_state
from dalsegno.targets.local.sweep import end_strays


@dataclass(frozen=True)
class Site:
    """What the steps work with."""

    runner: Runner
    folder: Folder
    machine: Machine
    cache: Path
    slurm: SlurmClient
    machine_passwd: str
    say: Say


def apply(site: Site, plan: LocalPlan, before: State | None) -> None:
    """Bring the cluster from where it is to where the plan says."""
    state = State(
        phase=MAKING,
        placement=plan.placement,
        slurm_version=site.machine.slurm_version,
        owner_uid=before.owner_uid if before else owner_uid(),
        registered=before.registered if before else False,
    )
    furnish.make_folders(site.folder, plan)
    write_state(site.folder, state)  # first of all: from here on `down` and `status` know of it
    if plan.remove_nodes or plan.remove_partitions:
        drain_and_wait(site.slurm, plan, site.say)
    _put_files(site, plan)
    _boot_hosts(site, plan)
    state = _start_head(site, plan, state)
    _start_nodes(site, plan)
    remove_hosts(site.runner, site.folder, plan.remove_hosts)
    _settle(site, plan)
    write_applied(site.folder, plan.cluster)
    write_state(site.folder, replace(state, phase=UP))


def owner_uid() -> int:
    """Who asked for the cluster: with sudo, the user behind it."""
    return int(os.environ.get("SUDO_UID") or os.geteuid())


def _put_files(site: Site, plan: LocalPlan) -> None:
    furnish.make_devices(site.folder, plan)
    furnish.make_key(site.folder)
    furnish.make_homes(site.folder, plan, site.machine_passwd)
    furnish.write_files(site.folder, plan)
    if plan.cluster.slurm.accounting and not site.folder.database.exists():
        site.say("preparing the accounting database")
        fill_database(site.runner, site.folder.database, site.cache, site.machine.user)


def _boot_hosts(site: Site, plan: LocalPlan) -> None:
    """Boot what is missing; virtual hosts get their cables. Services wait for their turn."""
    missing = [plan.desired.hosts[name] for name in plan.boot]
    if missing:
        site.say(f"booting {len(missing)} host{'s' * (len(missing) > 1)}")
        end_strays(site.folder, list(_living(site, plan).values()), loopback=plan.placement.hosts == LOOPBACK)
    for host in missing:
        write_plan(hold_all(host))
    booted = boot(site.runner, missing, str(site.folder.root))
    if plan.placement.hosts == VIRTUAL and booted:
        switch = host_process(site.folder.host(SWITCH))
        if switch is None:
            raise TargetError("the cluster's switch host is gone", hint="run `dalsegno up` again")
        # A new switch: everyone needs a new cable.
        reach = _living(site, plan) if SWITCH in booted else booted
        plug_in(
            site.runner, plan.placement, switch.pid, {name: host.pid for name, host in reach.items() if name != SWITCH}
        )
        for name in reach.keys() - booted.keys():
            reload(site.folder.host(name))  # it has a new cable: have it take up its address again


def _living(site: Site, plan: LocalPlan) -> dict[str, Process]:
    found = {name: host_process(site.folder.host(name)) for name in plan.desired.hosts}
    return {name: process for name, process in found.items() if process is not None}


def _start_head(site: Site, plan: LocalPlan, state: State) -> State:
    """munge, database, accounting, controller: each when the one before it answers."""
    head = plan.desired.hosts[plan.cluster.head]
    up = ["munged"]
    start_services(head, up)
    wait_until(lambda: socket_answers(site.folder.munge_socket), head, "munged")
    if plan.cluster.slurm.accounting:
        state = _start_accounting(site, plan, state, up)
    site.say("starting slurmctld")
    up.append("slurmctld")
    start_services(head, up)
    wait_until(lambda: site.slurm.ping()[0].up, head, "slurmctld")
    if plan.cluster.slurm.backup_controller:
        backup = plan.desired.hosts[BACKUP]
        start_services(backup, ["slurmctld"])
        wait_until(lambda: site.slurm.ping()[1].up, backup, "slurmctld")
    if plan.cluster.slurm.rest:
        start_services(head, [*up, "slurmrestd"])
        wait_until(lambda: socket_answers(site.folder.run / "rest/slurmrestd.sock"), head, "slurmrestd")
    return state


def _start_accounting(site: Site, plan: LocalPlan, state: State, up: list[str]) -> State:
    head = plan.desired.hosts[plan.cluster.head]
    address = plan.placement.addresses[plan.cluster.head]
    site.say("starting accounting (MariaDB, slurmdbd)")
    up.append("mariadbd")
    start_services(head, up)
    wait_until(lambda: socket_answers(site.folder.database_socket), head, "mariadbd")
    up.append("slurmdbd")
    start_services(head, up)
    wait_until(lambda: port_answers(address, plan.placement.ports.get("slurmdbd", 6819)), head, "slurmdbd")
    if not state.registered:
        register_cluster(site.slurm, plan.cluster.name)
        state = replace(state, registered=True)
        write_state(site.folder, state)
    return state


def _start_nodes(site: Site, plan: LocalPlan) -> None:
    """slurmd after slurmctld: one that finds no controller waits a whole second before it asks again."""
    site.say(f"starting {len(plan.cluster.nodes)} slurmd")
    for host in _hosts_with_nodes(plan):
        start_services(host, [service.name for service in host.services])


def _hosts_with_nodes(plan: LocalPlan) -> Sequence[HostPlan]:
    if plan.placement.hosts == VIRTUAL:
        return [plan.desired.hosts[node.name] for node in plan.cluster.nodes]
    return [plan.desired.hosts[plan.cluster.head]]


def _settle(site: Site, plan: LocalPlan) -> None:
    if plan.accounting:  # slurmdbd knows limits on GPUs only once slurmctld has told it of them
        update_people(site.slurm, plan.cluster, fresh=plan.fresh)
    if plan.reconfigure or (plan.accounting and any(part.allow_qos for part in plan.cluster.partitions)):
        site.slurm.reconfigure()  # also for QOS that partitions name and slurmctld did not know when it started
    names = [node.name for node in plan.cluster.nodes]
    site.say(f"waiting for {compress(names)}")
    wait_for_nodes(site.slurm, plan, site.folder)
    if plan.reservations:
        update_reservations(site.slurm, plan.cluster, plan.old_reservations)
