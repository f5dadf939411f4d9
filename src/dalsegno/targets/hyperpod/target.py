"""The operator's side of a cluster on SageMaker HyperPod: plan, create, change, report, connect and remove."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.setup.bootstrap import BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.delivery import CodeBundle, find_bundle
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, RemoteWrite, Storage
from dalsegno.system.files import remove_tree, write_atomic
from dalsegno.system.processes import Completed, LocalRunner, Runner
from dalsegno.targets.base import ClusterPhase, ClusterStatus, Plan, Removal, Say, ShellEntry
from dalsegno.targets.cloud.aws import BotoApi
from dalsegno.targets.cloud.cost import read_prices
from dalsegno.targets.cloud.node_plans import PATH
from dalsegno.targets.cloud.refresh import REFRESH_S, refresh_machines
from dalsegno.targets.cloud.service_model import check_request
from dalsegno.targets.folder import read_applied, with_uids, write_uids
from dalsegno.targets.hyperpod.answers import ClusterDescription, SharedFileSystem
from dalsegno.targets.hyperpod.api import HyperPodApi, refuse_failures
from dalsegno.targets.hyperpod.apply import ROLES, HyperPodWork, Pause, read_public_key
from dalsegno.targets.hyperpod.changes import TagChange, compare_tags, update_request
from dalsegno.targets.hyperpod.connect import (
    Reached,
    find_instance,
    name_instances,
    render_ssh_config,
    session_argv,
    ssh_argv,
)
from dalsegno.targets.hyperpod.folder import (
    HyperPodFolder,
    HyperPodStage,
    HyperPodState,
    read_hyperpod_state,
    write_hyperpod_state,
)
from dalsegno.targets.hyperpod.grafana import MACHINE, connect_command, grafana_template, price_text, stack_name
from dalsegno.targets.hyperpod.grafana_stack import GrafanaStack
from dalsegno.targets.hyperpod.head import TIMES, repair_words
from dalsegno.targets.hyperpod.lifecycle import digests, lifecycle_files
from dalsegno.targets.hyperpod.node_plans import role_plan
from dalsegno.targets.hyperpod.partitions import CONF
from dalsegno.targets.hyperpod.plan import HyperPodPlan, make_plan, refuse_impossible
from dalsegno.targets.hyperpod.requests import create_request, group_request, planned_groups, settings_of
from dalsegno.targets.hyperpod.status import machine_rows, phase_of, read_status, unanswered_status
from dalsegno.targets.hyperpod.studio import NO_USERS, StudioUser, studio_requests, studio_script
from dalsegno.targets.hyperpod.training_plans import find_ends
from dalsegno.targets.hyperpod.workspace import find_or_create_workspace, remote_write, with_workspace, write_permission
from dalsegno.targets.machines import InstanceAction, MachineStatus
from dalsegno.targets.sides import (
    IMPORT_S,
    CommandsOnHead,
    OperatorSide,
    applied_cluster,
    as_user,
    at_terminal,
    homes_on_machines,
    import_on_head,
    known,
    named_sources,
)

Connect = Callable[[str], HyperPodApi]


class HyperPodTarget(OperatorSide):
    """The target on the operator's machine. One object stands for the cluster of one state folder."""

    kind = "hyperpod"
    times = TIMES
    folder: HyperPodFolder

    def __init__(
        self,
        folder: Path,
        connect: Connect = lambda region: HyperPodApi(BotoApi(region)),
        runner: Runner | None = None,
        pause: Pause | None = None,
        bundle: Callable[[], CodeBundle] = find_bundle,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = HyperPodFolder(folder)
        self._connect, self._runner = cache(connect), runner or LocalRunner()
        self._pause: Mapping[str, Pause] = {"pause": pause} if pause else {}
        self._bundle, self._clock = bundle, clock

    # Creating, changing and removing a cluster

    def plan(self, cluster: Cluster) -> HyperPodPlan:
        """Return the plan that turns the cluster into that of its file. Nothing is changed."""
        cluster = with_uids(cluster, self.folder)
        own, state = settings_of(cluster), read_hyperpod_state(self.folder)
        api = self._connect(own.region)
        found = api.find(cluster.name)
        if found is not None and state is None:
            raise TargetError(
                f"there is a HyperPod cluster `{cluster.name}` in {own.region}, which this machine did not create",
                hint="choose another name, or run the command on the machine that created it",
            )
        if state is not None and (state.region, state.bucket) != (own.region, own.bucket):
            raise TargetError(
                f"{cluster.name} is in {state.region} with the bucket {state.bucket}, and cannot move",
                hint=f"`dalsegno down {cluster.name}`, then `dalsegno up`",
            )
        shared, missing = self._shared(api, cluster, state)
        # The request is checked before anything is created. So a missing file system gets a sample address.
        samples = [SharedFileSystem(_SAMPLE.format(region=own.region), each.mount, "samples") for each in missing]
        request = update_request(cluster, found, (*shared, *samples)) if found else None
        check_request("sagemaker", "CreateCluster", create_request(cluster, [*shared, *samples]))
        if request:
            check_request("sagemaker", "UpdateCluster", request)
        ends = find_ends(api, cluster, self._clock())
        files = self._files(cluster, (*shared, *samples), state, ends)
        plan = make_plan(
            cluster, found, state, shared, missing, files, digests(files), read_prices(os.environ),
            new_bucket=not api.has_bucket(own.bucket),
            unfinished=state is not None and state.phase is not HyperPodStage.UP,
            tags=self._tags(api, cluster, found),
        )  # fmt: skip
        refuse_impossible(plan)
        return replace(plan, ends=ends)

    def _tags(self, api: HyperPodApi, cluster: Cluster, found: ClusterDescription | None) -> TagChange | None:
        present = api.tags(found.arn) if found else None
        return None if present is None else compare_tags(cluster, read_applied(self.folder), present)

    def _shared(
        self, api: HyperPodApi, cluster: Cluster, state: HyperPodState | None
    ) -> tuple[list[SharedFileSystem], list[Storage]]:
        """Return the file systems to mount, and the storage whose file system `up` must create or wait for."""
        found, missing = [], []
        for storage in cluster.storage:
            if storage.type not in ("lustre", "openzfs"):
                continue
            id = storage.source or (state.created_storage.get(storage.name, "") if state else "")
            existing = api.file_system(id) if id else None
            if storage.source and existing is None:
                raise TargetError(
                    f"there is no file system {storage.source} for storage `{storage.name}`",
                    hint="check its id and the region; `aws fsx describe-file-systems` lists them",
                )
            if existing is not None and existing.dns_name and (storage.source or (state and state.arn)):
                found.append(existing.mounted_at(storage.mount))
            else:
                missing.append(storage)
        return found, missing

    def _files(
        self,
        cluster: Cluster,
        shared: Sequence[SharedFileSystem],
        state: HyperPodState | None,
        ends: Mapping[str, float] | None = None,
    ) -> dict[str, bytes]:
        bundle, key = self._bundle(), read_public_key(settings_of(cluster).ssh_key)
        monitored = bool(state and state.monitored) or cluster.monitoring.prometheus
        code = BootstrapCode(CodeSource.BESIDE)
        if state:
            cluster = with_workspace(cluster, state.workspace, state.region)
        plans = {role: role_plan(cluster, role, bundle.key, key, monitored, ends) for role in ROLES}
        scripts = {role: render_bootstrap(plan, code, head=HEAD_ADDRESS) for role, plan in plans.items()}
        return lifecycle_files(cluster, shared, scripts, _without_time(bundle.archive()))

    def platform_files(self, cluster: Cluster) -> dict[str, str]:
        """Return the request for `aws sagemaker create-cluster`, the lifecycle scripts for `aws s3 sync`, and the
        script that attaches SageMaker Studio."""
        cluster = with_uids(cluster, self.folder)
        own = settings_of(cluster)
        sample = _SAMPLE.format(region=own.region)
        shared = [
            SharedFileSystem(sample, each.mount, "samples" if each.type == "lustre" else "")
            for each in cluster.storage
            if each.type in ("lustre", "openzfs")
        ]
        request = create_request(cluster, shared)
        check_request("sagemaker", "CreateCluster", request)
        scripts = self._files(cluster, shared, None)
        texts = {f"lifecycle/{name}": text.decode() for name, text in scripts.items() if not name.endswith(".gz")}
        studio = {"studio.sh": self._studio(cluster)} if own.subnets else {}
        return {"create-cluster.json": json.dumps(request, indent=1) + "\n", **studio, **texts}

    def _studio(self, cluster: Cluster) -> str:
        """Return the script that attaches SageMaker Studio, with the ids that the last `up` recorded."""
        state = read_hyperpod_state(self.folder)
        store = next((each for each in cluster.storage if each.type == "lustre"), None)
        id = (store.source or (state.created_storage.get(store.name, "") if state else "")) if store else ""
        users = [StudioUser(each.name, each.uid) for each in cluster.users] or [StudioUser(NO_USERS)]
        requests = studio_requests(cluster, users)
        for request in requests:
            check_request("sagemaker", request.operation, request.body)
        return studio_script(cluster, requests, id)

    def apply(self, plan: Plan, say: Say) -> None:
        if not isinstance(plan, HyperPodPlan):
            raise TypeError(f"not a plan of the hyperpod target: {plan!r}")
        if plan.empty:
            return
        own = settings_of(plan.cluster)
        api = self._connect(own.region)
        work = HyperPodWork(api, self.folder, say, **self._pause)
        write_uids(self.folder, plan.cluster)
        before = [] if plan.fresh else [each.id for each in api.instances(plan.cluster.name)]
        state = work.apply(plan, lambda cluster, shared: self._files(cluster, shared, plan.state, plan.ends))
        reached = self._write_ssh_config(api, plan.cluster.name, state, own.ssh_key)
        if state.stale:
            self._refresh([each for each in reached if each.instance.id in before], say)
            write_hyperpod_state(self.folder, replace(state, stale=False))

    def _write_ssh_config(self, api: HyperPodApi, name: str, state: HyperPodState, key: str) -> list[Reached]:
        found = api.find(name)
        reached = name_instances(api.instances(name), state.controller_group) if found else []
        if found:
            text = render_ssh_config(state.region, name, found.id, reached, key, self.folder)
            write_atomic(self.folder.ssh_config, text, 0o600)
        return reached

    def _refresh(self, reached: Sequence[Reached], say: Say) -> None:
        """Run the new lifecycle scripts on running instances. HyperPod itself runs them only on new instances."""
        commands = {each.names[0]: self._ssh(each.names[0], ["sudo", "dalsegno-refresh"]) for each in reached}
        refresh_machines(commands, lambda argv: self._runner.run(argv, timeout_s=REFRESH_S), say)

    def import_images(self, plan: Plan, say: Say) -> None:
        """Import the images of the cluster file on the controller, into the folder that all instances see."""

        def execute(argv: Sequence[str]) -> Completed:
            return self._runner.run(self._ssh("head", ["sudo", *argv]), timeout_s=IMPORT_S)

        import_on_head(applied_cluster(self.folder), plan.import_images, execute, say)

    def removal(self) -> Removal:
        state, jobs = read_hyperpod_state(self.folder), self.unfinished_jobs() if self._has_key() else ()
        if state is None:
            return Removal(jobs)
        applied = read_applied(self.folder)
        bucket = [f"bucket {state.bucket}"] if state.created_bucket else []
        kept = (*bucket, *named_sources(applied))
        homes = homes_on_machines(applied, "ubuntu")
        return Removal(jobs, homes, tuple(state.created_storage), kept, needs_yes=True)

    def destroy(self, say: Say) -> bool:
        state, found = read_hyperpod_state(self.folder), self.folder.root.exists()
        if state is not None:
            work = HyperPodWork(self._connect(state.region), self.folder, say, **self._pause)
            work.destroy(self.folder.name, state)
            if state.grafana:  # after the cluster, which costs far more if the stack cannot be deleted
                self.stop_grafana(say)
        remove_tree(self.folder.root)
        return found

    def resize(self, partition: str, nodes: int) -> None:
        """Change the number of a partition's nodes. HyperPod adds or removes instances in the background."""
        cluster, api = applied_cluster(self.folder), self._connect(self._known().region)
        own = settings_of(cluster)
        group = next((each for each in planned_groups(cluster) if each.partition == partition), None)
        if group is None:
            raise NotThere(f"there is no partition `{partition}` with nodes of its own", hint="`dalsegno status`")
        found = api.find(cluster.name)
        known = next((each for each in found.groups if each.name == group.name), None) if found else None
        changed = group_request(own, replace(group, count=nodes), known.mounts if known else ())
        api.update({"ClusterName": cluster.name, "InstanceGroups": [changed]})

    # Reading the cluster's state

    def status(self) -> ClusterStatus:
        state = read_hyperpod_state(self.folder)
        if state is None:
            return ClusterStatus(self.folder.name, "hyperpod", ClusterPhase.GONE, jobs=None)
        applied = read_applied(self.folder)
        try:
            api = self._connect(state.region)
            found = api.find(self.folder.name)
            reached = name_instances(api.instances(self.folder.name), state.controller_group) if found else []
        except DalsegnoError as error:
            return unanswered_status(self.folder.name, state, applied, error)
        slurm = self.slurm if found and self._has_key() else None
        return read_status(self.folder.name, state, applied, found, reached, slurm)

    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        return phase_of(read_hyperpod_state(self.folder))

    def machines(self) -> list[MachineStatus]:
        """Return every instance, with its state in HyperPod and, if ssh is set up, in Slurm."""
        return machine_rows(self._reached()[1], self.slurm if self._has_key() else None)

    def act_on_machines(self, action: InstanceAction, names: Sequence[str], *, through_api: bool) -> None:
        """Replace or reboot instances through Slurm.

        HyperPod's batch API is used instead if `through_api` is true, if the cluster has no SSH key, or if the name of
        an instance in Slurm is not known.
        """
        state = self._known()
        _, reached = self._reached()
        chosen = [find_instance(reached, name).instance for name in names]
        if heads := [each for each in chosen if each.group == state.controller_group]:
            raise TargetError(
                f"HyperPod does not {action.value} the controller ({heads[0].id})",
                hint="restart slurmctld on it: `dalsegno ssh head -- sudo systemctl restart slurmctld`",
            )
        if through_api or not self._has_key() or not all(each.host for each in chosen):
            api = self._connect(state.region)
            send = api.replace if action is InstanceAction.REPLACE else api.reboot
            refuse_failures(action.value, send(self.folder.name, [each.id for each in chosen]))
            return
        for each in chosen:
            self.slurm.scontrol(*repair_words(action, each.host))

    def replace(self, node: str) -> None:
        self.act_on_machines(InstanceAction.REPLACE, [node], through_api=False)

    def reboot(self, node: str) -> None:
        self.act_on_machines(InstanceAction.REBOOT, [node], through_api=False)

    def _reached(self) -> tuple[ClusterDescription, list[Reached]]:
        state = self._known()
        api = self._connect(state.region)
        found = api.find(self.folder.name)
        if found is None:
            raise NotThere(f"HyperPod has no cluster `{self.folder.name}`", hint="`dalsegno up` creates it")
        reached = name_instances(api.instances(self.folder.name), state.controller_group)
        return found, reached

    # Slurm and shells

    @property
    def slurm(self) -> SlurmClient:
        """A client that runs Slurm's commands on the controller."""
        return self._slurm()

    def slurm_as(self, user: str) -> SlurmClient:
        return self._slurm(["runuser", "-u", user, "--"])

    def _slurm(self, prefix: Sequence[str] = ()) -> SlurmClient:
        runner = CommandsOnHead(self._runner, lambda command: self._ssh("head", ["sudo", *command]))
        return SlurmClient(runner, {"PATH": PATH, "SLURM_CONF": CONF}, prefix=prefix, timeout_s=60)

    def _ssh(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on an instance and asks no questions."""
        return ssh_argv(self.folder.ssh_config, self.folder.name, name, command, batch=True)

    def slurm_runs(self) -> bool:
        return self._has_key()

    def _has_key(self) -> bool:
        applied = read_applied(self.folder)
        return bool(applied and settings_of(applied).ssh_key and self.folder.ssh_config.exists())

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        """Return ssh through SSM, or a plain SSM session if the cluster file has no `hyperpod.ssh_key`."""
        state, applied = self._known(), read_applied(self.folder)
        found, reached = self._reached()
        name = host or (f"{state.login_group}-1" if applied and applied.logins else "head")
        each = find_instance(reached, name)
        inner = as_user(command, user)
        if not self._has_key():
            return ShellEntry(session_argv(state.region, found.id, each.instance, inner), dict(env))
        self._write_config(found, reached)
        argv = ssh_argv(self.folder.ssh_config, self.folder.name, each.names[0], inner, terminal=at_terminal())
        return ShellEntry(argv, dict(env))

    def _write_config(self, found: ClusterDescription, reached: Sequence[Reached]) -> None:
        state, key = self._known(), settings_of(applied_cluster(self.folder)).ssh_key
        text = render_ssh_config(state.region, self.folder.name, found.id, reached, key, self.folder)
        write_atomic(self.folder.ssh_config, text, 0o600)

    def forward(self, arguments: Sequence[str], *, root: bool = False) -> ShellEntry | None:
        """Return how to run `dalsegno ARGUMENTS` on the controller. Return None for `monitor up`, `monitor down` and
        `nodes` (without `hostfile`), which work on this machine."""
        machines = arguments[0] == "nodes" and arguments[1:2] != ["hostfile"]
        if machines or tuple(arguments[:2]) in (("monitor", "up"), ("monitor", "down")):
            return None
        return super().forward(arguments, root=root)

    # Monitoring

    def switch_exporters(self, on: bool, say: Say) -> HyperPodPlan:
        """Switch exporters and Prometheus on or off; return the plan that changes the lifecycle scripts.

        If `on` is true and there is no workspace for the metrics yet, create one.
        """
        state, cluster = self._known(), applied_cluster(self.folder)
        if on and self.metrics_workspace() is None:
            pause = self._pause.get("pause", time.sleep)
            created = find_or_create_workspace(self._connect(state.region), cluster.name, pause, say)
            state = replace(state, workspace=created)
        write_hyperpod_state(self.folder, replace(state, monitored=on))
        return self.plan(cluster)

    def metrics_permission(self) -> str:
        return write_permission(settings_of(applied_cluster(self.folder)).execution_role)

    def metrics_workspace(self) -> RemoteWrite | None:
        state = self._known()
        return remote_write(applied_cluster(self.folder), state.workspace, state.region)

    def start_grafana(self, say: Say) -> str:
        state, workspace = self._known(), self.metrics_workspace()
        if workspace is None:
            raise TargetError("there is no workspace with metrics yet", hint="`dalsegno monitor up` creates one")
        template = grafana_template(applied_cluster(self.folder), workspace)

        def record() -> None:
            if not state.grafana:
                say(f"creating a {MACHINE} for Grafana, {price_text(read_prices(os.environ))}")
            write_hyperpod_state(self.folder, replace(state, grafana=True))  # so that `down` looks for the stack

        return connect_command(state.region, self._grafana(state, say).put(template, record))

    def stop_grafana(self, say: Say) -> bool:
        state = self._known()
        found = self._grafana(state, say).delete()
        write_hyperpod_state(self.folder, replace(state, grafana=False))
        return found

    def _grafana(self, state: HyperPodState, say: Say) -> GrafanaStack:
        pause = self._pause.get("pause", time.sleep)
        aws = self._connect(state.region).aws
        return GrafanaStack(aws, stack_name(self.folder.name), self.folder.operation_logs, say, pause)

    def _known(self) -> HyperPodState:
        return known(read_hyperpod_state(self.folder), self.folder)


_SAMPLE = "fs-00000000000000000.fsx.{region}.amazonaws.com"
# on_create.sh sets this variable from HyperPod's list of instances.
HEAD_ADDRESS = "printf '%s' \"${DALSEGNO_HEAD:-}\""


def _without_time(archive: bytes) -> bytes:
    """Return a gzip archive without its creation time, so that the same code always gives the same bytes."""
    return archive[:4] + bytes(4) + archive[8:]
