"""The local target: looks, plans, applies, tells, removes. The parts do the work; this joins them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dalsegno.containers import native
from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo
from dalsegno.spec.facts import Cluster
from dalsegno.system.cgroups import ends_with_session
from dalsegno.system.files import closed_to_others
from dalsegno.system.hosts import PACKAGES
from dalsegno.system.machine import DAEMONS, MachineFacts, look, missing_packages
from dalsegno.system.network import first_free_run, has_address, link_names, used_networks
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.base import ClusterStatus, Plan, Say
from dalsegno.targets.local.apply import ApplySite, apply
from dalsegno.targets.local.daemons import NODE_PATH, node_env, slurm_env
from dalsegno.targets.local.desired import desired, images_folder, limits_sentence
from dalsegno.targets.local.fault_access import LocalAccess, clear_faults
from dalsegno.targets.local.folder import (
    ApplyStage,
    ClusterState,
    Folder,
    read_applied,
    read_state,
    read_state_leniently,
    write_state,
)
from dalsegno.targets.local.images import import_all, present
from dalsegno.targets.local.nodes import LocalNodes, open_nodes
from dalsegno.targets.local.observe import controller_runs, observe
from dalsegno.targets.local.people import People, shared_accounts
from dalsegno.targets.local.placement import FIRST_PORT, LAST_PORT, LOOPBACK, Free, Placement, place
from dalsegno.targets.local.plan import LocalPlan, make_plan, named
from dalsegno.targets.local.shell import enter, entrance, person_uid, user_env
from dalsegno.targets.local.status import read_status, read_summary
from dalsegno.targets.local.sweep import sweep

if TYPE_CHECKING:
    from dalsegno.inject.faults import FaultOptions, InjectableFault, InjectedFault

# ---- What goes with a cluster that is taken down, in consequences. Pure, but for the looking.


@dataclass(frozen=True)
class Removal:
    """`jobs` are those that are not over; `homes` the users' folders that hold something."""

    jobs: tuple[JobInfo, ...] = ()
    homes: tuple[str, ...] = ()

    def sentences(self, runs: Collection[str]) -> list[str]:
        """`runs` are those known to be under way: their jobs are not told of again."""
        return list(self._sentences(runs))

    def _sentences(self, runs: Collection[str]) -> Iterator[str]:
        others = [f"{job.label} of {job.user}" for job in self.jobs if job.name not in runs]
        if runs:
            yield f"ends {named('run', runs)}"
        if others:
            yield f"ends {named('job', others)}"
        if self.homes:
            yield f"deletes {named('home folder', self.homes)}, with all runs and checkpoints in them"


def look_at(folder: Folder, slurm: SlurmClient) -> Removal:
    """Of a cluster that is damaged, what can be seen."""
    return Removal(_jobs(folder, slurm), _homes(folder))


def _jobs(folder: Folder, slurm: SlurmClient) -> tuple[JobInfo, ...]:
    with contextlib.suppress(DalsegnoError):
        if controller_runs(folder):
            return tuple(job for job in slurm.jobs() if not job.state.ended)
    return ()


def _homes(folder: Folder) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(home.name for home in folder.homes.iterdir() if any(home.iterdir())))
    return ()


# ---- The local target: looks, plans, applies, tells, removes. The parts do the work; this joins them.


STATUS_S = 5.0
ALWAYS = ("slurmctld", "slurmd", "sinfo", "munged")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")


