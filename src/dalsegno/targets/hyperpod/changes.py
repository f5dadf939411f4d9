"""Compare a running HyperPod cluster with its file, and build the request that changes it. Pure.

AWS documents that UpdateCluster can change the number of a group's instances, the address of its lifecycle scripts, and
its training plan. The other settings of a group are fixed when the group is created. A change of such a setting is
refused, and the error says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dalsegno.spec.facts import Cluster
from dalsegno.spec.platform_facts import HyperPodFacts
from dalsegno.targets.cloud.consequences import ChangeEffect, SettingChange
from dalsegno.targets.hyperpod.answers import ClusterDescription, GroupDescription, SharedFileSystem, SlurmRole
from dalsegno.targets.hyperpod.requests import (
    GroupRequest,
    entry_moment,
    group_request,
    planned_groups,
    settings_of,
    wanted_tags,
)

NEW_GROUP = "give the partition another name, so that it becomes a new instance group"
NEW_CLUSTER = "`dalsegno down`, then `dalsegno up` creates the cluster with it; or restore the old value"


@dataclass(frozen=True)
class TagChange:
    """The tags to set, and the tags of the last `up` to remove. Other tags are kept."""

    set: Mapping[str, str]
    remove: tuple[str, ...] = ()
    old: Mapping[str, str] = field(default_factory=dict)  # all tags that the cluster has


def compare_tags(cluster: Cluster, applied: Cluster | None, present: Mapping[str, str]) -> TagChange:
    """Return the difference between the tags of the cluster and those of its file. `applied` is the file of the last
    `up`."""
    wanted = wanted_tags(cluster)
    missing = {key: value for key, value in wanted.items() if present.get(key) != value}
    ours = wanted_tags(applied) if applied else {}
    return TagChange(missing, tuple(key for key in ours if key in present and key not in wanted), present)


def update_request(
    cluster: Cluster, found: ClusterDescription, shared: tuple[SharedFileSystem, ...]
) -> dict[str, Any] | None:
    """Return the UpdateCluster request; None if it would change nothing.

    HyperPod mounts the file systems in `shared` on instances of new groups. On existing groups, the lifecycle script
    mounts those that HyperPod does not mount there yet.
    """
    own = settings_of(cluster)
    known = {group.name: group for group in found.groups}
    wanted = planned_groups(cluster)
    changed = [
        group_request(own, each, known[each.name].mounts if each.name in known else shared)
        for each in wanted
        if each.name not in known or any(_group_changes(own, each, known[each.name]))
    ]
    leaving = [name for name in known if name not in {each.name for each in wanted}]
    strategy = _strategy_changes(own, found)
    request: dict[str, Any] = {"ClusterName": cluster.name}
    if changed:
        request["InstanceGroups"] = changed
    if leaving:
        request["InstanceGroupsToDelete"] = leaving
    if found.node_recovery and found.node_recovery != own.node_recovery:
        request["NodeRecovery"] = own.node_recovery
    if own.configuration == "api" and (changed or strategy):
        request["Orchestrator"] = {"Slurm": {"SlurmConfigStrategy": own.config_strategy}}
    return request if len(request) > 1 else None


def find_changes(
    cluster: Cluster, found: ClusterDescription, tags: TagChange | None = None
) -> tuple[SettingChange, ...]:
    """Return the differences between a running cluster and its file, with the effect of each."""
    return tuple(_changes(cluster, found, tags))


def _changes(cluster: Cluster, found: ClusterDescription, tags: TagChange | None) -> Iterator[SettingChange]:
    own = settings_of(cluster)
    wanted, known = {each.name: each for each in planned_groups(cluster)}, {each.name: each for each in found.groups}
    for name, group in wanted.items():
        if name in known:
            yield from _group_changes(own, group, known[name])
        else:
            new = f"{group.count} x {group.instance_type}"
            yield SettingChange(f"instance group {name}", "", new, ChangeEffect.IN_PLACE)
    for name, old in known.items():
        if name not in wanted:
            size = f"{old.current_count} x {old.instance_type}"
            detail = "ends the jobs on them; the files on their local disks are lost"
            yield SettingChange(f"instance group {name}", size, "", ChangeEffect.LOSES_DATA, detail)
    if found.node_recovery and found.node_recovery != own.node_recovery:
        yield SettingChange("NodeRecovery", found.node_recovery, own.node_recovery, ChangeEffect.IN_PLACE)
    yield from _network_changes(own, found)
    if _strategy_changes(own, found):
        old_strategy = found.config_strategy
        yield SettingChange("SlurmConfigStrategy", old_strategy, own.config_strategy, ChangeEffect.IN_PLACE)
    if tags:
        for key in (*tags.set, *tags.remove):
            yield SettingChange(f"tag {key}", tags.old.get(key, ""), tags.set.get(key, ""), ChangeEffect.IN_PLACE)


def _network_changes(own: HyperPodFacts, found: ClusterDescription) -> Iterator[SettingChange]:
    for name, old, new in (
        ("subnets", found.subnets, own.subnets),
        ("security groups", found.security_groups, own.security_groups),
    ):
        if set(old) != set(new):
            effect = ChangeEffect.NEEDS_NEW_CLUSTER
            yield SettingChange(name, ", ".join(old), ", ".join(new), effect, NEW_CLUSTER)


def _strategy_changes(own: HyperPodFacts, found: ClusterDescription) -> bool:
    return own.configuration == "api" and found.config_strategy not in ("", own.config_strategy)


def _group_changes(own: HyperPodFacts, wanted: GroupRequest, found: GroupDescription) -> Iterator[SettingChange]:
    name = f"instance group {wanted.name}"
    yield from _fixed_settings(own, wanted, found)
    if found.target_count < wanted.count:
        yield SettingChange(f"{name}: nodes", str(found.target_count), str(wanted.count), ChangeEffect.IN_PLACE)
    if found.target_count > wanted.count:
        detail = "HyperPod chooses the nodes that leave; their jobs end, and their local files are lost"
        effect = ChangeEffect.LOSES_DATA
        yield SettingChange(f"{name}: nodes", str(found.target_count), str(wanted.count), effect, detail)
    if found.source_uri and found.source_uri != own.source_uri:
        detail = "running nodes keep what the old scripts did"
        yield SettingChange(f"{name}: scripts", found.source_uri, own.source_uri, ChangeEffect.IN_PLACE, detail)
    if found.training_plan != wanted.own.training_plan:
        plan = wanted.own.training_plan
        yield SettingChange(f"{name}: training plan", found.training_plan, plan, ChangeEffect.IN_PLACE)


def _fixed_settings(own: HyperPodFacts, wanted: GroupRequest, found: GroupDescription) -> Iterator[SettingChange]:
    """Yield the changes of settings that are fixed when HyperPod creates a group."""
    threads = wanted.own.threads_per_core or 1
    instead = NEW_GROUP if wanted.role is SlurmRole.COMPUTE else NEW_CLUSTER
    fixed = (  # a setting, its old and its new value, and what to do instead
        ("instance type", found.instance_type, wanted.instance_type, instead),
        ("threads per core", str(found.threads_per_core or threads), str(threads), instead),
        ("subnets", ", ".join(sorted(found.subnets)), ", ".join(sorted(wanted.own.subnets)), instead),
        ("volume", _gib(found.volume_gib), _gib(own.volume_gib), NEW_CLUSTER),
        ("execution role", found.execution_role or own.execution_role, own.execution_role, NEW_CLUSTER),
        ("lifecycle script", found.entry or entry_moment(own), entry_moment(own), NEW_CLUSTER),
    )
    for setting, old, new, detail in fixed:
        if old != new:
            path = f"instance group {wanted.name}: {setting}"
            yield SettingChange(path, old, new, ChangeEffect.NEEDS_NEW_CLUSTER, detail)


def _gib(size: int | None) -> str:
    return f"{size} GiB" if size else ""
