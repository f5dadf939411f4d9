"""The operator's side of a cluster on ssh hosts: plan, apply, report and remove, over connections to every host."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.hostlist import closest
from dalsegno.observe.monitor_layout import ENABLE, MonitorLayout
from dalsegno.programs import HOST_LAUNCHER
from dalsegno.setup.delivery import CodeBundle, compare_request, status_request
from dalsegno.setup.inspect import HostFacts
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.render.commands import limited_devices
from dalsegno.spec.facts import Cluster, SshAccess, SshHost
from dalsegno.system.files import read_text, remove_tree, write_atomic
from dalsegno.system.processes import Completed
from dalsegno.system.ssh import HostRunner, SshConnections, read_password_file
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    DaemonStatus,
    PeopleView,
    Plan,
    Removal,
    Say,
    ShellEntry,
    named,
)
from dalsegno.targets.folder import has_prometheus, read_applied, write_monitor_switch
from dalsegno.targets.sides import (
    ANSWER_S,
    COMMAND,
    IMPORT_S,
    OperatorSide,
    applied_cluster,
    at_terminal,
    import_on_head,
    known,
)
from dalsegno.targets.ssh.apply import ApplyOnHosts, jobs_on, remove_from_hosts, state_during
from dalsegno.targets.ssh.desired import ClusterOnHosts, host_plan
from dalsegno.targets.ssh.directory import directory_secrets, refuse_machine_groups
from dalsegno.targets.ssh.folder import (
    ClusterSecrets,
    SshFolder,
    SshStage,
    SshState,
    head_folder,
    read_ids,
    read_secrets,
    read_seen,
    read_ssh_state,
    write_ssh_state,
)
from dalsegno.targets.ssh.head import TIMES
from dalsegno.targets.ssh.monitoring import monitor_layout
from dalsegno.targets.ssh.people import AssignedIds, home_storage, homes_of, refuse_privileges
from dalsegno.targets.ssh.plan import SshPlan, refuse_unbuilt
from dalsegno.targets.ssh.services import PATH
from dalsegno.targets.ssh.shell import HeadRunner, address_of, root_argv, ssh_argv
from dalsegno.targets.ssh.status import gone, phase_of, read_status
from dalsegno.targets.ssh.survey import (
    ask_host,
    code_for_hosts,
    hosts_to_upgrade,
    inspect_cluster,
    raise_for_head,
    refuse_impossible,
)
from dalsegno.users.ldap_directory import LDAP_PACKAGES, check_ldap3
from dalsegno.users.roster import Roster, from_file, removed_by_command, roster_of, with_roster

Connect = Callable[[SshAccess], contextlib.AbstractContextManager[HostRunner]]


def connect(ssh: SshAccess) -> SshConnections:
    """Return connections to the hosts."""
    known_hosts = Path(ssh.known_hosts) if ssh.known_hosts else None
    password = read_password_file(Path(ssh.sudo_password_file)) if ssh.sudo_password_file else ""
    return SshConnections([address_of(host) for host in ssh.hosts], known_hosts=known_hosts, sudo_password=password)


REMOVE_S = 3600.0


def _check_supported(before: Cluster | None, cluster: Cluster) -> None:
    """Raise an error if the ssh target cannot create this cluster, or cannot change the applied cluster `before` into
    it."""
    refuse_unbuilt(cluster)
    if cluster.directory.ldap:
        check_ldap3()
    refuse_privileges(cluster)
    refuse_impossible(before, cluster)


class SshTarget(OperatorSide):
    """The target on the operator's machine. One object stands for the cluster of one state folder."""

    kind = "ssh"
    times = TIMES
    folder: SshFolder

    def __init__(self, folder: Path, connect: Connect = connect) -> None:
        self.folder = SshFolder(folder)
        self._connect = connect

    def plan(self, cluster: Cluster) -> SshPlan:
        """Inspect every host, compute its plan, and have the host report how it differs from that plan. Return all of
        this."""
        applied = read_applied(self.folder)
        merged = with_roster(cluster, roster_of(applied)) if applied else cluster
        return self._plan(merged, has_prometheus(cluster, self.folder))

    def plan_upgrade(self, cluster: Cluster) -> SshPlan:
        return replace(self.plan(cluster), may_upgrade=True)

    def _plan(self, cluster: Cluster, prometheus: bool) -> SshPlan:
        state, before = self._state(), read_applied(self.folder)
        in_file = cluster.monitoring.prometheus
        cluster = replace(cluster, monitoring=replace(cluster.monitoring, prometheus=prometheus))
        _check_supported(before, cluster)
        with self._connect(cluster.ssh) as hosts:
            facts, faults, ids = inspect_cluster(hosts, cluster, read_ids(self.folder))
            raise_for_head(cluster, faults)
            cluster_id = self._cluster_id()
            more = LDAP_PACKAGES if cluster.directory.ldap else ()
            code = code_for_hosts(facts, faults, self.folder.root.parents[1] / "wheels", more)
            facts = {host: each for host, each in facts.items() if host in code}
            raise_for_head(cluster, faults)
            remembered = read_seen(self.folder) if before else {}
            wanted = set(cluster.ssh.names)
            held = {host: each for host, each in remembered.items() if host in faults and host in wanted}
            leaving = tuple(host for host in (state.ssh.names if state else ()) if host not in wanted)
            # Munge's key changes only if all hosts can be changed. Otherwise the remaining hosts would be cut off from
            # the others.
            new_key = bool(leaving or (state and state.new_key)) and not faults
            held_secrets = self._secrets(cluster, new_key)
            on = self._on_hosts(cluster, {**held, **facts}, held_secrets, cluster_id, code, ids)
            refuse_machine_groups(cluster, on.ids)
            if not on.sized.nodes:
                raise next(iter(faults.values()))
            plans = {host: host_plan(on, host) for host in facts}
            compared = hosts.each(plans, lambda host: ask_host(hosts, host, compare_request(plans[host]), facts[host]))
            wait_for = self._jobs_on(hosts, cluster.head, leaving)
        faults |= {host: each for host, each in compared.items() if isinstance(each, DalsegnoError)}
        raise_for_head(cluster, faults)
        return SshPlan(
            on.cluster,
            {host: plan for host, plan in plans.items() if host not in faults},
            {host: each.changes for host, each in compared.items() if not isinstance(each, DalsegnoError)},
            facts,
            cluster_id,
            held_secrets,
            bundles={bundle.key: bundle for bundle in code.values()},
            fresh=state is None,
            unfinished=state is not None and (state.phase is not SshStage.UP or bool(state.failed or state.skipped)),
            faults=faults,
            ids=on.ids,
            upgrades=hosts_to_upgrade(state, compared),
            prometheus_in_file=in_file,
            remove_hosts=leaving,
            new_key=new_key,
            wait_for=wait_for,
            directory=on.directory,
            people=cluster.slurm.accounting and (before is None or _people(before) != _people(cluster)),
            remove_members=removed_by_command(before, cluster),
            reservations=(before.reservations if before else ()) != cluster.reservations,
            old_reservations=tuple(each.name for each in before.reservations) if before else (),
        )

    def _jobs_on(self, hosts: HostRunner, head: str, leaving: Sequence[str]) -> tuple[str, ...] | None:
        """Return the jobs on hosts that leave the cluster; None if slurmctld does not answer."""
        try:
            return jobs_on(self._slurm(hosts, head), leaving) if leaving else ()
        except DalsegnoError:
            return None

    def _secrets(self, cluster: Cluster, new_key: bool) -> ClusterSecrets:
        nodes = [node.name for node in cluster.nodes]
        return read_secrets(self.folder, nodes, prometheus=cluster.monitoring.prometheus, new_key=new_key)

    def _on_hosts(
        self, cluster: Cluster, facts: Mapping[str, HostFacts], held_secrets: ClusterSecrets, cluster_id: str,
        code: Mapping[str, CodeBundle], ids: AssignedIds,
    ) -> ClusterOnHosts:  # fmt: skip
        return ClusterOnHosts(
            cluster,
            facts,
            held_secrets,
            cluster_id,
            {host: bundle.key for host, bundle in code.items()},
            f"{getpass.getuser()}@{socket.gethostname()}",
            ids,
            directory_secrets(self.folder, cluster) if cluster.directory.ldap else None,
        )

    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, SshPlan):
            raise TypeError(f"not a plan of the ssh target: {plan!r}")
        if plan.empty:
            return
        if plan.upgrades and not plan.may_upgrade:
            raise TargetError(
                f"another version of Dal Segno is on {named('host', plan.upgrades)}",
                hint="`dalsegno up --upgrade` updates the hosts one after the other; runs and jobs continue",
            )
        head, state = plan.plans[plan.cluster.head], state_during(plan, self._state())
        write_ssh_state(self.folder, state)
        write_atomic(self._identity, plan.cluster_id)
        if plan.monitor_switch is not None:
            write_monitor_switch(plan.recorded, self.folder, plan.monitor_switch)
        with self._connect(state.ssh) as hosts:
            work = ApplyOnHosts(hosts, self._slurm(hosts, head.host), self.folder, state, say)
            work.apply(plan)

    def people(self) -> PeopleView:
        applied, ids = applied_cluster(self.folder), read_ids(self.folder)
        return PeopleView(applied, ids.uids, ids.gids, Path(homes_of(applied)), elsewhere=True)

    def change_people(self, roster: Roster) -> SshPlan:
        applied = self.people().cluster
        return self._plan(with_roster(from_file(applied), roster), has_prometheus(applied, self.folder))

    def remove_home(self, home: Path, uid: int | None, *, only_check: bool = False) -> None:
        state, applied = self._known(), self.people().cluster
        places = [state.head] if home_storage(applied) else list(state.ssh.names)
        action = "check" if only_check else "delete"
        argv = [*HOST_LAUNCHER, "remove-home", action, str(home), str(-1 if uid is None else uid)]
        with self._connect(state.ssh) as hosts:
            for host, done in hosts.each(
                places, lambda host: hosts.run(host, argv, root=True, timeout_s=REMOVE_S)
            ).items():
                if isinstance(done, DalsegnoError):
                    raise done
                if done.exit_code != 0:
                    what, _, hint = done.stderr.strip().partition("\n")
                    raise TargetError(f"{host}: {what}", hint=hint)

    def switch_monitor(self, on: bool) -> SshPlan:
        applied = self.people().cluster
        if on and not applied.monitoring.enabled:
            raise TargetError(f"monitoring of {self.folder.name} is turned off", hint=ENABLE)
        return replace(self._plan(applied, on), monitor_switch=on)

    def has_monitor(self) -> bool:
        applied = read_applied(self.folder)
        return applied is not None and has_prometheus(applied, self.folder)

    def monitor_layout(self) -> MonitorLayout:
        layout = monitor_layout(self.people().cluster, head_folder(self.folder.name))
        return replace(layout, password_file=str(self.folder.secret / "monitor-password"))

    def set_password(self, user: str, password: str) -> None:
        raise TargetError("accounts on ssh hosts have no passwords", hint="log in with an SSH key: `--ssh-key FILE`")

    def import_images(self, plan: Plan, say: Say) -> None:
        """Import the images of the cluster file on the head, into the folder that all hosts see."""
        state, applied = self._known(), self.people().cluster
        with self._connect(state.ssh) as hosts:

            def execute(argv: Sequence[str]) -> Completed:
                return hosts.run(state.head, argv, root=True, timeout_s=IMPORT_S)

            import_on_head(applied, plan.import_images, execute, say)

    def removal(self) -> Removal:
        return Removal(self.unfinished_jobs())

    def destroy(self, say: Say) -> bool:
        state = read_ssh_state(self.folder)
        if state is None:
            found = self.folder.root.exists()
            remove_tree(self.folder.root)
            return found
        write_ssh_state(self.folder, replace(state, phase=SshStage.REMOVING))
        with self._connect(state.ssh) as hosts:
            remove_from_hosts(hosts, self._slurm(hosts, state.head), self.folder, state, say)
        remove_tree(self.folder.root)
        return True

    def status(self) -> ClusterStatus:
        state = read_ssh_state(self.folder)
        if state is None:
            return gone(self.folder)
        with self._connect(state.ssh) as hosts:
            names = state.ssh.names
            found = hosts.each(names, lambda host: ask_host(hosts, host, status_request()))
            silent = [each.what for each in found.values() if isinstance(each, DalsegnoError)]
            daemons = [
                DaemonStatus(host, name, running)
                for host, each in found.items()
                if not isinstance(each, DalsegnoError) and each.cluster_id == state.cluster_id
                for name, running in each.services.items()
            ]
            works = any(each.name == "slurmctld" and each.running for each in daemons)
            slurm = self._slurm(hosts, state.head) if works else None
            return read_status(state, self.folder.name, read_applied(self.folder), slurm, daemons, silent)

    def head_status(self) -> Mapping[str, Any] | None:
        state = self._known()
        with contextlib.suppress(DalsegnoError, ValueError), self._connect(state.ssh) as hosts:
            argv = [COMMAND, "status", "--cluster", self.folder.name, "--json"]
            told = json.loads(hosts.run(state.head, argv, root=True, timeout_s=ANSWER_S).stdout)
            return told if isinstance(told, dict) else None
        return None

    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        state = read_ssh_state(self.folder)
        return phase_of(state, applied, (*state.failed, *state.skipped)) if state else ClusterPhase.GONE

    @property
    def slurm(self) -> SlurmClient:
        """A client that runs Slurm's commands on the head. Each command opens a new connection."""
        return SlurmClient(_OneCommand(self._connect, self._known()), self._slurm_env(), timeout_s=60)

    def slurm_as(self, user: str) -> SlurmClient:
        prefix = ["setpriv", f"--reuid={user}", "--init-groups", f"--regid={user}", "--"]
        runner = _OneCommand(self._connect, self._known())
        return SlurmClient(runner, self._slurm_env(), prefix=prefix, timeout_s=60)

    def slurm_runs(self) -> bool:
        return self._state() is not None

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        state, applied = self._known(), read_applied(self.folder)
        chosen = self._host(state, host or (applied.logins[0] if applied and applied.logins else state.head))
        terminal = not command or sys.stdin.isatty()
        if user:
            inner = ["runuser", "-u", user, "--", *(command or ["/bin/bash", "-l"])]
            argv = root_argv(chosen, inner, state.ssh, terminal=terminal)
        else:
            argv = ssh_argv(chosen, command, terminal=terminal, known_hosts=state.ssh.known_hosts)
        return ShellEntry(argv, dict(env))

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        state = self._known()
        return ShellEntry(root_argv(self._host(state, node), command, state.ssh, terminal=False), dict(env))

    def forward(self, arguments: Sequence[str], *, root: bool = False) -> ShellEntry:
        """Return how to run `dalsegno ARGUMENTS` on the head, as root or as the login user."""
        state = self._known()
        host, command, terminal = self._host(state, state.head), [COMMAND, *arguments], at_terminal()
        if root:
            return ShellEntry(root_argv(host, command, state.ssh, terminal=terminal), dict(os.environ))
        argv = ssh_argv(host, command, terminal=terminal, known_hosts=state.ssh.known_hosts)
        return ShellEntry(argv, dict(os.environ))

    def on_head(self, command: Sequence[str]) -> ShellEntry:
        state = self._known()
        argv = ssh_argv(self._host(state, state.head), command, terminal=False, known_hosts=state.ssh.known_hosts)
        return ShellEntry(argv, dict(os.environ))

    def _slurm(self, hosts: HostRunner, head: str) -> SlurmClient:
        return SlurmClient(HeadRunner(hosts, head), self._slurm_env(), timeout_s=60)

    def _slurm_env(self) -> dict[str, str]:
        return {"PATH": PATH, "SLURM_CONF": str(head_folder(self.folder.name).slurm_conf)}

    def _state(self) -> SshState | None:
        """Return the state of the last `up` or `down`; None if there is none."""
        return read_ssh_state(self.folder)

    def _known(self) -> SshState:
        return known(self._state(), self.folder)

    def _host(self, state: SshState, name: str) -> SshHost:
        hosts = {host.name: host for host in state.ssh.hosts}
        if name not in hosts:
            close = closest(name, hosts)
            hint = f"did you mean `{close}`? " if close else ""
            raise NotThere(f"there is no host `{name}`", hint=f"{hint}hosts: {', '.join(list(hosts)[:12])}")
        return hosts[name]

    @property
    def _identity(self) -> Path:
        return self.folder.root / "cluster-id"

    def _cluster_id(self) -> str:
        return (read_text(self._identity) or "").strip() or secrets.token_hex(8)


class _OneCommand:
    """Runs commands on the head, with a new connection for each."""

    def __init__(self, connect: Connect, state: SshState) -> None:
        self._connect, self._state = connect, state

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        with self._connect(self._state.ssh) as hosts:
            return HeadRunner(hosts, self._state.head).run(argv, stdin=stdin, env=env, timeout_s=timeout_s)


def _people(cluster: Cluster) -> object:
    return (cluster.accounts, cluster.users, cluster.slurm.qos, limited_devices(cluster))
