"""Carry out a plan for a cluster on ParallelCluster: key pair, stack, scripts, data repositories, then the cluster.

The state file is written before the first change, and each step can be repeated. So a second `up` completes what an
interrupted one began.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.setup.delivery import CodeBundle
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import write_atomic
from dalsegno.targets.base import Say
from dalsegno.targets.cloud.aws import create_bucket
from dalsegno.targets.cloud.progress import OperationState, follow
from dalsegno.targets.folder import write_applied
from dalsegno.targets.parallelcluster.client import Pcluster
from dalsegno.targets.parallelcluster.config import as_named_there, config_text, render_config
from dalsegno.targets.parallelcluster.connect import login_user
from dalsegno.targets.parallelcluster.data_repositories import DataRepositories
from dalsegno.targets.parallelcluster.folder import (
    PclusterFolder,
    PclusterStage,
    PclusterState,
    read_sent_config,
    read_state,
    write_state,
)
from dalsegno.targets.parallelcluster.plan import PclusterPlan
from dalsegno.targets.parallelcluster.prerequisites import Prerequisites, merge_outputs, settings_of, stack_name
from dalsegno.targets.parallelcluster.resources import AwsResources
from dalsegno.targets.parallelcluster.scripts import archive_key, bootstrap_scripts, digest_of


def private_key(folder: PclusterFolder, name: str) -> Path:
    """Return the file with the private key of a key pair: the file that `up` wrote, or else NAME.pem in ~/.ssh."""
    made = folder.key(name)
    return made if made.exists() else Path("~/.ssh").expanduser() / f"{name}.pem"


def next_state(
    folder: PclusterFolder, cluster: Cluster, known: Prerequisites, state: PclusterState | None
) -> PclusterState:
    """Return the state of a cluster that is about to be created or changed."""
    own = settings_of(cluster)
    return PclusterState(
        state.phase if state else PclusterStage.PREPARING,
        state.cluster_id if state else secrets.token_hex(8),
        own.region,
        own.version,
        stack_name(cluster.name),
        known.bucket or (state.bucket if state else ""),
        login_user(own.os),
        str(private_key(folder, own.key)) if own.key else "",
        state.scripts if state else "",
        state.file_systems if state else {},
        state.kept if state else {},
    )


class ApplyOnAws:
    """Carries out one plan, step by step."""

    def __init__(
        self,
        folder: PclusterFolder,
        aws: AwsResources,
        pcluster: Pcluster,
        say: Say,
        code: CodeBundle,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.aws, self.pcluster, self.say = folder, aws, pcluster, say
        self._code, self._pause = code, pause
        self.repositories = DataRepositories(aws.api, pause)

    def apply(self, plan: PclusterPlan, finish: Callable[[], None] = lambda: None) -> None:
        """Carry out the plan. `finish` is called when the cluster runs, before the cluster is recorded as complete."""
        cluster, own = plan.cluster, settings_of(plan.cluster)
        state = next_state(self.folder, cluster, plan.known, read_state(self.folder))
        state = replace(state, phase=PclusterStage.PREPARING if plan.fresh else PclusterStage.CHANGING)
        write_state(self.folder, state)  # written first, so that `down` and `status` find the cluster
        if plan.resumes:
            self._follow(plan.resumes)
        if plan.removes_failed:
            self._remove_failed(state)
        if plan.new_key:
            self.aws.create_key(own.key, self.folder.key(own.key))
            self.say(f"created key pair {own.key}; its private key is {self.folder.key(own.key)}")
            state = replace(state, key=str(self.folder.key(own.key)))
            write_state(self.folder, state)
        known, state = self._prepare(plan, state)
        state = self._upload(plan, replace(state, bucket=known.bucket))
        for bucket in plan.missing_buckets:
            self.say(f"creating bucket {bucket}")
            create_bucket(self.aws.api, bucket, own.region)
        for each in own.data_repositories:
            self.repositories.put(known.storage[each.storage], each, self.say)
        self._make(plan, known, state)
        finish()
        write_applied(self.folder, as_named_there(cluster))
        write_state(self.folder, replace(state, phase=PclusterStage.UP))

    def _follow(self, what: str) -> OperationState:
        return follow(what, self.pcluster.report, self.say, self.folder.logs, pause=self._pause).state

    def _prepare(self, plan: PclusterPlan, state: PclusterState) -> tuple[Prerequisites, PclusterState]:
        """Create or change the stack of prerequisites if the plan says so. Return the ids of all prerequisites, and the
        new state.

        File systems that leave the stack are recorded first, so that `down` keeps them even if this `up` is
        interrupted.
        """
        cluster = plan.cluster
        if not (plan.new_stack or plan.changed_stack):
            return plan.known, state
        state = replace(state, kept={**state.kept, **plan.leaving})
        write_state(self.folder, state)
        tags = {**settings_of(cluster).tags, "dalsegno:cluster": cluster.name}
        write_atomic(self.folder.template, json.dumps(plan.template, indent=1))
        stack = self.aws.put_stack(stack_name(cluster.name), plan.template, tags, self.say)
        own = stack.file_systems
        kept = {id: named for id, named in state.kept.items() if id not in own.values()}
        state = replace(state, file_systems=own, kept=kept)
        write_state(self.folder, state)
        return merge_outputs(plan.external, cluster, stack.outputs), state

    def _upload(self, plan: PclusterPlan, state: PclusterState) -> PclusterState:
        cluster, bundle = plan.cluster, self._code
        scripts = bootstrap_scripts(cluster, state, bundle.key, plan.ends)
        digest = digest_of(scripts)
        if digest == state.scripts:
            return state
        self.say("uploading the bootstrap scripts")
        # The archive with our code is uploaded before the scripts that name it, so that a machine that boots now finds
        # it.
        self.aws.upload(state.bucket, {archive_key(cluster.name, bundle.key): bundle.archive(), **scripts})
        state = replace(state, scripts=digest)
        write_state(self.folder, state)
        return state

    def _make(self, plan: PclusterPlan, known: Prerequisites, state: PclusterState) -> None:
        """Create or update the cluster, and wait until that operation ends.

        Do nothing if the cluster exists and this config is the one that was sent last.
        """
        cluster = plan.cluster
        config = render_config(cluster, known)
        there = self.pcluster.describe()
        if there is not None and config == read_sent_config(self.folder):
            return
        before = self.folder.config.read_text(encoding="utf-8") if self.folder.config.exists() else None
        write_atomic(self.folder.config, config_text(cluster, config), 0o600)
        try:
            if there is None:
                write_state(self.folder, replace(state, phase=PclusterStage.MAKING))
                self.pcluster.create(self.folder.config)
            else:
                self.pcluster.update(self.folder.config)
        except TargetError:
            self._keep_config(before)  # `pcluster` refused the new config, so the old one stays the one sent last
            raise
        try:
            ended = self._follow(f"{'update' if there else 'creation'} of {cluster.name}")
        except TargetError:
            self.pcluster.export_logs(state.bucket, self.folder.logs / "cluster-logs.tar.gz")
            raise
        if ended is OperationState.GONE:
            raise TargetError(f"{cluster.name} was deleted while `up` ran", hint="`dalsegno up` creates it again")
        if plan.fleet_stopped:
            self.pcluster.start_fleet()

    def _keep_config(self, before: str | None) -> None:
        if before is None:
            self.folder.config.unlink()
        else:
            write_atomic(self.folder.config, before, 0o600)

    def _remove_failed(self, state: PclusterState) -> None:
        if state.bucket:
            self.pcluster.export_logs(state.bucket, self.folder.logs / "cluster-logs.tar.gz")
        self.say("deleting what a failed creation or deletion left")
        if self.pcluster.delete():
            self._follow(f"deletion of {self.pcluster.name}")
        self.folder.config.unlink(missing_ok=True)
