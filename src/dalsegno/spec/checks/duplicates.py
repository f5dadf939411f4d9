"""Names that must not be there twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dalsegno.spec.checks.report import Report
from dalsegno.spec.layout import login_nodes, own_nodes, own_spares
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.partition import Partition
from dalsegno.spec.section import Section


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class _Owner:
    """The machine or partition that a node name belongs to. `partition` is "" for the head and login nodes."""

    text: str
    partition: str = ""


def check_duplicates(spec: ClusterSpec, report: Report) -> None:
    """Partitions, nodes, QOS, accounts, users, user ids, storage, reservations, switches."""
    _names(spec.partitions, "partition", report)
    _names(spec.slurm.qos, "qos", report)
    _names(spec.accounts, "account", report)
    _names(spec.users, "user", report)
    _names(spec.storage, "storage", report)
    _names(spec.reservations, "reservation", report)
    if spec.slurm.topology:
        _names(spec.slurm.topology.switches, "switch", report)
    _user_ids(spec, report)
    _nodes(spec, report)


def _names(sections: Sequence[_Named], noun: str, report: Report) -> None:
    first: dict[str, Section] = {}
    for section in sections:
        assert isinstance(section, Section)
        if section.name in first:
            line = report.line(first[section.name])
            what = f"{noun} `{section.name}` is there twice, first on line {line}"
            report.add(section, "name", what, "give one of them another name")
        first.setdefault(section.name, section)


def _user_ids(spec: ClusterSpec, report: Report) -> None:
    owner: dict[int, str] = {}
    for user in spec.users:
        if user.uid is not None and owner.setdefault(user.uid, user.name) != user.name:
            what = f"users `{owner[user.uid]}` and `{user.name}` have the same uid {user.uid}"
            report.add(user, "uid", what, "give one of them another uid, or leave it out")


def _nodes(spec: ClusterSpec, report: Report) -> None:
    owner = {spec.head.name: _Owner("the head node")} | dict.fromkeys(login_nodes(spec), _Owner("a login node"))
    if spec.head.name in login_nodes(spec):
        report.add(spec.login, "names", f"the head node and a login node are both called `{spec.head.name}`")
    for partition in spec.partitions:
        taken = _first_taken(partition, owner)
        if taken and owner[taken].partition != partition.name:
            also = "is also in" if owner[taken].partition else "has the name of"
            what = f"node `{taken}` of partition `{partition.name}` {also} {owner[taken].text}"
            report.add(partition, "nodes", what, _hint(owner[taken]), reads=("name", "spares"))
        for name in (*own_nodes(partition), *own_spares(partition)):
            owner.setdefault(name, _Owner(f"partition `{partition.name}`", partition.name))
        _within(partition, report)


def _first_taken(partition: Partition, owner: Mapping[str, _Owner]) -> str | None:
    return next((name for name in (*own_nodes(partition), *own_spares(partition)) if name in owner), None)


def _hint(owner: _Owner) -> str:
    if owner.partition:
        return f"to share machines write `nodes_from: {owner.partition}` instead of `nodes`"
    return "give the partition or the machine another name"


def _within(partition: Partition, report: Report) -> None:
    names = own_nodes(partition) + own_spares(partition)
    if len(set(names)) < len(names):
        again = next(name for at, name in enumerate(names) if name in names[:at])
        what = f"partition `{partition.name}` names the node `{again}` twice"
        report.add(partition, "nodes", what, "keep one", reads=("spares",))
