"""The local target. It connects the modules that observe, plan, apply, report and remove."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.log import check_level
from dalsegno.observe.alertmanager import with_webhook_urls
from dalsegno.observe.monitor_layout import ENABLE, MonitorLayout
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.cgroups import ends_with_session
from dalsegno.system.files import closed_to_others, find_user, read_text, user_of, write_atomic
from dalsegno.system.hosts import PACKAGES, runs_inside_host
from dalsegno.system.machine import MachineFacts, collect_facts
from dalsegno.system.network import first_free_run, has_address, link_names, used_networks
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.base import (
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    DaemonStatus,
    NodeTimes,
    PeopleView,
    Plan,
    Removal,
    RootUse,
    Say,
    ShellEntry,
)
from dalsegno.targets.folder import has_prometheus, read_applied, write_monitor_switch
from dalsegno.targets.local.apply import ApplySite, apply
from dalsegno.targets.local.daemons import NODE_PATH, node_env, slurm_env
from dalsegno.targets.local.desired import desired, images_folder, jobs_images, limits_sentence
from dalsegno.targets.local.directory import open_directory
from dalsegno.targets.local.fault_access import LocalAccess, clear_faults, only_in_hardware
from dalsegno.targets.local.folder import (
    ApplyStage,
    ClusterState,
    Folder,
    ids_of_others,
    read_state,
    read_state_leniently,
    write_state,
)
from dalsegno.targets.local.images import import_all, present
from dalsegno.targets.local.machine_room import HostControlClient
from dalsegno.targets.local.monitoring import monitor_layout
from dalsegno.targets.local.nodes import LocalNodes, open_nodes
from dalsegno.targets.local.observe import (
    controller_runs,
    dead_daemons,
    find_removal,
    observe,
    read_daemon_logs,
    read_directory,
    read_status,
    read_summary,
)
from dalsegno.targets.local.people import shared_accounts
from dalsegno.targets.local.placement import FIRST_PORT, LAST_PORT, LOOPBACK, Free, Placement, place
from dalsegno.targets.local.plan import LocalPlan, make_plan
from dalsegno.targets.local.requirements import check_packages, resolve_containers
from dalsegno.targets.local.shell import enter, entry_command, person_name, person_uid, user_env
from dalsegno.targets.local.storage import check_storage, foreign_homes, homes_here, homes_inside, storage_sentences
from dalsegno.targets.local.sweep import sweep
from dalsegno.users.accounts import AccountSet, cluster_accounts
from dalsegno.users.checks import People, check_added
from dalsegno.users.roster import Roster, from_file, roster_of, with_roster

if TYPE_CHECKING:
    from dalsegno.inject.faults import FaultOptions, InjectableFault, InjectedFault


STATUS_S = 5.0
TIMES = NodeTimes(boot_s=30.0, gone_s=3.0)  # a boot takes 0.5 s; a node that is back within 3 s only lost its link


class LocalTarget:
    """The target of a cluster on this machine, with its state in one folder."""

    virtual_nodes = True

    def __init__(self, folder: Path, cache: Path, runner: Runner | None = None) -> None:
        self.folder = Folder(folder)
        self.cache = cache
        self.runner = runner or LocalRunner()
        self.slurm = self._client()

    @property
    def kind(self) -> str:
        return "local"

    @cached_property
    def machine(self) -> MachineFacts:
        return collect_facts(self.runner)

    def root_use(self, cluster: Cluster) -> RootUse | None:
        if cluster.local.hosts == LOOPBACK:
            return None
        return RootUse("virtual hosts", "processes on loopback ports" if cluster.local.hosts == "auto" else "")

    def plan(self, cluster: Cluster) -> LocalPlan:
        applied = read_applied(self.folder)
        merged = with_roster(cluster, roster_of(applied)) if applied and self._state() else cluster
        return self._plan(merged, has_prometheus(cluster, self.folder))

    def _plan(self, cluster: Cluster, prometheus: bool) -> LocalPlan:
        log_level = check_level(os.environ)
        self.folder.check([node.name for node in cluster.nodes])
        check_packages(cluster, self.machine, prometheus)
        cluster, no_containers = resolve_containers(cluster, self.runner, self.cache, self.machine, self.folder)
        monitoring = with_webhook_urls(cluster.monitoring) if prometheus else cluster.monitoring
        switched = replace(cluster, monitoring=replace(monitoring, prometheus=prometheus))
        state = self._state()
        before = state.placement if state else None
        directory = read_directory(self.folder, state, switched)
        free = replace(self._free(), directory=directory or AccountSet())
        placement = place(switched, self.machine, self.folder.id, before, free, str(self.folder.devices))
        if placement.hosts == LOOPBACK and not has_address():
            raise TargetError(
                "this machine has no network address but 127.0.0.1, and Slurm does not start without one",
                hint="add one: ip link add d0 type veth peer name d1; ip addr add 192.0.2.1/32 dev d0; "
                "ip link set d0 up; ip link set d1 up",
            )
        if cluster.storage:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
            check_storage(cluster, self.folder, placement, mounts)
        wanted = desired(switched, self.folder, placement, self.machine, self._people(), log_level)
        seen = observe(self.folder, state, wanted, self.slurm)
        listed = cluster.containers.images
        images = present(images_folder(cluster, self.folder), listed) if listed else frozenset()
        if (applied := seen.applied) and before:
            homes = homes_inside(applied, self.folder, before)
            seen = replace(seen, accounts=cluster_accounts(applied, self._people(), before.uids, before.gids, homes))
            if directory is None and applied.directory.ldap:
                directory = seen.accounts  # slapd does not run, but its database has the accounts
        plan = make_plan(cluster, placement, wanted, replace(seen, images=images, directory=directory or AccountSet()))
        stored = storage_sentences(cluster, self.folder, placement) if plan.fresh else ()
        left_out = (*plan.left_out, *stored, *self._surprises(cluster, placement))
        limits = limits_sentence(cluster, placement, self.machine)
        only_user = self.machine.user if placement.hosts == LOOPBACK else ""
        return replace(plan, left_out=left_out, limits=limits, no_containers=no_containers, only_user=only_user)

    def _surprises(self, cluster: Cluster, placement: Placement) -> list[str]:
        """Return sentences about what may surprise the user, such as missing virtual hosts, or cluster users who
        already have an account on this machine."""
        if placement.hosts != LOOPBACK:
            closed = self.closed_to_users() if cluster.users else ()
            foreign = foreign_homes(cluster, self.folder, placement, cluster.users)
            return [*shared_accounts(cluster.users, self._people()), *foreign, *closed]
        if placement.hosts == LOOPBACK and cluster.local.hosts == "auto" and self.machine.is_root:
            return ["namespaces are not permitted here: nodes are processes on loopback ports, not hosts of their own"]
        if not self.machine.is_root and ends_with_session(self.runner, self.machine.user):
            return [
                "the cluster ends with this login session (KillUserProcesses=yes); `loginctl enable-linger` keeps it up"
            ]
        return []

    def apply(self, plan: Plan, say: Say) -> None:
        plan = _own(plan)
        if not plan.changes:
            return
        if plan.blocked:
            raise TargetError(
                f"job {', '.join(plan.blocked)} is pending in a partition that will be removed",
                hint=f"`scancel {' '.join(plan.blocked)}`, or `scontrol update job={plan.blocked[0]} partition=NAME`",
            )
        state = self._state()
        if state is None:
            sweep(self.runner, self.folder)  # remove leftovers of an earlier cluster of this name
        site = ApplySite(self.runner, self.folder, self.machine, self.cache, self.slurm, say)
        before = read_applied(self.folder)
        old_switch = read_text(self.folder.monitor_switch)
        if plan.monitor_switch is not None:  # written first, so that the next `up` continues an interrupted change
            write_monitor_switch(plan.cluster, self.folder, plan.monitor_switch)
        try:
            apply(site, plan, state)
        except DalsegnoError as error:
            if plan.monitor_switch is not None:
                write_atomic(self.folder.monitor_switch, old_switch or "null")
            if state is None or state.phase is not ApplyStage.UP or before is None:
                raise
            say("that failed: restoring the cluster")
            self._restore(site, before, state, error)

    def import_images(self, plan: Plan, say: Say) -> None:
        plan = _own(plan)
        import_all(images_folder(plan.cluster, self.folder), plan.import_images, say, plan.cluster.name)

    def _restore(self, site: ApplySite, before: Cluster, state: ClusterState, error: DalsegnoError) -> NoReturn:
        """Undo a change that failed, and raise its error."""
        try:
            # Use the old placement, which still has the hosts that the failed change would have removed. The stage
            # MAKING makes `plan` repeat all steps.
            write_state(self.folder, replace(state, phase=ApplyStage.MAKING))
            apply(site, self.plan(before), state)
        except DalsegnoError as second:
            raise TargetError(
                f"{error.what}\nRestoring the cluster failed too: {second.what}",
                where=error.where,
                hint="`dalsegno status` shows what is running; run `dalsegno up` with the old file to try again",
            ) from error
        raise TargetError(
            f"{error.what}\nThe cluster was restored: its hosts, nodes, partitions and settings.",
            where=error.where,
            hint=error.hint or "fix the setting named above in the cluster file, then run `dalsegno up` again",
        ) from error

    def removal(self) -> Removal:
        return find_removal(self.folder, self._client(self._entry_command(), timeout_s=STATUS_S))

    def destroy(self, say: Say) -> bool:
        state = read_state_leniently(self.folder)
        if state is not None:
            with contextlib.suppress(DalsegnoError):  # a full disk must not prevent the removal
                write_state(self.folder, replace(state, phase=ApplyStage.REMOVING))
        return sweep(self.runner, self.folder)

    def status(self) -> ClusterStatus:
        """Return the status. If possible, Slurm's commands run inside the cluster, because only its hosts know the
        names of its users."""
        return read_status(self.folder, self._client(self._entry_command(), timeout_s=STATUS_S))

    def _entry_command(self) -> list[str]:
        try:
            return entry_command(self.folder, "/")
        except DalsegnoError:
            return []  # the status will report that the cluster is damaged

    def summary(self) -> ClusterSummary:
        return read_summary(self.folder)

    def daemon_logs(self) -> list[DaemonLog]:
        return read_daemon_logs(self.folder)

    def owner(self) -> int | None:
        state = read_state_leniently(self.folder)
        try:
            return self.folder.root.stat().st_uid or (state.owner if state else 0)
        except OSError:
            return None

    def slurm_runs(self) -> bool:
        return controller_runs(self.folder)

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        return user_env(self.folder, env)

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        argv, full = enter(self.folder, command, env, cwd, host=host, user=user)
        if user is None:
            return ShellEntry(argv, full)
        return ShellEntry(argv, full, person_uid(self.folder, user), tuple(self.closed_to_users()))

    def closed_to_users(self) -> list[str]:
        """Return a sentence if the cluster's users cannot read Dal Segno's programs, for example in a clone below
        /root."""
        closed = closed_to_others(Path(PACKAGES) / "dalsegno", Path(sys.executable))
        if closed is None:
            return []
        fix = "move the clone to a folder that all may read, such as /opt, and run its set-up there"
        return [f"the cluster's users cannot read {closed}, so their runs will fail: {fix}"]

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        nodes = self._nodes()
        nodes.node(node)
        argv, full = enter(self.folder, command, env, cwd, host=node if nodes.virtual else None)
        return ShellEntry(argv, {**full, "SLURMD_NODENAME": node, **node_env(self.folder, node)})

    @property
    def controller_socket(self) -> Path:
        return self.folder.controller_socket

    def job_images(self) -> str:
        applied = read_applied(self.folder)
        return jobs_images(applied, self.folder) if applied else ""

    def switch_monitor(self, on: bool) -> LocalPlan:
        applied = read_applied(self.folder)
        if applied is None:
            raise TargetError(f"there is no complete cluster {self.folder.name}", hint="`dalsegno up` creates it")
        if on and not applied.monitoring.enabled:
            raise TargetError(f"monitoring of {self.folder.name} is turned off", hint=ENABLE)
        plan = self._plan(applied, on)
        moves = plan.write or plan.start or plan.restart or plan.stop
        undone = [node for node in plan.clear_faults if moves and not only_in_hardware(self.folder, node)]
        return replace(plan, clear_faults=tuple(undone), monitor_switch=on)

    def people(self) -> PeopleView:
        applied, state = read_applied(self.folder), self._state()
        if applied is None or state is None:
            raise TargetError(f"there is no complete cluster {self.folder.name}", hint="`dalsegno up` creates it")
        directory = f"ou=People,{applied.directory.base}" if applied.directory.ldap else ""
        placement = state.placement
        return PeopleView(applied, placement.uids, placement.gids, homes_here(applied, self.folder), directory)

    def change_people(self, roster: Roster) -> LocalPlan:
        applied, state = self.people().cluster, self._state()
        if state is not None and state.placement.hosts == LOOPBACK:
            raise TargetError(
                "users of their own need virtual hosts: on loopback ports, all jobs run as one user",
                hint="create the cluster as root, on a machine that permits virtual hosts",
            )
        check_added(roster.users, self._people())
        plan = self._plan(with_roster(from_file(applied), roster), has_prometheus(applied, self.folder))
        return replace(plan, clear_faults=())  # a change to users must not clear injected faults

    def set_password(self, user: str, password: str) -> None:
        cluster, state = self.people().cluster, self._state()
        if not cluster.directory.ldap or state is None:
            raise TargetError(
                "accounts of this cluster have no passwords",
                hint="log in with an SSH key, or set `directory: {kind: ldap}` in the cluster file",
            )
        open_directory(cluster, self.folder, state.placement).set_password(user, password)

    def monitor_layout(self) -> MonitorLayout:
        nodes = open_nodes(self.runner, self.folder, read_only=True)
        return monitor_layout(nodes.cluster, self.folder, nodes.placement)

    def has_monitor(self) -> bool:
        applied = read_applied(self.folder)
        return applied is not None and has_prometheus(applied, self.folder)

    @property
    def node_times(self) -> NodeTimes:
        return TIMES

    @cached_property
    def _room(self) -> HostControlClient:
        return HostControlClient(self.folder.root)

    def reset_gpus(self, node: str) -> None:
        self._room.reset_gpus(node)

    def reboot(self, node: str) -> None:
        self._room.reboot(node)

    def replace(self, node: str) -> None:
        self._room.replace(node)

    def is_off(self, node: str) -> bool:
        return self._room.is_off(node)

    def read_logs(self, node: str) -> Mapping[str, str]:
        return self._room.read_logs(node)

    def user_name(self, uid: int) -> str:
        """Return the name of a user of the hosts or of this machine.

        Inside a host, ask the machine room too, because hosts do not know users that were created on the machine after
        `up`.
        """
        known = find_user(uid) or person_name(self.folder, uid)
        return known or (self._room.user_name(uid) if runs_inside_host() else user_of(uid))

    def dead_daemons(self) -> list[DaemonStatus]:
        return self._room.dead_daemons() if runs_inside_host() else dead_daemons(self.folder)

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> dict[str, Any]:
        """Inject a fault. Inside a host, leave this to the machine room, because other hosts cannot be reached from
        there."""
        if runs_inside_host():
            return self._room.inject(node, fault.name, options.code)
        from dalsegno.inject.injection import inject

        return inject(LocalAccess(self._nodes()), fault, node, options)

    def power_off(self, node: str) -> None:
        """Cut a node's power without warning its processes."""
        from dalsegno.inject.faults import FAULTS, FaultOptions

        self.inject(FAULTS["power-off"], node, FaultOptions())

    def injected(self) -> list[InjectedFault]:
        from dalsegno.inject.injection import injected

        nodes = self._nodes()
        return [one for node in nodes.cluster.nodes for one in injected(LocalAccess(nodes), node.name)]

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        return clear_faults(self._nodes(), node, fault)

    def _nodes(self) -> LocalNodes:
        return open_nodes(self.runner, self.folder)

    def ask(self, *argv: str) -> str:
        """Return the output of one of Slurm's commands."""
        return self.runner.run(argv, env={"PATH": NODE_PATH, **slurm_env(self.folder)}, timeout_s=60).checked().stdout

    def slurm_as(self, user: str) -> SlurmClient:
        return self._client(entry_command(self.folder, "/", user=user))

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": NODE_PATH, **slurm_env(self.folder)}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)

    def _state(self) -> ClusterState | None:
        """Return the state to continue from; None if there is no cluster, or after an interrupted `down`."""
        state = read_state(self.folder)
        return None if state is not None and state.phase is ApplyStage.REMOVING else state

    def _free(self) -> Free:
        if not self.machine.is_root:
            return Free(port_run=self._port_run)
        links = frozenset(link_names(self.runner))
        used = used_networks(self.runner)
        return Free(used, links, self._port_run, self._people(), other_ids=ids_of_others(self.folder))

    def _people(self) -> People:
        passwd, group = (Path(f"/etc/{name}").read_text(errors="surrogateescape") for name in ("passwd", "group"))
        return People(passwd, group)

    def _port_run(self, count: int, taken: set[int]) -> int | None:
        """Return the first of `count` consecutive free ports; None if there are none. Each cluster starts its search at
        another port, so that two clusters do not choose the same ports."""
        start = FIRST_PORT + int(self.folder.id, 16) % ((LAST_PORT - FIRST_PORT) // 2)
        return first_free_run(count, start, LAST_PORT, taken) or first_free_run(count, FIRST_PORT, LAST_PORT, taken)


def _own(plan: Plan) -> LocalPlan:
    if not isinstance(plan, LocalPlan):
        raise TypeError(f"not a plan of the local target: {plan!r}")
    return plan
