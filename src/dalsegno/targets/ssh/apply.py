"""Carry out a plan on the hosts of a cluster, and remove a cluster from its hosts. Every step can be repeated."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.hostlist import compress
from dalsegno.setup.delivery import (
    Answer,
    ChangeKind,
    CodeBundle,
    applier_argv,
    apply_request,
    read_answer,
    read_step,
    remove_request,
)
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, SshAccess
from dalsegno.storage.mounts import host_storage
from dalsegno.system.ssh import HostRunner
from dalsegno.targets.accounting import update_people, update_reservations
from dalsegno.targets.base import Say, named
from dalsegno.targets.folder import read_applied, write_applied
from dalsegno.targets.registration import REMOVAL_REASON, is_registered, resume_and_find_missing, wait_for
from dalsegno.targets.ssh.directory import write_directory_secrets
from dalsegno.targets.ssh.folder import (
    SshFolder,
    SshStage,
    SshState,
    read_seen,
    write_ids,
    write_secrets,
    write_seen,
    write_ssh_state,
)
from dalsegno.targets.ssh.plan import SshPlan

APPLY_S = 3600.0  # a slow package mirror may need this long
CANCEL_S = 20.0
FAILED_UPGRADES = 2  # an upgrade stops after this number of failed hosts


@dataclass(frozen=True)
class ApplyOnHosts:
    """Carries out a plan on all hosts."""

    hosts: HostRunner
    slurm: SlurmClient
    folder: SshFolder
    state: SshState
    say: Say
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _archives: dict[str, bytes] = field(default_factory=dict)

    def apply(self, plan: SshPlan) -> None:
        """Change all hosts. Failed hosts are reported at the end, and the next `up` repairs them."""
        write_secrets(self.folder, plan.secrets)
        if plan.directory:
            write_directory_secrets(self.folder, plan.directory)
        write_seen(self.folder, {**read_seen(self.folder), **plan.facts})
        write_ids(self.folder, plan.ids)  # written before any account is created
        self._drain(plan)
        changed = [host for host, changes in plan.changes.items() if changes]
        done = self._change_in_turn(plan, changed)
        failed = {**plan.faults, **_faults_in(done)}
        skipped = tuple(host for host in changed if host not in done)
        self._raise_without_head(plan, failed, skipped)
        self._finish(plan, failed)
        self._remove(plan.remove_hosts)
        write_applied(self.folder, plan.recorded)
        ssh = without(self.state.ssh, plan.remove_hosts)
        state = replace(self.state, phase=SshStage.UP, ssh=ssh, failed=tuple(failed), skipped=skipped)
        write_ssh_state(self.folder, replace(state, slurm_version=str(self.slurm.version())))
        _raise_for(plan, failed, skipped)

    def _change_in_turn(self, plan: SshPlan, changed: Sequence[str]) -> dict[str, Answer | DalsegnoError]:
        """Change one group of hosts after the other. Hosts that the result does not contain were skipped."""
        done: dict[str, Answer | DalsegnoError] = {}
        for group in _in_turn(plan, changed):
            if not _may_continue(plan, group, _faults_in(done)):
                break
            done |= self.hosts.each(group, lambda host: self._change(plan, host))
        return done

    def _raise_without_head(self, plan: SshPlan, failed: Mapping[str, DalsegnoError], skipped: tuple[str, ...]) -> None:
        """Raise an error if the head failed or was skipped, because all further steps need the head's new files.

        The next `up` carries out these steps.
        """
        head = plan.cluster.head
        if head in failed or head in skipped:
            write_ssh_state(self.folder, replace(self.state, failed=tuple(failed), skipped=skipped))
            if not skipped:
                raise failed[head]
            _raise_for(plan, failed, skipped)

    def _change(self, plan: SshPlan, host: str) -> Answer:
        needs_code = any(change.kind is ChangeKind.CODE for change in plan.changes[host])
        code = self._archive(plan.bundles[plan.plans[host].bundle]) if needs_code else b""
        request = apply_request(plan.plans[host], code)
        argv = applier_argv(plan.plans[host].python)
        done = self.hosts.run(
            host, argv, stdin=request, root=True, timeout_s=APPLY_S, on_line=lambda line: self._tell(host, line)
        )
        return read_answer(host, done.stdout or done.stderr)

    def _tell(self, host: str, line: str) -> None:
        if step := read_step(line):
            with self._lock:
                self.say(f"{host}: {step}")

    def _archive(self, bundle: CodeBundle) -> bytes:
        with self._lock:  # create the archive only once, even if many hosts need it
            if bundle.key not in self._archives:
                self._archives[bundle.key] = bundle.archive()
            return self._archives[bundle.key]

    def _drain(self, plan: SshPlan) -> None:
        """Drain nodes that leave the cluster, and wait until their jobs have ended."""
        if not plan.remove_hosts:
            return
        leaving = [node.name for node in self.slurm.nodes() if node.name in plan.remove_hosts]
        if not leaving:
            return
        self.slurm.drain(leaving, REMOVAL_REASON)
        said: tuple[str, ...] = ()
        while jobs := jobs_on(self.slurm, leaving):
            if jobs != said:
                self.say(f"waiting for job {', '.join(jobs)} to end (Ctrl-C stops waiting; `dalsegno up` continues)")
                said = jobs
            time.sleep(1.0)

    def _finish(self, plan: SshPlan, failed: Mapping[str, DalsegnoError]) -> None:
        if plan.reconfigures and not plan.fresh:
            self.slurm.reconfigure()
        if plan.people:  # slurmdbd accepts limits on GPUs only after slurmctld has registered the GPUs there
            update_people(self.slurm, plan.cluster, plan.remove_members, fresh=plan.fresh)
        self._wait_for_nodes(plan, failed)
        if plan.reservations:
            update_reservations(self.slurm, plan.cluster, plan.old_reservations)

    def _wait_for_nodes(self, plan: SshPlan, failed: Mapping[str, DalsegnoError]) -> None:
        nodes = [node for node in plan.cluster.nodes if node.name in plan.plans and node.name not in failed]
        wanted = {node.name for node in nodes}
        if not wanted:
            return
        self.say(f"waiting for {compress(node.name for node in nodes)}")
        in_service = {node.name for node in nodes if not node.spare}

        def missing() -> list[str]:
            return sorted(wanted - {node.name for node in self.slurm.nodes() if is_registered(node)})

        wait_for(
            lambda: not resume_and_find_missing(self.slurm, wanted, in_service, set()),
            lambda: TargetError(
                f"{compress(missing())} did not register with slurmctld",
                hint="see /var/log/slurm/slurmd.log there; a firewall may block ports 6817 and 6818",
            ),
        )

    def _remove(self, leaving: tuple[str, ...]) -> None:
        """Undo all changes on hosts that leave the cluster. A host that does not answer is skipped, because it may not
        exist any more."""
        done = self.hosts.each(leaving, lambda host: remove_from(self.hosts, host, self.state.cluster_id, self.say))
        for each in done.values():
            if isinstance(each, DalsegnoError):
                self.say(f"not cleaned: {each.what}")


def jobs_on(slurm: SlurmClient, hosts: Collection[str]) -> tuple[str, ...]:
    """Return the unfinished jobs that run on one of these hosts."""
    return tuple(job.label for job in slurm.jobs() if not job.state.ended and set(job.nodes) & set(hosts))


def state_during(plan: SshPlan, old: SshState | None) -> SshState:
    """Return the state to record before the hosts change. It names the machines of the old and of the new cluster file,
    so that `down` and `status` find all of them.

    For an upgrade, the recorded phase is UP, because an interrupted upgrade leaves a cluster that works. So the next
    `up` again changes one host at a time, and only with `--upgrade`.
    """
    machines = {host.name: host for host in (*(old.ssh.hosts if old else ()), *plan.cluster.ssh.hosts)}
    ssh = replace(plan.cluster.ssh, hosts=tuple(machines.values()))
    new_key = bool(plan.remove_hosts or (old and old.new_key)) and not plan.new_key
    state = SshState(SshStage.MAKING, plan.cluster_id, plan.cluster.head, ssh, new_key=new_key)
    if not plan.upgrades:
        return state
    skipped = tuple(host for host, changes in plan.changes.items() if changes)
    return replace(state, phase=SshStage.UP, skipped=skipped, slurm_version=old.slurm_version if old else "")


def _in_turn(plan: SshPlan, changed: Sequence[str]) -> list[list[str]]:
    """Divide the hosts into groups, which are changed one after the other.

    An upgrade changes one host at a time, and the head last. Otherwise many node agents would be missing at once, as
    after a fault. Any other plan changes all hosts at once, or the head last if the others unmount what it exported. In
    every plan, the head is first if the others mount what it exports.
    """
    head = plan.cluster.head
    others = [host for host in changed if host != head]
    if plan.upgrades:
        own = [head] if head in changed else []
        return [[host] for host in ((*own, *others) if plan.head_first else (*others, *own))]
    if head not in changed or not (plan.head_first or plan.head_last):
        return [list(changed)]
    return [[head], others] if plan.head_first else [others, [head]]


def _faults_in(done: Mapping[str, Answer | DalsegnoError]) -> dict[str, DalsegnoError]:
    return {host: each for host, each in done.items() if isinstance(each, DalsegnoError)}


def _may_continue(plan: SshPlan, group: Collection[str], faults: Collection[str]) -> bool:
    """Return whether the next group may be changed after some hosts have failed.

    In an upgrade, one failed host may have a fault of its own. So the upgrade continues, but the head keeps the version
    that works. If the head or a second host fails, the upgrade stops, because the new version may be at fault. In other
    plans, later groups depend on the earlier ones, so any failure stops them.
    """
    if not faults:
        return True
    return bool(plan.upgrades) and len(faults) < FAILED_UPGRADES and plan.cluster.head not in (*faults, *group)


def remove_from(hosts: HostRunner, host: str, cluster_id: str, say: Say) -> Answer:
    """Undo everything that `up` changed on one host. Report what could not be undone."""

    def tell(line: str) -> None:
        if step := read_step(line):
            say(f"{host}: {step}")

    done = hosts.run(host, applier_argv(), stdin=remove_request(cluster_id), root=True, timeout_s=APPLY_S, on_line=tell)
    answer = read_answer(host, done.stdout or done.stderr)
    for line in answer.left:
        say(f"{host}: {line}")
    return answer


def remove_from_hosts(hosts: HostRunner, slurm: SlurmClient, folder: SshFolder, state: SshState, say: Say) -> None:
    """End all jobs, then undo everything that `up` changed on the hosts. Raise an error if that fails on a host. `down`
    can then be repeated."""
    with contextlib.suppress(DalsegnoError):  # a head that does not answer must not prevent the removal
        _end_jobs(slurm)
    names, done = state.ssh.names, dict[str, Answer | DalsegnoError]()
    for group in removal_order(read_applied(folder), state):
        done |= hosts.each(group, lambda host: remove_from(hosts, host, state.cluster_id, say))
    failed = {host: each for host, each in done.items() if isinstance(each, DalsegnoError)}
    done_with = [name for name in names if name not in failed]
    write_ssh_state(folder, replace(state, phase=SshStage.REMOVING, ssh=without(state.ssh, done_with)))
    if failed:
        reports = "\n".join(f"  {error.what}" for error in failed.values())
        raise TargetError(
            f"{named('host', failed)} could not be cleaned\n{reports}",
            hint=f"run `dalsegno down` again; if these machines are gone for good: rm -r {folder.root}",
        )


def removal_order(applied: Cluster | None, state: SshState) -> list[list[str]]:
    """Divide the hosts into groups, which are cleaned one after the other. A head that serves NFS comes last, because
    the other hosts could not unmount its folders without it."""
    names = list(state.ssh.names)
    addresses = {host.name: host.address for host in state.ssh.hosts}
    if applied is None or not host_storage(applied, applied.head, addresses).exports:
        return [names]
    return [[name for name in names if name != applied.head], [name for name in names if name == applied.head]]


def without(ssh: SshAccess, names: Collection[str]) -> SshAccess:
    return replace(ssh, hosts=tuple(host for host in ssh.hosts if host.name not in names))


def _end_jobs(slurm: SlurmClient) -> None:
    jobs = [job.id for job in slurm.jobs() if not job.state.ended]
    if jobs:
        slurm.cancel(*jobs)
    until = time.monotonic() + CANCEL_S
    while time.monotonic() < until and any(not job.state.ended for job in slurm.jobs()):
        time.sleep(0.2)


def _raise_for(plan: SshPlan, failed: Mapping[str, DalsegnoError], skipped: Sequence[str]) -> None:
    """Raise one error that describes the failure of each host and names the hosts that were skipped.

    If no host failed, do nothing.
    """
    if not failed:
        return
    again = "dalsegno up --upgrade" if plan.upgrades else "dalsegno up"
    rest = f"Not changed because of this: {compress(skipped)}" if skipped else "All other hosts were set up."
    if len(failed) == 1:
        error = next(iter(failed.values()))
        hint = f"{error.hint}; then `{again}` again" if error.hint else f"`{again}` again"
        raise TargetError(f"{error.what}\n{rest}", hint=hint)
    reports = "\n".join(f"  {error.what}" + (f" ({error.hint})" if error.hint else "") for error in failed.values())
    hosts = len({*plan.facts, *failed})
    raise TargetError(
        f"{len(failed)} of {hosts} hosts were not set up: {named('host', failed)}\n{reports}\n{rest}",
        hint=f"fix what is named above, then run `{again}` again",
    )
