"""Carry out a plan on this machine. Every step can be repeated, so the next `up` completes an interrupted `up`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.containers.native import build_key, place_native
from dalsegno.errors import TargetError
from dalsegno.hostlist import compress
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.versions import NOBODY_UID
from dalsegno.system.children import Process
from dalsegno.system.files import locked, make_folder, write_atomic
from dalsegno.system.hosts import HostPlan, boot, has_its_files, host_process, read_plan, reload, write_plan
from dalsegno.system.machine import MachineFacts
from dalsegno.system.ownership import caller
from dalsegno.system.processes import Runner
from dalsegno.targets.accounting import register_cluster, update_people, update_reservations
from dalsegno.targets.base import Say
from dalsegno.targets.folder import write_applied
from dalsegno.targets.local.daemons import (
    check_settings,
    hold_all,
    port_answers,
    socket_answers,
    start_and_wait,
    start_services,
    wait_until_started,
)
from dalsegno.targets.local.database import fill_database
from dalsegno.targets.local.desired import File
from dalsegno.targets.local.directory import make_directory, open_directory
from dalsegno.targets.local.drain import drain_and_wait, lost_nodes, set_down_and_wait, wait_for_nodes
from dalsegno.targets.local.fault_access import clear_faults, write_hardware
from dalsegno.targets.local.folder import ApplyStage, ClusterState, Folder, write_state
from dalsegno.targets.local.machine_room import draw_secret
from dalsegno.targets.local.monitoring import make_monitor_folders
from dalsegno.targets.local.network import plug_in, remove_hosts
from dalsegno.targets.local.nodes import LocalNodes
from dalsegno.targets.local.placement import BACKUP, LOOPBACK, REST, ROOM, SWITCH, VIRTUAL
from dalsegno.targets.local.plan import LocalPlan
from dalsegno.targets.local.storage import homes_here, make_homes, make_storage
from dalsegno.targets.local.sweep import end_strays
from dalsegno.users.slapd import LDAPS_PORT


def make_folders(folder: Folder, plan: LocalPlan) -> None:
    """Create the folders that daemons, hosts and containers need, and the cluster's storage."""
    for path in (folder.root, folder.etc, folder.run, folder.pids, folder.bin, folder.devices, folder.homes):
        make_folder(path)
    make_folder(folder.secret, 0o700)
    make_folder(folder.slurmctld_state, 0o700)
    make_folder(folder.run / "rest")
    if os.geteuid() == 0:
        os.chown(folder.run / "rest", NOBODY_UID, -1)  # slurmrestd runs as nobody and creates its socket there
    for host in plan.desired.hosts:
        make_folder(folder.host(host) / "pid")
    make_storage(plan.cluster, folder, plan.placement)
    for node in plan.cluster.nodes:
        make_folder(folder.spool(node.name))
        if plan.cluster.monitoring.enabled:
            make_folder(folder.node_metrics(node.name))
    if any(name.startswith("monitor/") for name in plan.desired.files):
        make_monitor_folders(folder)
    if plan.cluster.containers.enabled:
        for path in (folder.unpacked, *(folder.host(node.name) / "containers" for node in plan.cluster.nodes)):
            make_folder(path)


def make_devices(folder: Folder, plan: LocalPlan) -> None:
    """Create the device files of simulated GPUs. All nodes share them.

    Slurm derives CUDA_VISIBLE_DEVICES from the number in the name of a device file.
    """
    if not plan.placement.gpus_simulated:
        return
    for index in range(max((node.gpus for node in plan.cluster.nodes), default=0)):
        device = folder.devices / f"nvidia{index}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")  # Slurm needs a character device here, and only root can create one


def make_key(folder: Folder) -> None:
    if not folder.munge_key.exists():
        write_atomic(folder.munge_key, secrets.token_hex(64), 0o600)


def make_secrets(folder: Folder, plan: LocalPlan) -> None:
    """Create the missing secrets of node agents, and the token for readers of metrics if there is none.

    On loopback ports, also create missing boot ids. Virtual hosts create theirs when they boot.
    """
    if not folder.metrics_token.exists():
        write_atomic(folder.metrics_token, secrets.token_hex(32), 0o600)
    for node in plan.cluster.nodes:
        if not folder.agent_secret(node.name).exists():
            draw_secret(folder, node.name)
        if plan.placement.hosts == LOOPBACK and not folder.boot_id(node.name).exists():
            write_atomic(folder.boot_id(node.name), secrets.token_hex(8), durable=False)


