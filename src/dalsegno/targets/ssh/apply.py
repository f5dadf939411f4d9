"""Carry out a plan on all hosts at once, and remove a cluster from its hosts. Every step can be repeated."""

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

APPLY_S = 3600.0  # a slow mirror may need long for the packages
CANCEL_S = 20.0


@dataclass(frozen=True)
class ApplyOnHosts:
    """Where and how a plan is applied."""

    hosts: HostRunner
    slurm: SlurmClient
    folder: SshFolder
    state: SshState
    say: Say
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _archives: dict[str, bytes] = field(default_factory=dict)

    def apply(self, plan: SshPlan) -> None:
        """Change all hosts. A host that fails is reported at the end, and the next `up` repairs it."""
        write_secrets(self.folder, plan.secrets)
        if plan.directory:
            write_directory_secrets(self.folder, plan.directory)
        write_seen(self.folder, {**read_seen(self.folder), **plan.facts})
        write_ids(self.folder, plan.ids)  # written before any account is created
        self._drain(plan)
        changed = [host for host, changes in plan.changes.items() if changes]
        done: dict[str, Answer | DalsegnoError] = {}
        for group in _in_turn(plan, changed):
            done |= self.hosts.each(group, lambda host: self._change(plan, host))
            if any(isinstance(each, DalsegnoError) for each in done.values()):
                break  # the next groups depend on this one; within a group, the other hosts go on
        failed = {**plan.faults, **{host: each for host, each in done.items() if isinstance(each, DalsegnoError)}}
        head = plan.cluster.head
        if head in failed:
            raise failed[head]
        self._finish(plan, failed)
        self._remove(plan.remove_hosts)
        write_applied(self.folder, plan.recorded)
        ssh = without(self.state.ssh, plan.remove_hosts)
        state = replace(self.state, phase=SshStage.UP, ssh=ssh, failed=tuple(failed))
        write_ssh_state(self.folder, replace(state, slurm_version=str(self.slurm.version())))
        _raise_for(failed, len(self.state.ssh.hosts))

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
        with self._lock:  # make the archive only once, however many hosts need it
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
        said: list[str] = []
        while jobs := [job.label for job in self.slurm.jobs() if not job.state.ended and set(job.nodes) & set(leaving)]:
            if jobs != said:
                self.say(f"waiting for job {', '.join(jobs)} to end (Ctrl-C stops waiting; `dalsegno up` continues)")
                said = jobs
            time.sleep(1.0)

    def _finish(self, plan: SshPlan, failed: Mapping[str, DalsegnoError]) -> None:
        if plan.reconfigures and not plan.fresh:
            self.slurm.reconfigure()
        if plan.people:  # slurmdbd accepts limits on GPUs only after slurmctld has reported them
            update_people(self.slurm, plan.cluster, fresh=plan.fresh)
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
        """Clean hosts that have left the cluster. One that does not answer is not needed any more, and may be gone."""
        done = self.hosts.each(leaving, lambda host: remove_from(self.hosts, host, self.state.cluster_id, self.say))
        for each in done.values():
            if isinstance(each, DalsegnoError):
                self.say(f"not cleaned: {each.what}")


def _in_turn(plan: SshPlan, changed: Sequence[str]) -> list[list[str]]:
    """Return the hosts in the groups in which they are changed, one group after the other.

    An upgrade changes one host at a time, the head last. Many missing node agents at once would look like a fault.
    """
    head = plan.cluster.head
    others = [host for host in changed if host != head]
    if plan.upgrades:
        return [[host] for host in (*others, *([head] if head in changed else []))]
    if head not in changed or not (plan.head_first or plan.head_last):
        return [list(changed)]
    return [[head], others] if plan.head_first else [others, [head]]


def remove_from(hosts: HostRunner, host: str, cluster_id: str, say: Say) -> Answer:
    """Undo everything on one host."""

    def tell(line: str) -> None:
        if step := read_step(line):
            say(f"{host}: {step}")

    done = hosts.run(host, applier_argv(), stdin=remove_request(cluster_id), root=True, timeout_s=APPLY_S, on_line=tell)
    answer = read_answer(host, done.stdout or done.stderr)
    for line in answer.left:
        say(f"{host}: {line}")
    return answer


def remove_from_hosts(hosts: HostRunner, slurm: SlurmClient, folder: SshFolder, state: SshState, say: Say) -> None:
    """End all jobs, then undo everything on every host. Raise if a host could not be reached: `down` can be
    repeated."""
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
    """Return the hosts in the groups in which they are cleaned. A head that serves NFS is the last: without their
    server, the others could not unmount its folders."""
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


def _raise_for(failed: Mapping[str, DalsegnoError], hosts: int) -> None:
    """Raise one error for all hosts that failed, with the last output of each."""
    if not failed:
        return
    if len(failed) == 1:
        error = next(iter(failed.values()))
        hint = f"{error.hint}; then `dalsegno up` again" if error.hint else "`dalsegno up` again"
        raise TargetError(f"{error.what}\nAll other hosts were set up.", hint=hint)
    reports = "\n".join(f"  {error.what}" + (f" ({error.hint})" if error.hint else "") for error in failed.values())
    raise TargetError(
        f"{len(failed)} of {hosts} hosts were not set up: {named('host', failed)}\n{reports}",
        hint="fix what is named above, then run `dalsegno up` again: the other hosts are done",
    )