class LocalTarget:
    """One cluster in one state folder."""

    def __init__(self, folder: Path, cache: Path, runner: Runner | None = None) -> None:
        self.folder = Folder(folder)
        self.cache = cache
        self.runner = runner or LocalRunner()
        self.slurm = self._client()

    @cached_property
    def machine(self) -> MachineFacts:
        return look(self.runner)

    def plan(self, cluster: Cluster) -> LocalPlan:
        self.folder.check([node.name for node in cluster.nodes])
        self._check_packages(cluster)
        cluster, no_containers = self._settle_containers(cluster)
        state = self._state()
        before = state.placement if state else None
        placement = place(cluster, self.machine, self.folder.id, before, self._free(), str(self.folder.devices))
        if placement.hosts == LOOPBACK and not has_address():
            raise TargetError(
                "this machine has no network address but 127.0.0.1, and Slurm does not start without one",
                hint="give it any: ip link add d0 type veth peer name d1; ip addr add 192.0.2.1/32 dev d0; "
                "ip link set d0 up; ip link set d1 up",
            )
        wanted = desired(cluster, self.folder, placement, self.machine, self._people())
        seen = observe(self.folder, state, wanted, self.slurm)
        listed = cluster.containers.images
        images = present(images_folder(cluster, self.folder), listed) if listed else frozenset()
        plan = make_plan(cluster, placement, wanted, replace(seen, images=images))
        left_out = (*plan.left_out, *self._fall_back(cluster, placement))
        limits = limits_sentence(cluster, placement, self.machine)
        return replace(plan, left_out=left_out, limits=limits, no_containers=no_containers)

    def _settle_containers(self, cluster: Cluster) -> tuple[Cluster, str]:
        """Whether there are any, where the file leaves it to the machine; and why not."""
        if cluster.containers.enabled is False:
            return cluster, ""
        if cluster.containers.enabled:
            if lacking := native.missing_packages():
                raise TargetError(
                    f"containers need packages that this machine lacks: {' '.join(lacking)}",
                    hint="`./dalsegno setup` installs them, or: "
                    f"sudo apt-get install --no-install-recommends {' '.join(lacking)}",
                )
            return cluster, ""
        why = native.prepare_native(self.runner, self.cache, self.machine.slurm_version, str(self.folder.root))
        return replace(cluster, containers=replace(cluster.containers, enabled=not why)), why

    def _fall_back(self, cluster: Cluster, placement: Placement) -> list[str]:
        """Said when root does not get what root usually gets, and when a user is an account of the machine."""
        if placement.hosts != LOOPBACK:
            return [*shared_accounts(cluster.users, self._people()), *(self.closed_to_users() if cluster.users else ())]
        if placement.hosts == LOOPBACK and cluster.local.hosts == "auto" and self.machine.is_root:
            return ["namespaces are not permitted here: nodes are processes on loopback ports, not hosts of their own"]
        if not self.machine.is_root and ends_with_session(self.runner, self.machine.user):
            return ["it ends with this login session (KillUserProcesses=yes); `loginctl enable-linger` keeps it"]
        return []

    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, LocalPlan):
            raise TypeError(f"not a plan of the local target: {plan!r}")
        if not plan.changes:
            return
        if plan.blocked:
            raise TargetError(
                f"job {', '.join(plan.blocked)} waits in a partition that is to go",
                hint=f"`scancel {' '.join(plan.blocked)}`, or `scontrol update job={plan.blocked[0]} partition=NAME`",
            )
        state = self._state()
        if state is None:
            sweep(self.runner, self.folder)  # what an earlier cluster of this name, or half a `down`, has left
        site = ApplySite(self.runner, self.folder, self.machine, self.cache, self.slurm, say)
        before = read_applied(self.folder)
        try:
            apply(site, plan, state)
        except DalsegnoError as error:
            if state is None or state.phase is not ApplyStage.UP or before is None:
                raise
            say("that failed: putting the cluster back as it was")
            self._put_back(site, before, state, error)

    def import_images(self, plan: LocalPlan, say: Say) -> None:
        """Those that the plan names. The cluster is up already, and may be used and changed meanwhile."""
        import_all(images_folder(plan.cluster, self.folder), plan.import_images, say, plan.cluster.name)

    def _put_back(self, site: ApplySite, before: Cluster, state: ClusterState, error: DalsegnoError) -> NoReturn:
        """Undo a change that Slurm did not take, then tell of it."""
        try:
            # The old places, since hosts that were to go still live there; and unfinished, so that all is looked at.
            write_state(self.folder, replace(state, phase=ApplyStage.MAKING))
            apply(site, self.plan(before), state)
        except DalsegnoError as second:
            raise TargetError(
                f"{error.what}\nPutting the cluster back as it was failed too: {second.what}",
                where=error.where,
                hint="`dalsegno status` shows what stands; `dalsegno up` with the old file tries again",
            ) from error
        raise TargetError(
            f"{error.what}\nThe cluster was put back as it was: its hosts, nodes, partitions and settings.",
            where=error.where,
            hint=error.hint or "mend what it complains about, then `dalsegno up` again",
        ) from error

    def removal(self) -> Removal:
        """What `destroy` would take along."""
        return look_at(self.folder, self._client(self._way_in(), timeout_s=STATUS_S))

    def destroy(self, say: Say) -> bool:
        state = read_state_leniently(self.folder)
        if state is not None:
            with contextlib.suppress(DalsegnoError):  # a full disk must not keep us from freeing it
                write_state(self.folder, replace(state, phase=ApplyStage.REMOVING))
        return sweep(self.runner, self.folder)

    def status(self) -> ClusterStatus:
        """Asked from inside where we may enter: only there do the cluster's own users have names. And not for long."""
        return read_status(self.folder, self._client(self._way_in(), timeout_s=STATUS_S))

    def _way_in(self) -> list[str]:
        try:
            return entrance(self.folder, "/")
        except DalsegnoError:
            return []  # a cluster that is damaged: its status is what we are about to tell

    def summary(self) -> dict[str, str | int]:
        """The line of `ls`: cheap, asks no daemon."""
        return read_summary(self.folder)

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """What puts this cluster into a shell that has `env`."""
        return user_env(self.folder, env)

    def shell(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, host: str | None, user: str | None
    ) -> tuple[list[str], dict[str, str]]:
        """What to become for a shell, or one command, on the cluster."""
        return enter(self.folder, command, env, cwd, host=host, user=user)

    def closed_to_users(self) -> list[str]:
        """What keeps the cluster's users from running anything of ours: a clone below /root, for instance."""
        closed = closed_to_others(Path(PACKAGES) / "dalsegno", Path(sys.executable))
        if closed is None:
            return []
        fix = "move the clone to a folder that all may read, such as /opt, and run its set-up there"
        return [f"the cluster's users cannot read {closed}, so their runs will fail: {fix}"]

    def uid_of(self, user: str) -> int:
        """The uid of a user on the cluster's hosts."""
        return person_uid(self.folder, user)

    def on_node(
        self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str
    ) -> tuple[list[str], dict[str, str]]:
        """What to become for one command on a node, as a service of the node would run it."""
        nodes = self._nodes()
        nodes.node(node)
        argv, full = enter(self.folder, command, env, cwd, host=node if nodes.virtual else None)
        return argv, {**full, "SLURMD_NODENAME": node, **node_env(self.folder, node)}

    @property
    def controller_socket(self) -> Path:
        """Where the cluster's controller is asked to keep a run."""
        return self.folder.controller_socket

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> dict[str, Any]:
        from dalsegno.inject.injection import inject

        return inject(LocalAccess(self._nodes()), fault, node, options)

    def power_off(self, node: str) -> None:
        """Cut a node's power: nothing on it has time to say so."""
        from dalsegno.inject.faults import FAULTS, FaultOptions

        self.inject(FAULTS["power-off"], node, FaultOptions())

    def injected(self) -> list[InjectedFault]:
        from dalsegno.inject.injection import injected

        nodes = self._nodes()
        return [one for node in nodes.cluster.nodes for one in injected(LocalAccess(nodes), node.name)]

    def injected_ever(self, node: str) -> list[tuple[float, str]]:
        """Return when faults were injected into a node, or undone by hand."""
        from dalsegno.inject.records import read_history

        return read_history(self.folder.faults(node))

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        return clear_faults(self._nodes(), node, fault)

    def _nodes(self) -> LocalNodes:
        return open_nodes(self.runner, self.folder)

    def ask(self, *argv: str) -> str:
        """What a command of Slurm's prints, as it prints it."""
        return self.runner.run(argv, env={"PATH": NODE_PATH, **slurm_env(self.folder)}, timeout_s=60).checked().stdout

    def slurm_as(self, user: str) -> SlurmClient:
        """Slurm as one of the cluster's users speaks to it (root, virtual hosts)."""
        return self._client(entrance(self.folder, "/", user=user))

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": NODE_PATH, **slurm_env(self.folder)}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)

    def _state(self) -> ClusterState | None:
        """The state to go on from: none where a `down` was cut short."""
        state = read_state(self.folder)
        return None if state is not None and state.phase is ApplyStage.REMOVING else state

    def _check_packages(self, cluster: Cluster) -> None:
        programs = [
            *ALWAYS,
            *(ACCOUNTING if cluster.slurm.accounting else ()),
            *(["slurmrestd"] if cluster.slurm.rest else []),
        ]
        if self.machine.is_root:
            programs += ["ip", "nsenter"]
        missing = missing_packages(tuple(programs))
        if missing:
            lacking = ", ".join(name for name in programs if DAEMONS[name] in missing)
            raise TargetError(
                f"this machine lacks {lacking}",
                hint="`./dalsegno setup` installs them, or: "
                f"sudo apt-get install --no-install-recommends {' '.join(missing)}",
            )

    def _free(self) -> Free:
        if not self.machine.is_root:
            return Free(port_run=self._port_run)
        return Free(used_networks(self.runner), frozenset(link_names(self.runner)), self._port_run, self._people())

    def _people(self) -> People:
        passwd, group = (Path(f"/etc/{name}").read_text(errors="surrogateescape") for name in ("passwd", "group"))
        return People(passwd, group)

    def _port_run(self, count: int, taken: set[int]) -> int | None:
        """Each cluster looks from a place of its own, so that two that come up at once do not choose the same."""
        start = FIRST_PORT + int(self.folder.id, 16) % ((LAST_PORT - FIRST_PORT) // 2)
        return first_free_run(count, start, LAST_PORT, taken) or first_free_run(count, FIRST_PORT, LAST_PORT, taken)