def make_identity(folder: Folder) -> None:
    if not folder.identity.exists():
        write_atomic(folder.identity, secrets.token_hex(8))


def write_files(folder: Folder, plan: LocalPlan) -> None:
    for name in plan.write:
        write_file(folder, name, plan.desired.files[name])
    for node in plan.cluster.nodes:
        if f"hosts/{node.name}/telemetry.json" in plan.write and folder.machine(node.name).exists():
            write_hardware(folder, node, plan.placement.gpus_simulated)  # the machine was replaced and has other GPUs


def write_file(folder: Folder, name: str, file: File) -> None:
    path = folder.root / name
    make_folder(path.parent)
    write_atomic(path, file.text, file.mode)


# These services are started last, because nothing waits for them.
LAST = ("metadata-service", "node-agent", "prometheus", "alertmanager", "node-exporter")
MOUNT_TIMEOUT_S = 10.0  # time limit for running hosts to mount new files


@dataclass(frozen=True)
class ApplySite:
    """The dependencies that all steps of `apply` share."""

    runner: Runner
    folder: Folder
    machine: MachineFacts
    cache: Path
    slurm: SlurmClient
    say: Say


def apply(site: ApplySite, plan: LocalPlan, before: ClusterState | None) -> None:
    """Change the cluster as the plan says."""
    state = ClusterState(
        phase=ApplyStage.MAKING,
        placement=plan.placement,
        slurm_version=site.machine.slurm_version,
        registered=before.registered if before else False,
        owner=before.owner if before else caller(),
    )
    make_folder(site.folder.root)
    # The state is written first, so that `down` and `status` find the cluster even if a later step fails.
    write_state(site.folder, state)
    make_folders(site.folder, plan)
    if plan.remove_nodes or plan.remove_partitions:
        drain_and_wait(site.slurm, plan, site.folder, site.say)
    if plan.placement.hosts == VIRTUAL:
        set_down_and_wait(site.slurm, sorted(lost_nodes(plan)), site.folder)
    _put_files(site, plan)
    check_settings(site.runner, site.folder)
    _boot_hosts(site, plan)
    state = _start_head(site, plan, state)
    since = time.time()
    if plan.unfinished and plan.reconfigure:
        # Reconfigure before the missing slurmds start. A job step that starts while slurmd reads its files again can
        # lose its output (seen with Slurm 22.05, about once in 30 starts).
        site.slurm.reconfigure()
    _start_nodes(site, plan)
    remove_hosts(site.folder, plan.remove_hosts)
    _finish(site, plan, since)
    write_applied(site.folder, plan.cluster)
    write_state(site.folder, replace(state, phase=ApplyStage.UP))


def _put_files(site: ApplySite, plan: LocalPlan) -> None:
    make_devices(site.folder, plan)
    make_key(site.folder)
    make_secrets(site.folder, plan)
    make_identity(site.folder)
    make_homes(homes_here(plan.cluster, site.folder), plan.desired.accounts.users.values())
    if plan.cluster.containers.enabled:
        version = site.machine.slurm_version
        place_native(site.runner, site.cache, version, site.folder.native / build_key(version))
    if plan.cluster.directory.ldap:
        make_directory(site.runner, site.folder, plan.cluster, plan.placement)
    write_files(site.folder, plan)
    if any(plan.desired.files[name].mounted for name in plan.write):
        _mount_again(site, plan)
    if plan.cluster.slurm.accounting and not site.folder.database.exists():
        site.say("preparing the accounting database")
        fill_database(site.runner, site.folder.database, site.cache, site.machine.user)


def _mount_again(site: ApplySite, plan: LocalPlan) -> None:
    """Make running hosts mount the new files in place of the old ones, and wait until they have done so.

    Wait at most MOUNT_TIMEOUT_S. A suspended host mounts the files when it is resumed.
    """
    folders = [site.folder.host(name) for name in _running_hosts(site, plan)]
    for folder in folders:
        reload(folder)
    until = time.monotonic() + MOUNT_TIMEOUT_S
    while not all(has_its_files(folder) for folder in folders) and time.monotonic() < until:
        time.sleep(0.01)


