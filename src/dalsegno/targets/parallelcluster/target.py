"""The operator's side of a cluster on ParallelCluster: plan, create, change, report, connect and remove."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.setup.delivery import CodeBundle, find_bundle
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.aws_facts import PclusterSettings
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import remove_tree
from dalsegno.system.processes import Completed, LocalRunner, Runner
from dalsegno.targets.base import ClusterPhase, ClusterStatus, Plan, Removal, Say, ShellEntry
from dalsegno.targets.cloud.aws import AwsApi, BotoApi, caller_account
from dalsegno.targets.cloud.consequences import CapacityCheck, Minutes
from dalsegno.targets.cloud.cost import read_prices
from dalsegno.targets.cloud.node_plans import PATH
from dalsegno.targets.cloud.progress import OperationState, follow
from dalsegno.targets.cloud.refresh import REFRESH_S, refresh_machines
from dalsegno.targets.cloud.slurm_policy import add_people
from dalsegno.targets.folder import read_applied, with_uids, write_uids
from dalsegno.targets.parallelcluster.apply import ApplyOnAws, next_state, private_key
from dalsegno.targets.parallelcluster.changes import find_changes
from dalsegno.targets.parallelcluster.client import FleetStatus, Pcluster, PclusterStatus, PclusterView, find_pcluster
from dalsegno.targets.parallelcluster.config import render_config
from dalsegno.targets.parallelcluster.connect import ssh_argv, ssm_argv
from dalsegno.targets.parallelcluster.data_repositories import DataRepositories
from dalsegno.targets.parallelcluster.folder import (
    PclusterFolder,
    PclusterStage,
    PclusterState,
    read_sent_config,
    read_sent_template,
    read_state,
    write_state,
)
from dalsegno.targets.parallelcluster.head import TIMES
from dalsegno.targets.parallelcluster.plan import (
    CREATION,
    FILE_SYSTEMS,
    UPDATE,
    CapacityReservation,
    PclusterPlan,
    check_key,
    check_reservations,
    estimate_cost,
    notes,
    queue_ends,
    refuse_impossible,
    removal_of,
    zone_of_network,
)
from dalsegno.targets.parallelcluster.platform_files import render_files
from dalsegno.targets.parallelcluster.prerequisites import (
    Prerequisites,
    bucket_name,
    given,
    merge_outputs,
    new_resources,
    placeholders,
    render_template,
    settings_of,
    stack_name,
)
from dalsegno.targets.parallelcluster.references import DataBuckets, bucket_of, check_references, find_data_buckets
from dalsegno.targets.parallelcluster.resources import AwsResources
from dalsegno.targets.parallelcluster.scripts import bootstrap_scripts, digest_of
from dalsegno.targets.parallelcluster.stack_changes import OwnStack, leaving, stack_changes
from dalsegno.targets.parallelcluster.status import phase_of, read_status
from dalsegno.targets.sides import (
    IMPORT_S,
    CommandsOnHead,
    OperatorSide,
    applied_cluster,
    as_user,
    at_terminal,
    import_on_head,
    known,
)

_REMAINS = (PclusterStatus.CREATE_FAILED, PclusterStatus.DELETE_FAILED)  # the remains of a cluster that cannot be used
_LOST = (*_REMAINS, PclusterStatus.DELETE_IN_PROGRESS)
Pause = Callable[[float], None]


@dataclass(frozen=True)
class FoundPcluster:
    """What exists of a cluster before a change."""

    state: PclusterState | None
    there: PclusterView | None
    stack: OwnStack
    bucket: str
    external: Prerequisites  # ids in the cluster file and the stacks it names, and a bucket that an earlier `up` left
    known: Prerequisites  # `external` plus the outputs of our own stack
    reservations: Mapping[str, CapacityReservation]
    zones: Mapping[str, str]  # subnet -> availability zone

    @property
    def lost(self) -> bool:
        return self.there is None or self.there.status in _LOST

    @property
    def running(self) -> bool:
        """Whether an operation of ParallelCluster on the cluster is in progress."""
        return self.there is not None and self.there.status.operation is OperationState.RUNNING

    def zone(self, own: PclusterSettings) -> str:
        """Return the availability zone of our own network; "" if AWS chooses it, or if the network is not ours.

        An existing network keeps its zone unless the cluster file names another one. A new zone would make
        CloudFormation replace the subnets.
        """
        if self.stack.has_network and own.availability_zone in ("", self.stack.zone, *self.zones.values()):
            return self.stack.zone
        return "" if self.external.head_subnet else zone_of_network(own, self.reservations)

    def checks(self, own: PclusterSettings) -> list[CapacityCheck]:
        return check_reservations(own, self.reservations, self.zones, running=not self.lost)


class PclusterTarget(OperatorSide):
    """The target on the operator's machine. One object stands for the cluster of one state folder."""

    kind = "parallelcluster"
    times = TIMES
    folder: PclusterFolder

    def __init__(
        self,
        folder: Path,
        connect: Callable[[str], AwsApi] = BotoApi,
        runner: Runner | None = None,
        env: Mapping[str, str] = os.environ,
        pause: Pause = time.sleep,
        code: Callable[[], CodeBundle] = find_bundle,
    ) -> None:
        self.folder = PclusterFolder(folder)
        self._connect, self._runner, self._env, self._pause = connect, runner or LocalRunner(), env, pause
        self._code = code
        self._found: dict[str, list[str]] = {}  # version -> the command that starts it

    # Planning a change
    def plan(self, cluster: Cluster) -> PclusterPlan:
        cluster = with_uids(cluster, self.folder)
        own = settings_of(cluster)
        _refuse_moved(read_state(self.folder), cluster)
        aws = self._aws(own.region)
        found = self._find(aws, cluster)
        there, stack, state, known, lost = found.there, found.stack, found.state, found.known, found.lost
        template = render_template(cluster, found.external, found.bucket, found.zone(own))
        config = render_config(cluster, placeholders(known, cluster))
        changes = () if lost else find_changes(read_sent_config(self.folder), config, own.queue_update)
        missing = self._missing_repositories(aws, cluster, known)
        buckets = self._data_buckets(aws, own, found.bucket)
        new = new_resources(cluster, known, missing, buckets.missing) if stack.complete or not stack.exists else ()
        ends = queue_ends(own, found.reservations)
        scripts = bootstrap_scripts(cluster, next_state(self.folder, cluster, known, state), self._code().key, ends)
        prices, before = read_prices(self._env), read_applied(self.folder)
        quotas = aws.quotas(own) if lost else ()
        key_type = aws.key_type(own.key) if own.key else ""
        keys = check_key(own, key_type, private_key(self.folder, own.key))
        return PclusterPlan(
            cluster,
            fresh=lost,
            resumes=f"the {_doing(there)} of {cluster.name}" if there and found.running else "",
            resources=new,
            changes=(*changes, *stack_changes(stack, template, found.external.storage.values(), own.region)),
            cost=estimate_cost(cluster, prices),
            cost_before=estimate_cost(before, prices) if before and not lost else None,
            time=_minutes(cluster, lost, known),
            checks=(*found.checks(own), *keys, *buckets.checks, *check_references(aws.api, own), *quotas),
            notes=tuple(self._notes(cluster, there, notes(cluster, prices))),
            external=found.external,
            known=known,
            template=template,
            new_stack=not stack.complete,
            changed_stack=stack.complete and (stack.state is OperationState.RUNNING or template != stack.template),
            leaving=leaving(stack, template),
            new_key=bool(own.key) and not key_type,
            removes_failed=there is not None and there.status in _REMAINS,
            new_scripts=state is None or state.scripts != digest_of(scripts),
            fleet_stopped=there is not None and there.fleet is FleetStatus.STOPPED,
            missing_repositories=missing,
            missing_buckets=buckets.missing,
            ends=ends,
            unfinished=state is not None and state.phase is not PclusterStage.UP,
            new_accounts=cluster.slurm.accounting and (lost or before is None or _people(before) != _people(cluster)),
        )

    @staticmethod
    def _data_buckets(aws: AwsResources, own: PclusterSettings, scripts: str) -> DataBuckets:
        """Return the missing and the unusable buckets of data repositories, except the bucket `scripts`.

        That bucket holds the bootstrap scripts. It exists already, or the stack creates it.
        """
        return find_data_buckets(aws.api, [each for each in own.data_repositories if bucket_of(each.s3) != scripts])

    def _find(self, aws: AwsResources, cluster: Cluster) -> FoundPcluster:
        """Return what exists of the cluster, on AWS and in the state folder."""
        own, state = settings_of(cluster), read_state(self.folder)
        account = caller_account(aws.api)
        there = self._pcluster(cluster.name, own.region, own.version).describe()
        _refuse_foreign(there, state, cluster)
        external = self._external(aws, cluster)
        stack = aws.read_stack(stack_name(cluster.name))
        bucket = external.bucket or bucket_name(cluster.name, account, own.region)
        if not (external.bucket or stack.has_bucket) and aws.has_bucket(bucket, account):
            external = replace(external, bucket=bucket)  # an earlier `down` or failed creation left this bucket
        known = merge_outputs(external, cluster, stack.outputs) if stack.complete else external
        return FoundPcluster(
            state, there, stack, bucket, external, known, aws.reservations(own), aws.zones(known.compute_subnets)
        )

    def _external(self, aws: AwsResources, cluster: Cluster) -> Prerequisites:
        """Return the ids in the cluster file and in the outputs of the stacks it names."""
        known = given(cluster)
        for name in settings_of(cluster).stacks:
            outputs = aws.outputs(name)
            if outputs is None:
                raise NotThere(f"there is no stack `{name}` in this region", hint="check `stacks` in the cluster file")
            known = merge_outputs(known, cluster, outputs)
        return known

    def _missing_repositories(self, aws: AwsResources, cluster: Cluster, known: Prerequisites) -> tuple[str, ...]:
        """Return the S3 addresses whose association does not exist, does not work, or has events other than those in
        the cluster file."""
        repositories, missing = DataRepositories(aws.api), []
        for each in settings_of(cluster).data_repositories:
            file_system = known.storage.get(each.storage)
            if file_system is None or repositories.needs_work(file_system, each):
                missing.append(each.s3)
        return tuple(missing)

    @staticmethod
    def _notes(cluster: Cluster, there: PclusterView | None, found: Sequence[str]) -> list[str]:
        lines = list(found)
        if there and there.status in _REMAINS:
            lines.append("deletes what a failed creation or deletion left, after its logs are saved")
        if there and there.fleet is FleetStatus.PROTECTED:
            lines.append("ParallelCluster protects itself: nodes failed to boot ten times; see the logs of a node")
        own = settings_of(cluster)
        if not own.key:
            lines.append("has no SSH key: connects through SSM, which needs the AWS CLI and its session manager plugin")
        return lines

    def platform_files(self, cluster: Cluster) -> dict[str, str]:
        """Return cluster.yaml, the CloudFormation template and the scripts, without a query to AWS."""
        return render_files(with_uids(cluster, self.folder), read_state(self.folder), self._code().key)

    # Applying a plan
    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, PclusterPlan):
            raise TypeError(f"not a plan of the parallelcluster target: {plan!r}")
        if plan.empty:
            return
        own = settings_of(plan.cluster)
        pcluster = self._pcluster(plan.cluster.name, own.region, own.version)
        refuse_impossible(plan, shlex.join(pcluster.command("update-compute-fleet", "--status", "STOP_REQUESTED")))
        write_uids(self.folder, plan.cluster)
        work = ApplyOnAws(self.folder, self._aws(own.region), pcluster, say, self._code(), self._pause)
        work.apply(plan, lambda: self._finish(plan, say))

    def _finish(self, plan: PclusterPlan, say: Say) -> None:
        """Update what ParallelCluster does not: machines that already run, and Slurm's accounting."""
        if (plan.new_scripts or plan.unfinished) and not plan.fresh:
            self._refresh(say)
        if plan.new_accounts and settings_of(plan.cluster).key:
            say("adding accounts, users and QOS to Slurm's accounting")
            add_people(self.slurm, plan.cluster)

    def _refresh(self, say: Say) -> None:
        """Run the new scripts on machines that already run. ParallelCluster itself runs them only on new machines.

        If the cluster has no SSH key, only say which command the user must run on each machine.
        """
        state = self._known()
        if not state.key:
            say("machines that run already get the new scripts with `sudo dalsegno-refresh` on each of them")
            return
        there = self._there(state)
        seen = self._slurm(state, there).nodes()
        running = [node.name for node in seen if node.responding and not node.powered_down]
        words = ["sudo", "dalsegno-refresh"]
        commands = {
            name or "head": ssh_argv(state, there.head_address, self.folder, words, name, terminal=False)
            for name in (None, *running)
        }
        refresh_machines(commands, lambda argv: self._runner.run(argv, env=self._env, timeout_s=REFRESH_S), say)

    def import_images(self, plan: Plan, say: Say) -> None:
        """Import the images of the cluster file on the head node, into the folder that all machines see."""
        state = self._known()
        address = self._there(state).head_address

        def execute(argv: Sequence[str]) -> Completed:
            ssh = ssh_argv(state, address, self.folder, ["sudo", *argv], None, terminal=False)
            return self._runner.run(ssh, env=self._env, timeout_s=IMPORT_S)

        import_on_head(applied_cluster(self.folder), plan.import_images, execute, say)

    # Removing the cluster
    def removal(self) -> Removal:
        """Return what `down` deletes and keeps. Unfinished jobs are listed only if the cluster has an SSH key and Slurm
        answers."""
        state, applied = read_state(self.folder), read_applied(self.folder)
        jobs = self.unfinished_jobs() if state is not None and state.key else ()
        return removal_of(state, applied, read_sent_template(self.folder), jobs)

    def destroy(self, say: Say) -> bool:
        state = read_state(self.folder)
        if state is None:
            found = self.folder.root.exists()
            remove_tree(self.folder.root)
            return found
        pcluster = self._pcluster(self.folder.name, state.region, state.version)
        aws = self._aws(state.region)
        write_state(self.folder, replace(state, phase=PclusterStage.REMOVING))
        if pcluster.delete():
            follow(f"deletion of {self.folder.name}", pcluster.report, say, self.folder.logs, pause=self._pause)
        aws.remove(state.stack or stack_name(self.folder.name), state.file_systems.values(), state.kept, say)
        remove_tree(self.folder.root)
        return True

    # Reporting the cluster's state
    def status(self) -> ClusterStatus:
        state = read_state(self.folder)
        applied = read_applied(self.folder)
        if state is None:
            return read_status(self.folder.name, None, applied, None, (), None)
        try:
            pcluster = self._pcluster(self.folder.name, state.region, state.version)
            there = pcluster.describe()
            machines = pcluster.instances() if there else []
        except DalsegnoError as error:
            silence = f"the state on AWS is unknown: {error.what}; {error.hint}"
            return read_status(self.folder.name, state, applied, None, (), None, silence)
        slurm = self._slurm(state, there) if there and there.head_address and state.key else None
        start = shlex.join(pcluster.command("update-compute-fleet", "--status", "START_REQUESTED"))
        return read_status(self.folder.name, state, applied, there, machines, slurm, start=start)

    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        return phase_of(read_state(self.folder), applied)

    @property
    def slurm(self) -> SlurmClient:
        state = self._known()
        return self._slurm(state, self._there(state))

    def slurm_as(self, user: str) -> SlurmClient:
        state = self._known()
        return self._slurm(state, self._there(state), ["runuser", "-u", user, "--"])

    def slurm_runs(self) -> bool:
        return read_state(self.folder) is not None

    # Connecting to machines
    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        state = self._known()
        there, inner = self._there(state), as_user(command, user)
        other = None if host == "head" else host
        if state.key:
            terminal = not command or at_terminal()
            return ShellEntry(ssh_argv(state, there.head_address, self.folder, inner, other, terminal), dict(env))
        if other:
            inner = ["ssh", other, *([shlex.join(inner)] if inner else [])]
        return ShellEntry(ssm_argv(state, there.head_instance, inner), dict(env))

    # Objects that the methods above use
    def _aws(self, region: str) -> AwsResources:
        return AwsResources(self._connect(region), self.folder.logs, self._pause)

    def _pcluster(self, name: str, region: str, version: str) -> Pcluster:
        if version not in self._found:  # search only once, because starting `pcluster` takes a second
            self._found[version] = find_pcluster(version, self._runner, self._env)
        return Pcluster(self._found[version], self._runner, self._env, name, region, self._pause)

    def _known(self) -> PclusterState:
        return known(read_state(self.folder), self.folder)

    def _there(self, state: PclusterState) -> PclusterView:
        there = self._pcluster(self.folder.name, state.region, state.version).describe()
        if there is None or not there.head_instance:
            raise NotThere(
                f"the head node of {self.folder.name} does not run", hint="`dalsegno status` shows what is there"
            )
        return there

    def _slurm(self, state: PclusterState, there: PclusterView, prefix: Sequence[str] = ()) -> SlurmClient:
        def enter(command: Sequence[str]) -> list[str]:
            return ssh_argv(state, there.head_address, self.folder, ["sudo", *command], None, terminal=False)

        return SlurmClient(CommandsOnHead(self._runner, enter, self._env), {"PATH": PATH}, prefix=prefix, timeout_s=60)


