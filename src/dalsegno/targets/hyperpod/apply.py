"""Carry out a HyperPod plan: create the bucket, file systems, scripts and cluster.

`destroy` removes everything except the bucket.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import make_folder
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.credentials import CloudError
from dalsegno.targets.cloud.progress import OperationReport, OperationState, ResourceEvent, ResourceEventKind, follow
from dalsegno.targets.folder import write_applied
from dalsegno.targets.hyperpod.answers import (
    ClusterDescription,
    HyperPodStatus,
    InstanceInfo,
    InstanceStatus,
    SharedFileSystem,
    SlurmRole,
)
from dalsegno.targets.hyperpod.api import FileSystem, FileSystemState, HyperPodApi
from dalsegno.targets.hyperpod.changes import update_request
from dalsegno.targets.hyperpod.folder import HyperPodFolder, HyperPodStage, HyperPodState, write_hyperpod_state
from dalsegno.targets.hyperpod.lifecycle import digests
from dalsegno.targets.hyperpod.plan import HyperPodPlan
from dalsegno.targets.hyperpod.requests import create_request, settings_of

Pause = Callable[[float], None]
MOST_LOGS = 20  # maximum number of instances whose logs are kept
_EVENTS = {
    InstanceStatus.RUNNING: ResourceEventKind.DONE,
    InstanceStatus.FAILURE: ResourceEventKind.FAILED,
    InstanceStatus.PENDING: ResourceEventKind.STARTED,
    InstanceStatus.SYSTEM_UPDATING: ResourceEventKind.STARTED,
    InstanceStatus.DEEP_HEALTH_CHECK: ResourceEventKind.STARTED,
}
Files = Callable[[Cluster, "tuple[SharedFileSystem, ...]"], Mapping[str, bytes]]


@dataclass(frozen=True)
class HyperPodWork:
    """Carries out one `up` or `down`."""

    api: HyperPodApi
    folder: HyperPodFolder
    say: Say
    pause: Pause = time.sleep

    def apply(self, plan: HyperPodPlan, files: Files) -> HyperPodState:
        """Carry out the plan, and return the new state.

        When all file systems exist, `files` is called to make the lifecycle files. The state is written after each
        step, so that the next `up` continues from there.
        """
        own = settings_of(plan.cluster)
        state = plan.state or HyperPodState(
            HyperPodStage.MAKING, own.region, own.bucket, own.prefix,
            controller_group=own.controller_group, login_group=own.login_group,
        )  # fmt: skip
        stage = HyperPodStage.MAKING if plan.fresh else HyperPodStage.CHANGING
        state = self._save(replace(state, phase=stage, controller_group=own.controller_group))
        if plan.resumes:
            self._follow(plan.cluster.name, "HyperPod's operation")
        if plan.recreates or plan.deleting:
            self.delete(plan.cluster.name)
        if plan.new_bucket:
            self.say(f"creating the bucket {own.bucket}")
            self.api.create_bucket(own.bucket, own.region)
            state = self._save(replace(state, created_bucket=True))
        state, shared = self._file_systems(plan, state)
        state = self._upload(plan, state, files(plan.cluster, shared))
        state = self._change_cluster(plan, state, shared)
        write_applied(self.folder, plan.cluster)
        return self._save(replace(state, phase=HyperPodStage.UP))

    def _save(self, state: HyperPodState) -> HyperPodState:
        write_hyperpod_state(self.folder, state)
        return state

    def _file_systems(
        self, plan: HyperPodPlan, state: HyperPodState
    ) -> tuple[HyperPodState, tuple[SharedFileSystem, ...]]:
        own, made = settings_of(plan.cluster), []
        for storage in plan.new_storage:
            id = state.created_storage.get(storage.name)
            if id is None:
                self.say(f"creating FSx for Lustre {storage.name}")
                found = self.api.create_lustre(storage, plan.cluster.name, own.subnets[0], own.security_groups)
                id = found.id
                state = self._save(replace(state, created_storage={**state.created_storage, storage.name: id}))
            made.append(self._wait_for_storage(storage.name, id).mounted_at(storage.mount))
        return state, (*plan.shared, *made)

    def _wait_for_storage(self, name: str, id: str) -> FileSystem:
        def poll() -> OperationReport:
            found = self.api.file_system(id)
            if found is None:
                return OperationReport(OperationState.FAILED, message=f"{id} does not exist any more")
            states = {FileSystemState.AVAILABLE: OperationState.DONE, FileSystemState.FAILED: OperationState.FAILED}
            return OperationReport(states.get(found.state, OperationState.RUNNING), message=found.message)

        follow(f"the creation of file system {name}", poll, self.say, self.folder.operation_logs, pause=self.pause)
        found = self.api.file_system(id)
        if found is None:
            raise TargetError(f"file system {id} does not exist any more", hint="run `dalsegno up` again")
        return found

    def _upload(self, plan: HyperPodPlan, state: HyperPodState, files: Mapping[str, bytes]) -> HyperPodState:
        own, new = settings_of(plan.cluster), digests(files)
        changed = {name: files[name] for name, digest in new.items() if state.uploaded.get(name) != digest}
        gone = [name for name in state.uploaded if name not in new]
        if changed:
            self.say(f"uploading {len(changed)} files to {own.source_uri}")
            self.api.upload(own.bucket, own.prefix, changed)
        self.api.remove_uploads(own.bucket, own.prefix, gone)
        make_folder(self.folder.scripts, 0o700)
        for name, content in files.items():
            (self.folder.scripts / name).write_bytes(content)
        stale = not plan.fresh and bool(own.ssh_key) and (state.stale or bool(changed))
        return self._save(replace(state, uploaded=new, stale=stale))

    def _change_cluster(
        self, plan: HyperPodPlan, state: HyperPodState, shared: tuple[SharedFileSystem, ...]
    ) -> HyperPodState:
        name = plan.cluster.name
        if plan.fresh:
            self.say(f"creating cluster {name}")
            state = self._save(replace(state, arn=self.api.create(create_request(plan.cluster, shared))))
            self._follow(name, f"the creation of {name}")
            return state
        found = self.api.find(name)
        request = update_request(plan.cluster, found, shared) if found else None
        if request is not None:
            self.say(f"changing cluster {name}")
            self.api.update(request)
            self._follow(name, f"the change of {name}")
        if found is not None and plan.tags is not None:
            self.api.change_tags(found.arn, plan.tags)
        return state

    def _follow(self, name: str, what: str) -> None:
        """Wait until HyperPod's operation ends. If an instance fails, report it at once, with HyperPod's message."""
        follow(what, lambda: self._report(name), self.say, self.folder.operation_logs, pause=self.pause)

    def _report(self, name: str) -> OperationReport:
        found = self.api.find(name)
        if found is None:
            return OperationReport(OperationState.FAILED, message="the cluster does not exist any more")
        instances = self.api.instances(name)
        events = tuple(_event(each) for each in instances if each.status in _EVENTS)
        if found.status.moving:
            return OperationReport(OperationState.RUNNING, events)
        if found.status is not HyperPodStatus.FAILED:
            return OperationReport(OperationState.DONE, events)
        logs = self._lifecycle_logs(found, instances)
        message = found.failure or "HyperPod gave no reason; the logs of the lifecycle scripts may have it"
        return OperationReport(OperationState.FAILED, events, message, logs)

    def _lifecycle_logs(
        self, found: ClusterDescription, instances: Sequence[InstanceInfo]
    ) -> tuple[tuple[str, str], ...]:
        """Return up to MOST_LOGS logs of the lifecycle scripts with their file names, first those of failed instances.

        If CloudWatch refuses them, tell the user and return none.
        """
        try:
            streams = self.api.log_streams(found.log_group)
            failed = {each.id for each in instances if each.status is InstanceStatus.FAILURE}
            chosen = sorted(streams, key=lambda each: each.rpartition("/")[2] not in failed)[:MOST_LOGS]
            return tuple((log_file(each), self.api.log_text(found.log_group, each)) for each in chosen)
        except CloudError as error:
            self.say(f"the logs of the lifecycle scripts are only in CloudWatch: {error.what}")
            return ()

    def delete(self, name: str) -> bool:
        """Delete the cluster and wait until it no longer exists. Return False if it did not exist."""
        found = self.api.find(name)
        if found is None:
            return False
        if found.status is not HyperPodStatus.DELETING:
            if found.status.moving:
                self.say("waiting for HyperPod's operation to end")
                self._wait_until_still(name)
            self.say(f"deleting cluster {name}")
            self.api.delete(name)
        follow(
            f"the deletion of {name}", lambda: self._deletion(name), self.say, self.folder.operation_logs,
            pause=self.pause,
        )  # fmt: skip
        return True

    def _wait_until_still(self, name: str) -> None:
        while (found := self.api.find(name)) is not None and found.status.moving:
            self.pause(15.0)

    def _deletion(self, name: str) -> OperationReport:
        found = self.api.find(name)
        if found is None:
            return OperationReport(OperationState.DONE)
        failed = found.status is HyperPodStatus.FAILED
        return OperationReport(OperationState.FAILED if failed else OperationState.RUNNING, message=found.failure)

    def destroy(self, name: str, state: HyperPodState) -> None:
        """Remove everything that `up` created, except the bucket, which may contain files of others."""
        state = self._save(replace(state, phase=HyperPodStage.REMOVING))
        self.delete(name)
        for storage, id in state.created_storage.items():
            self.say(f"deleting file system {storage} ({id})")
            self.api.delete_file_system(id)
        self.api.remove_uploads(state.bucket, state.prefix, list(state.uploaded))


def log_file(stream: str) -> str:
    """Return the name of the file for a log stream such as `LifecycleConfig/GROUP/INSTANCE`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stream).strip("-.") + ".log"


def _event(instance: InstanceInfo) -> ResourceEvent:
    kind = _EVENTS[instance.status]
    name = f"{instance.group} {instance.id} ({instance.instance_type})"
    return ResourceEvent(f"{instance.id} {instance.status.value}", name, kind, instance.message)


def read_public_key(path: str) -> str:
    """Return the public key that may log in; "" if the cluster file names no key file. Raise an error if the file has
    no public key."""
    if not path:
        return ""
    hint = "create one with `ssh-keygen -t ed25519`, or leave `hyperpod.ssh_key` out"
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"the public key {path} cannot be read: {error}", hint=hint) from None
    if not text.startswith(("ssh-", "ecdsa-", "sk-")) or "\n" in text:
        raise TargetError(f"{path} is not a public key", hint=hint)
    return text


ROLES = tuple(SlurmRole)