def _boot_hosts(site: ApplySite, plan: LocalPlan) -> None:
    """Boot the missing hosts, connect virtual hosts to the network, change mounts, and undo injected faults.

    Services are started later.
    """
    missing = [plan.desired.hosts[name] for name in plan.boot]
    if missing:
        site.say(f"booting {len(missing)} host{'s' * (len(missing) > 1)}")
        end_strays(site.folder, list(_running_hosts(site, plan).values()), loopback=plan.placement.hosts == LOOPBACK)
    for host in missing:
        write_plan(hold_all(host))
    booted = boot(site.runner, missing, str(site.folder.root))
    if plan.placement.hosts == VIRTUAL:
        _connect(site, plan, booted)
    for name in plan.remount:
        _change_mounts(site, plan.desired.hosts[name])
    for name in plan.bind:
        reload(site.folder.host(name))  # a host checks its mounts when it reads its plan again
    for name in plan.clear_faults:
        clear_faults(LocalNodes(site.runner, site.folder, plan.placement, plan.cluster), name)


def _change_mounts(site: ApplySite, wanted: HostPlan) -> None:
    """Make a running host mount what its new plan contains. Its services do not change."""
    folder = site.folder.host(wanted.name)
    with locked(folder / "plan.lock", f"the plan of {wanted.name}", wait_s=5.0):
        if plan := read_plan(folder):
            write_plan(replace(plan, binds=wanted.binds))
    reload(folder)


def _connect(site: ApplySite, plan: LocalPlan, booted: Mapping[str, Process]) -> None:
    """Connect the hosts that have no link.

    These are new hosts, hosts that an interrupted `up` left without a link, and all hosts if the switch is new.
    """
    running = _running_hosts(site, plan)
    switch = running.pop(SWITCH, None)
    if switch is None:
        raise TargetError("the cluster's switch host is gone", hint="run `dalsegno up` again")
    networked = {name: host for name, host in running.items() if name in plan.placement.addresses}
    plugged = plug_in(site.runner, plan.placement, switch.pid, networked, new=booted.keys())
    for name in plugged - booted.keys():
        reload(site.folder.host(name))  # the host then gives its new link an address


def _running_hosts(site: ApplySite, plan: LocalPlan) -> dict[str, Process]:
    found = {name: host_process(site.folder.host(name)) for name in plan.desired.hosts}
    return {name: process for name, process in found.items() if process is not None}


def _start_head(site: ApplySite, plan: LocalPlan, state: ClusterState) -> ClusterState:
    """Start the daemons that other daemons need: munged, slapd, the accounting daemons, slurmctld and its backup.

    Then start slurmrestd and the machine room. Each daemon starts when the previous one answers. Daemons that the
    cluster does not have are left out. Return the new state, which records whether slurmdbd knows the cluster.
    """
    head = plan.desired.hosts[plan.cluster.head]
    up = ["munged"]
    start_and_wait(head, up, "munged", lambda: socket_answers(site.folder.munge_socket))
    if plan.cluster.directory.ldap:
        up.append("slapd")
        address = plan.placement.addresses[plan.cluster.head]
        start_and_wait(head, up, "slapd", lambda: port_answers(address, LDAPS_PORT))
    if plan.cluster.slurm.accounting:
        state = _start_accounting(site, plan, state, up)
    _say_if_started(site, plan, "slurmctld", "starting slurmctld")
    up.append("slurmctld")
    start_and_wait(head, up, "slurmctld", lambda: site.slurm.ping()[0].up)
    if plan.cluster.slurm.backup_controller:
        backup = plan.desired.hosts[BACKUP]
        start_and_wait(backup, ["slurmctld"], "slurmctld", lambda: site.slurm.ping()[1].up)
    if plan.cluster.slurm.rest:
        socket = site.folder.run / "rest/slurmrestd.sock"
        start_and_wait(plan.desired.hosts[REST], ["slurmrestd"], "slurmrestd", lambda: socket_answers(socket))
    room = plan.desired.hosts[ROOM]
    start_and_wait(room, ["machine-room"], "machine-room", lambda: socket_answers(site.folder.room_socket))
    return state


