"""Find out what a change of cluster.yaml does to a running cluster, from ParallelCluster's update policy for each
setting.

update_policies.csv has the policies of version 3.16.1, taken from its schema. A test compares the file with the schema.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from dalsegno.targets.cloud.consequences import ChangeEffect, SettingChange, compare_settings, show_setting

_NAMED = re.compile(r"\[[^\]]*\]")


class UpdatePolicy(Enum):
    """ParallelCluster's rule for when a setting may change. UNSUPPORTED means that it cannot change."""

    SUPPORTED = "SUPPORTED"
    SUPPORTED_UNLESS_ADC = "SUPPORTED_UNLESS_ADC"
    IGNORED = "IGNORED"
    QUEUE_UPDATE_STRATEGY = "QUEUE_UPDATE_STRATEGY"
    MANAGED_PLACEMENT_GROUP = "MANAGED_PLACEMENT_GROUP"
    MANAGED_FSX = "MANAGED_FSX"
    RESIZE_UPDATE_STRATEGY_ON_REMOVE = "RESIZE_UPDATE_STRATEGY_ON_REMOVE"
    COMPUTE_FLEET_STOP = "COMPUTE_FLEET_STOP"
    COMPUTE_FLEET_STOP_ON_REMOVE = "COMPUTE_FLEET_STOP_ON_REMOVE"
    COMPUTE_AND_LOGIN_NODES_STOP = "COMPUTE_AND_LOGIN_NODES_STOP"
    LOGIN_NODES_STOP = "LOGIN_NODES_STOP"
    LOGIN_NODES_POOL_STOP = "LOGIN_NODES_POOL_STOP"
    LOGIN_NODES_POOLS = "LOGIN_NODES_POOLS_UPDATE_POLICY"
    SHARED_STORAGE = "SHARED_STORAGE_UPDATE_POLICY"
    READ_ONLY_RESOURCE_BUCKET = "READ_ONLY_RESOURCE_BUCKET"
    UNSUPPORTED = "UNSUPPORTED"


@cache
def policies() -> Mapping[str, UpdatePolicy]:
    """Return the update policy of each setting. A setting is identified by its path, without the names of list
    entries."""
    text = Path(__file__).with_name("update_policies.csv").read_text(encoding="utf-8")
    rows = (line.split(",") for line in text.splitlines()[1:])
    return {path: UpdatePolicy(policy) for path, policy in rows}


def policy_of(path: str) -> UpdatePolicy:
    """Return the policy of a setting: its own, or else that of the nearest setting above it, or else UNSUPPORTED."""
    plain = _NAMED.sub("", path).replace("/Sequence", "")
    while plain:
        if plain in policies():
            return policies()[plain]
        plain = plain.rpartition("/")[0]
    return UpdatePolicy.UNSUPPORTED


_BY_STRATEGY = {
    "DRAIN": ChangeEffect.AS_JOBS_END,
    "TERMINATE": ChangeEffect.ENDS_JOBS,
    "COMPUTE_FLEET_STOP": ChangeEffect.STOPS_NODES,
}
_STOPS = {
    UpdatePolicy.COMPUTE_FLEET_STOP,
    UpdatePolicy.COMPUTE_AND_LOGIN_NODES_STOP,
    UpdatePolicy.LOGIN_NODES_STOP,
    UpdatePolicy.LOGIN_NODES_POOL_STOP,
    UpdatePolicy.MANAGED_PLACEMENT_GROUP,
}


def find_changes(old: Mapping[str, Any], new: Mapping[str, Any], strategy: str) -> tuple[SettingChange, ...]:
    """Return the differences between two configs, with the effect of each on a running cluster."""
    return tuple(
        SettingChange(path, show_setting(before), show_setting(after), *_effect(path, before, after, strategy))
        for path, before, after in compare_settings(_with_storage(old), _with_storage(new))
    )


def _with_storage(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that has a list of storage, even an empty one.

    Without a list, the first or the last storage would appear as a change of the whole list, not of one entry.
    """
    return {**config, "SharedStorage": config.get("SharedStorage") or []}


def _effect(path: str, old: object, new: object, strategy: str) -> tuple[ChangeEffect, str]:
    policy, by_strategy = policy_of(path), _BY_STRATEGY[strategy]
    if path.startswith("SharedStorage[") and (old is None or new is None):
        return _storage_effect(old, new, by_strategy)
    if policy is UpdatePolicy.RESIZE_UPDATE_STRATEGY_ON_REMOVE:
        return (by_strategy, "") if _shrinks(old, new) else (ChangeEffect.IN_PLACE, "")
    if policy is UpdatePolicy.COMPUTE_FLEET_STOP_ON_REMOVE:
        return (ChangeEffect.STOPS_NODES, "") if _shrinks(old, new) else (ChangeEffect.IN_PLACE, "")
    if policy in (UpdatePolicy.QUEUE_UPDATE_STRATEGY, UpdatePolicy.MANAGED_FSX):
        return by_strategy, ""
    if policy in _STOPS:
        return ChangeEffect.STOPS_NODES, ""
    if policy in (UpdatePolicy.UNSUPPORTED, UpdatePolicy.READ_ONLY_RESOURCE_BUCKET):
        return ChangeEffect.NEEDS_NEW_CLUSTER, "`dalsegno down`, then `dalsegno up`; storage with a `source` stays"
    return ChangeEffect.IN_PLACE, ""


def _storage_effect(old: object, new: object, by_strategy: ChangeEffect) -> tuple[ChangeEffect, str]:
    if new is not None:
        return by_strategy, "it is mounted on new nodes"
    settings = [each for each in old.values() if isinstance(each, dict)] if isinstance(old, dict) else []
    if any(each.get("DeletionPolicy") == "Retain" for each in settings):
        kept = "ParallelCluster keeps it with its files, and AWS bills it until you delete it in the console"
        return by_strategy, f"it is unmounted everywhere; {kept}"
    ids = ", ".join(str(id) for each in settings for key, id in each.items() if key.endswith("Id"))
    return by_strategy, f"it is unmounted everywhere; {ids or 'it'} stays with its files"


def _shrinks(old: object, new: object) -> bool:
    """Return whether a number gets smaller, or an entry is removed."""
    if isinstance(old, int) and isinstance(new, int):
        return new < old
    return new is None