def _people(cluster: Cluster) -> object:
    return (cluster.accounts, cluster.users, cluster.slurm.qos)


def _doing(there: PclusterView) -> str:
    return {
        PclusterStatus.CREATE_IN_PROGRESS: "creation",
        PclusterStatus.UPDATE_IN_PROGRESS: "update",
        PclusterStatus.DELETE_IN_PROGRESS: "deletion",
    }.get(there.status, "operation")


def _minutes(cluster: Cluster, fresh: bool, known: Prerequisites) -> Minutes:
    own = CREATION if fresh else UPDATE
    makes = any(each.type in ("lustre", "openzfs") and each.name not in known.storage for each in cluster.storage)
    return Minutes(own.least + FILE_SYSTEMS.least, own.most + FILE_SYSTEMS.most) if makes else own


def _refuse_moved(state: PclusterState | None, cluster: Cluster) -> None:
    own = settings_of(cluster)
    if state is not None and state.region != own.region:
        raise TargetError(
            f"{cluster.name} is in {state.region}, and the file says {own.region}",
            hint="`dalsegno down` removes it there, or give the new cluster another name",
        )
    if state is not None and state.version != own.version:
        raise TargetError(
            f"{cluster.name} was created with ParallelCluster {state.version}, and the file says {own.version}",
            hint=f"write `version: {state.version}`: a cluster keeps its version until it is created again",
        )


def _refuse_foreign(there: PclusterView | None, state: PclusterState | None, cluster: Cluster) -> None:
    if there is not None and state is None:
        raise TargetError(
            f"ParallelCluster has a cluster `{there.name}` already, which was not created from here",
            hint="choose another name, or use it as it is: `dalsegno adopt` on its head node",
        )