def _say_if_started(site: ApplySite, plan: LocalPlan, service: str, text: str) -> None:
    """Report that a service will be started, unless it already runs with the right settings."""
    moved = {name.partition(":")[0] for _, name in (*plan.start, *plan.restart)}
    booted = {one.name.partition(":")[0] for host in plan.boot for one in plan.desired.hosts[host].services}
    if service in moved | booted:
        site.say(text)


def _start_accounting(site: ApplySite, plan: LocalPlan, state: ClusterState, up: list[str]) -> ClusterState:
    head = plan.desired.hosts[plan.cluster.head]
    address = plan.placement.addresses[plan.cluster.head]
    _say_if_started(site, plan, "slurmdbd", "starting accounting (MariaDB, slurmdbd)")
    up.append("mariadbd")
    start_and_wait(head, up, "mariadbd", lambda: socket_answers(site.folder.database_socket))
    up.append("slurmdbd")
    port = plan.placement.ports.get("slurmdbd", 6819)
    start_and_wait(head, up, "slurmdbd", lambda: port_answers(address, port))
    if not state.registered:
        register_cluster(site.slurm, plan.cluster.name)
        state = replace(state, registered=True)
        write_state(site.folder, state)
    # slurmctld 26.05 exits if a partition names a QOS that is not in the database. The QOS get their settings later.
    if named := sorted({qos for part in plan.cluster.partitions for qos in part.allow_qos}):
        site.slurm.sacctmgr(["add", "qos", ",".join(named)])
    return state


def _start_nodes(site: ApplySite, plan: LocalPlan) -> None:
    """Start slurmd on the nodes and the controller on the head, with all other services except those in LAST.

    slurmctld must already run. Otherwise slurmd would wait a second before its next attempt to register. The services
    in LAST start when the controller answers.
    """
    _say_if_started(site, plan, "slurmd", f"starting {len(plan.cluster.nodes)} slurmd")
    for host in _head_and_nodes(plan):
        start_services(host, _first(host))


def _first(host: HostPlan) -> list[str]:
    return [service.name for service in host.services if service.name.partition(":")[0] not in LAST]


def _head_and_nodes(plan: LocalPlan) -> Sequence[HostPlan]:
    head = plan.desired.hosts[plan.cluster.head]
    if plan.placement.hosts == VIRTUAL:
        return [head, *(plan.desired.hosts[node.name] for node in plan.cluster.nodes)]
    return [head]


def _finish(site: ApplySite, plan: LocalPlan, since: float) -> None:
    if plan.accounting:  # slurmdbd accepts limits on GPUs only after slurmctld has registered the GPUs there
        update_people(site.slurm, plan.cluster, plan.remove_members, fresh=plan.fresh)
    changed = plan.reconfigure and not plan.unfinished
    if changed or (plan.accounting and any(part.allow_qos for part in plan.cluster.partitions)):
        site.slurm.reconfigure()  # slurmctld may have started before it knew the QOS of a partition
    names = [node.name for node in plan.cluster.nodes]
    site.say(f"waiting for {compress(names)}")
    wait_for_nodes(site.slurm, plan, site.folder, since)
    head = plan.desired.hosts[plan.cluster.head]
    start_and_wait(head, _first(head), "controller", lambda: socket_answers(site.folder.controller_socket))
    for host in _head_and_nodes(plan):
        start_services(host, [service.name for service in host.services])
    wait_until_started(_head_and_nodes(plan))
    if plan.cluster.slurm.backup_controller and plan.remove_nodes:
        _save_partitions(site, plan)
    if plan.reservations:
        update_reservations(site.slurm, plan.cluster, plan.old_reservations)
    if plan.cluster.directory.ldap and (plan.fresh or plan.unfinished or not plan.people.empty):
        open_directory(plan.cluster, site.folder, plan.placement).apply(plan.people)


def _save_partitions(site: ApplySite, plan: LocalPlan) -> None:
    """Make slurmctld save its partitions to disk. To do so, set `Hidden` of each partition to its present value.

    Otherwise a backup that takes over would read the old partitions from disk, and exit if they name removed nodes.
    """
    for partition in plan.cluster.partitions:
        site.slurm.update(PartitionName=partition.name, Hidden="YES" if partition.hidden else "NO")
