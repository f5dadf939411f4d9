"""The collector for problems, and the checks of names, health checks, monitoring and raw Slurm settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dalsegno.hardware import did_you_mean
from dalsegno.spec.document import Document, KeyPath
from dalsegno.spec.health import CHECK_THRESHOLDS, SWITCHES, CheckSpec, HealthSpec
from dalsegno.spec.layout import login_nodes, own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec, PartitionSpec
from dalsegno.spec.section import Section, place
from dalsegno.spec.slurm import OWNED, OWNED_IN_PARTITION


class Problems:
    """Collects problems with their lines. Problems about values that were removed as invalid are dropped."""

    def __init__(self, document: Document, cut: set[KeyPath], written: Any = None) -> None:
        self._document = document
        self._written = written  # the file's values before anything was removed
        self._cut = cut
        self._around = {path[:length] for path in cut for length in range(len(path) + 1)}

    def add(self, section: Section, field: str, what: str, hint: str = "", reads: tuple[str, ...] = ()) -> None:
        """Add a problem at `field` of a section, unless this field or a field in `reads` is itself invalid."""
        here = place(section)
        if all(self.whole(*here, name) for name in (field, *reads)):
            self._document.problems.append(self._document.problem(what, (*here, *field.split(".")), hint))

    def whole(self, *path: str | int) -> bool:
        """Return whether the value at `path` is complete: no part and no parent of it was removed as invalid."""
        outside = any(path[:length] in self._cut for length in range(len(path) + 1))
        return not outside and path not in self._around

    def complete(self, *path: str | int) -> bool:
        """Return whether the list at `path` has all its entries. Values inside the entries may be missing."""
        return not any(cut[: len(path)] == path and len(cut) <= len(path) + 1 for cut in self._cut)

    def unnamed(self, name: str, *path: str) -> bool:
        """Return whether no entry of the list at `path` can have this name.

        Entries that were removed as invalid count too. An entry whose name is invalid can have any name.
        """
        entries = self._written
        for key in path:
            entries = entries.get(key) if isinstance(entries, dict) else None
        if not isinstance(entries, list):
            return entries is None
        names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
        return all(isinstance(one, str) and one.lower() != name.lower() for one in names)

    def line(self, section: Section, field: str = "name") -> int:
        """Return the line of a field, for a message that refers to a second line."""
        return self._document.line((*place(section), field))


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class _NameOwner:
    """The machine or partition that a node name belongs to. `partition` is "" for the head and login nodes."""

    text: str
    partition: str = ""


def check_duplicates(spec: ClusterSpec, report: Problems) -> None:
    """Check for duplicate partitions, nodes, QOS, accounts, users, groups, ids, storage, reservations, switches."""
    _names(spec.partitions, "partition", report)
    _names(spec.slurm.qos, "qos", report)
    _names(spec.accounts, "account", report)
    _names(spec.users, "user", report)
    _names(spec.groups, "group", report)
    _names(spec.storage, "storage", report)
    _names(spec.reservations, "reservation", report)
    if spec.slurm.topology:
        _names(spec.slurm.topology.switches, "switch", report)
    _user_ids(spec, report)
    _group_ids(spec, report)
    _nodes(spec, report)


def _names(sections: Sequence[_Named], noun: str, report: Problems) -> None:
    first: dict[str, Section] = {}
    for section in sections:
        assert isinstance(section, Section)
        if section.name in first:
            line = report.line(first[section.name])
            what = f"{noun} `{section.name}` is defined twice, first on line {line}"
            report.add(section, "name", what, "give one of them another name")
        first.setdefault(section.name, section)


def _user_ids(spec: ClusterSpec, report: Problems) -> None:
    owner: dict[int, str] = {}
    for user in spec.users:
        if user.uid is not None and owner.setdefault(user.uid, user.name) != user.name:
            what = f"users `{owner[user.uid]}` and `{user.name}` have the same uid {user.uid}"
            report.add(user, "uid", what, "give one of them another uid, or leave it out")


def _group_ids(spec: ClusterSpec, report: Problems) -> None:
    users, owner = {user.name for user in spec.users}, dict[int, str]()
    for group in spec.groups:
        if group.name in users:
            what = f"group `{group.name}` has the name of a user, who has a group of that name already"
            report.add(group, "name", what, "give the group another name")
        if group.gid is not None and owner.setdefault(group.gid, group.name) != group.name:
            what = f"groups `{owner[group.gid]}` and `{group.name}` have the same gid {group.gid}"
            report.add(group, "gid", what, "give one of them another gid, or leave it out")


def _nodes(spec: ClusterSpec, report: Problems) -> None:
    owner = {spec.head.name: _NameOwner("the head node")} | dict.fromkeys(login_nodes(spec), _NameOwner("a login node"))
    if spec.head.name in login_nodes(spec):
        report.add(spec.login, "names", f"the head node and a login node are both named `{spec.head.name}`")
    for partition in spec.partitions:
        taken = _first_taken(partition, owner)
        # In an existing cluster, a node may be in several partitions, and the head node may be in partitions.
        if taken and spec.target == "existing":
            taken = None
        if taken and owner[taken].partition != partition.name:
            also = "is also in" if owner[taken].partition else "has the name of"
            what = f"node `{taken}` of partition `{partition.name}` {also} {owner[taken].text}"
            report.add(partition, "nodes", what, _hint(owner[taken]), reads=("name", "spares"))
        for name in (*own_nodes(partition), *own_spares(partition)):
            owner.setdefault(name, _NameOwner(f"partition `{partition.name}`", partition.name))
        _within(partition, report)


def _first_taken(partition: PartitionSpec, owner: Mapping[str, _NameOwner]) -> str | None:
    return next((name for name in (*own_nodes(partition), *own_spares(partition)) if name in owner), None)


def _hint(owner: _NameOwner) -> str:
    if owner.partition:
        return f"to share machines write `nodes_from: {owner.partition}` instead of `nodes`"
    return "give the partition or the machine another name"


def _within(partition: PartitionSpec, report: Problems) -> None:
    names = own_nodes(partition) + own_spares(partition)
    if len(set(names)) < len(names):
        again = next(name for at, name in enumerate(names) if name in names[:at])
        what = f"partition `{partition.name}` names the node `{again}` twice"
        report.add(partition, "nodes", what, "keep one", reads=("spares",))


def check_health(spec: ClusterSpec, report: Problems) -> None:
    """Check the names of checks, thresholds and partitions, because a misspelt one would silently have no effect."""
    _armed(spec, report)
    for name, check in spec.health.checks.items():
        if name in SWITCHES:
            if check != CheckSpec(enabled=check.enabled):
                what = f"the check `{name}` can only be switched on or off"
                report.add(spec.health, f"checks.{name}", what, f"write `{name}: off`, or leave it out")
        elif name not in CHECK_THRESHOLDS:
            hint = did_you_mean(name, (*CHECK_THRESHOLDS, *SWITCHES), "`dalsegno health --list` lists the checks")
            report.add(spec.health, f"checks.{name}", f"there is no health check `{name}`", hint)
        else:
            _thresholds(spec.health, name, check, report)


def _armed(spec: ClusterSpec, report: Problems) -> None:
    health, names = spec.health, [partition.name for partition in spec.partitions]
    for name in health.armed:
        if name not in names and report.unnamed(name, "partitions"):
            what = f"`health.armed` names `{name}`, which is not a partition"
            report.add(health, "armed", what, did_you_mean(name, names, f"partitions: {', '.join(names)}"))
    if health.armed and health.mode != "observe" and report.whole("health", "mode"):
        what = f"`health.armed` has no effect with `mode: {health.mode}`"
        report.add(health, "armed", what, "write `mode: observe`, or leave it out", reads=("mode",))
    if spec.target == "existing" and health.mode == "auto" and report.whole("health", "mode"):
        what = "`health.mode` cannot be `auto` on a cluster that Dal Segno did not create"
        report.add(health, "mode", what, "write `mode: observe`, and name partitions under `armed`")


def _thresholds(health: HealthSpec, name: str, check: CheckSpec, report: Problems) -> None:
    known = CHECK_THRESHOLDS[name]
    for threshold in check.thresholds:
        if threshold not in known:
            what = f"health check `{name}` has no threshold `{threshold}`"
            listed = f"it has {', '.join(known)}" if known else "it has none"
            report.add(health, f"checks.{name}.thresholds.{threshold}", what, did_you_mean(threshold, known, listed))


def check_monitoring(spec: ClusterSpec, report: Problems) -> None:
    """Check that Prometheus has metrics to read, and that every receiver of alerts is complete."""
    monitoring = spec.monitoring
    if monitoring.prometheus and not monitoring.enabled:
        what = "`prometheus` is on, but the metrics that it reads are turned off"
        report.add(monitoring, "prometheus", what, "remove `enabled: false`, or `prometheus`", reads=("enabled",))
    for email in monitoring.alerts.email:
        if bool(email.user) != (email.password_file is not None):
            missing = "password_file" if email.user else "user"
            what = f"an e-mail receiver of alerts needs `{missing}`"
            report.add(email, "to", what, "give `user` and `password_file`, or neither", ("user", "password_file"))
    for webhook in monitoring.alerts.webhook:
        if (webhook.url is None) == (webhook.url_file is None):
            what = "a webhook receiver of alerts needs either `url` or `url_file`"
            field = "url" if webhook.url else "url_file"
            report.add(
                webhook, field, what, "`url_file` keeps an address with a secret in it out of this file", ("url",)
            )


def check_raw_settings(spec: ClusterSpec, report: Problems) -> None:
    """Check `slurm.extra` and each partition's `extra` for duplicates and for settings that Dal Segno writes itself."""
    _extra(spec.slurm, spec.slurm.extra, OWNED, "`slurm.extra`", report)
    for partition in spec.partitions:
        _extra(partition, partition.extra, OWNED_IN_PARTITION, f"`extra` of partition `{partition.name}`", report)


def _extra(section: Section, extra: dict[str, str], owned: dict[str, str], whose: str, report: Problems) -> None:
    ours = {key.lower(): key for key in owned}
    seen: dict[str, str] = {}
    for key in extra:
        lower = key.lower()
        if lower in ours:
            setting = owned[ours[lower]]
            hint = f"use `{setting}`" if setting else "leave it out"
            report.add(section, f"extra.{key}", f"{whose} sets `{key}`, which Dal Segno sets itself", hint)
        elif lower in seen:
            what = f"{whose} sets `{seen[lower]}` and `{key}`, which Slurm reads as the same"
            report.add(section, f"extra.{key}", what, "keep one")
        seen.setdefault(lower, key)
