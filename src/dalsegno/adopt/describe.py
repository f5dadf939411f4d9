"""Turn a discovered cluster into the content of a cluster file, with a remark for each part that the file cannot
express. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dalsegno.adopt.found import FoundCluster
from dalsegno.hostlist import HostlistError, compress
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.parse.load import ReservationInfo
from dalsegno.slurm.parse.partitions import PartitionSettings
from dalsegno.slurm.parse.text import duration_s, integer, known, optional_integer, parse_tres
from dalsegno.spec.facts import FOREIGN_TARGET
from dalsegno.spec.values import is_node_name

Content = dict[str, Any]
_SHOWN = 8  # a remark lists at most this many names
# These settings of slurm.conf matter to training, health or recovery, but a cluster file cannot express them.
_NOTED = (
    *("SelectType", "SelectTypeParameters", "ProctrackType", "TaskPlugin", "PrologFlags", "LaunchParameters"),
    *("HealthCheckProgram", "Prolog", "Epilog", "TaskProlog", "TaskEpilog", "SrunProlog", "SrunEpilog"),
    *("ResumeProgram", "SuspendProgram", "RebootProgram", "ReturnToService", "SchedulerParameters", "TopologyPlugin"),
    *("JobSubmitPlugins", "CliFilterPlugins", "PlugStackConfig", "PrivateData", "JobRequeue", "KillOnBadExit"),
)
_UNREMARKABLE = frozenset({"topology/none", "topology/default", "topology/flat", "topology/tree"})
_DEFAULTS = {"JobRequeue": "1", "KillOnBadExit": "0", "ReturnToService": "0"}
_PRIORITY = {
    "age": "PriorityWeightAge",
    "fair_share": "PriorityWeightFairShare",
    "job_size": "PriorityWeightJobSize",
    "partition": "PriorityWeightPartition",
    "qos": "PriorityWeightQOS",
}
_PREEMPT_TYPES = {"preempt/qos": "qos", "preempt/partition_prio": "partition"}
_PREEMPT_ACTIONS = ("CANCEL", "REQUEUE", "SUSPEND")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")


@dataclass
class Description:
    """The content of a cluster file, and remarks about what the file cannot express."""

    content: Content
    remarks: list[str] = field(default_factory=list)


def describe(found: FoundCluster) -> Description:
    """Describe a cluster. The content may break rules of the cluster file; `render_valid` removes such parts."""
    remarks: list[str] = [f"could not read {each}" for each in found.unread]
    content: Content = {
        "name": _cluster_name(found, remarks),
        "target": FOREIGN_TARGET,
        "existing": {"platform": found.platform.kind.value},
        "head": {"name": found.controllers[0]} if found.controllers else {},
        "partitions": list(_partitions(found, remarks)),
        "reservations": [_reservation(each) for each in found.reservations],
        "slurm": _slurm(found, remarks),
        "accounts": list(_accounts(found)),
        "users": list(_users(found)),
        "health": {"mode": "observe", "armed": []},
    }
    remarks += _left_over_nodes(found)
    settings = [(name, found.setting(name) or found.setting(f"{name}[0]")) for name in _NOTED]
    odd = [each for each in settings if each[1] and each[1] not in (_DEFAULTS.get(each[0]), *_UNREMARKABLE)]
    remarks += [f"slurm.conf: {name}={value}" for name, value in odd]
    return Description({key: value for key, value in content.items() if value not in ({}, [], None)}, remarks)


def _cluster_name(found: FoundCluster, remarks: list[str]) -> str:
    given = found.setting("ClusterName")
    if _NAME.fullmatch(given):
        return given
    name = re.sub(r"[^a-z0-9_-]+", "-", given.lower()).strip("-")[:40]
    name = name if _NAME.fullmatch(name) else "existing"
    remarks.append(f"Slurm's name of the cluster is {given!r}")
    return name


# Partitions and nodes


@dataclass(frozen=True)
class _CommonSettings:
    """The settings of a node that a cluster file gives once for all nodes of a partition."""

    cpus: int
    memory_mib: int
    gpus: int
    gpu_type: str
    features: tuple[str, ...]
    weight: int

    @classmethod
    def of(cls, node: NodeInfo) -> _CommonSettings:
        return cls(node.cpus, node.memory_mib, node.gpus, node.gpu_type, node.features, node.weight)

    def content(self) -> Content:
        sizes: Content = {}
        if self.cpus:
            sizes["cpus"] = self.cpus
        if self.memory_mib:
            sizes["memory"] = f"{self.memory_mib}M"
        if self.gpus:
            sizes["gpus"] = self.gpus
            sizes |= {"gpu_type": self.gpu_type.lower()} if self.gpu_type else {}
        sizes |= {"features": list(self.features)} if self.features else {}
        return sizes | ({"weight": self.weight} if self.weight != 1 else {})

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPUs {self.gpu_type}".rstrip() if self.gpus else ""
        features = f", features {','.join(self.features)}" if self.features else ""
        return f"{self.cpus} CPUs, {self.memory_mib} MiB{gpus}{features}, weight {self.weight}"


def _partitions(found: FoundCluster, remarks: list[str]) -> Iterator[Content]:
    known_nodes = {node.name: node for node in found.nodes}
    for partition in found.partitions:
        names = [name for name in dict.fromkeys(partition.nodes) if is_node_name(name)]
        if odd := [name for name in partition.nodes if not is_node_name(name)]:
            remarks.append(f"partition {partition.name} also has nodes whose names the file refuses: {_some(odd)}")
        if not names:
            remarks.append(f"partition {partition.name} has no nodes and is left out")
            continue
        shapes = Counter(_CommonSettings.of(known_nodes[name]) for name in names if name in known_nodes)
        size = shapes.most_common(1)[0][0].content() if shapes else {}
        yield {"name": partition.name, "nodes": _host_list(names), **size, **_limits(partition)}
        remarks += _partition_remarks(partition, names, shapes, known_nodes)


def _partition_remarks(
    partition: PartitionSettings,
    names: Sequence[str],
    shapes: Counter[_CommonSettings],
    known_nodes: Mapping[str, NodeInfo],
) -> list[str]:
    whose = f"partition {partition.name}"
    remarks = []
    for shape, _ in shapes.most_common()[1:]:
        other = [name for name in names if name in known_nodes and _CommonSettings.of(known_nodes[name]) == shape]
        remarks.append(f"{whose}: its nodes {_some(other)} are different: {shape}")
    types = {shape.gpu_type for shape in shapes if shape.gpu_type != shape.gpu_type.lower()}
    remarks += [f"{whose}: Slurm spells the GPU type {each!r}" for each in sorted(types)]
    if not partition.up:
        remarks.append(f"{whose} is not up")
    return remarks


def _limits(partition: PartitionSettings) -> Content:
    """Return the settings of a partition that differ from Slurm's defaults."""
    limits: Content = {"default": True} if partition.default else {}
    if partition.max_time_s is not None:
        limits["time_limit"] = _time(partition.max_time_s)
    if partition.default_time_s is not None:
        limits["default_time"] = _time(partition.default_time_s)
    if partition.max_nodes is not None:
        limits["max_nodes"] = partition.max_nodes
    if partition.min_nodes > 1:
        limits["min_nodes"] = partition.min_nodes
    if partition.priority_tier != 1:
        limits["priority_tier"] = partition.priority_tier
    if partition.priority_job_factor != 1:
        limits["priority_job_factor"] = partition.priority_job_factor
    if partition.oversubscribe != "NO":
        limits["oversubscribe"] = partition.oversubscribe
    if partition.preempt_mode not in ("", "OFF"):
        limits["preempt_mode"] = partition.preempt_mode
    lists = {"accounts": partition.allow_accounts, "groups": partition.allow_groups, "qos": partition.allow_qos}
    limits |= {f"allow_{key}": list(names) for key, names in lists.items() if names}
    limits |= {"hidden": True} if partition.hidden else {}
    return limits | ({"extra": dict(partition.extra)} if partition.extra else {})


def _left_over_nodes(found: FoundCluster) -> list[str]:
    placed = {name for partition in found.partitions for name in partition.nodes}
    rest = [node.name for node in found.nodes if node.name not in placed]
    return [f"nodes in no partition: {_some(rest)}"] if rest else []


def _host_list(names: Sequence[str]) -> str | list[str]:
    """Return names in Slurm's short form, or as a list if they have no short form."""
    try:
        return compress(names)
    except HostlistError:
        return list(names)


def _some(names: Sequence[str]) -> str:
    try:
        return compress(names)
    except HostlistError:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more


def _time(seconds: int) -> str:
    """Return a time in Slurm's notation: `1-02:03:04`."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


# Slurm's policy


def _slurm(found: FoundCluster, remarks: list[str]) -> Content:
    slurm: Content = {"accounting": found.has_accounting}
    if found.enforced and found.enforced != ("none",):
        slurm["enforce"] = list(found.enforced)
    if len(found.controllers) > 1:
        slurm["backup_controller"] = True
    if (timeout_s := integer(found.setting("SlurmdTimeout"))) > 0:
        slurm["slurmd_timeout"] = timeout_s
    if qos := [each for row in found.accounts.qos.values() if (each := _qos(row))]:
        slurm["qos"] = qos
    if found.setting("PriorityType") == "priority/multifactor":
        slurm["priority"] = _priority(found)
    if (by := _PREEMPT_TYPES.get(found.setting("PreemptType"))) is not None:
        slurm["preemption"] = {"by": by, **_preempt_action(found.setting("PreemptMode"))}
    if switches := [_switch(each.name, each.nodes, each.switches) for each in found.switches]:
        slurm["topology"] = {"switches": switches}
    if found.setting("PriorityWeightAssoc") not in ("", "0"):
        remarks.append(f"slurm.conf: PriorityWeightAssoc={found.setting('PriorityWeightAssoc')}")
    return slurm


def _switch(name: str, nodes: Sequence[str], switches: Sequence[str]) -> Content:
    # For a switch above other switches, Slurm also lists the nodes below those. The file does not repeat them.
    return {"name": name, "switches": list(switches)} if switches else {"name": name, "nodes": _host_list(nodes)}


def _priority(found: FoundCluster) -> Content:
    weights = {key: optional_integer(found.setting(name)) for key, name in _PRIORITY.items()}
    if not found.has_accounting:  # without accounting, the cluster file refuses these weights: they have no effect
        weights = {key: weight for key, weight in weights.items() if key not in ("fair_share", "qos")}
    priority: Content = {key: weight for key, weight in weights.items() if weight is not None}
    times = {"calc_period": "PriorityCalcPeriod", "max_age": "PriorityMaxAge"}
    if found.has_accounting:
        times["half_life"] = "PriorityDecayHalfLife"
    for key, name in times.items():
        seconds = duration_s(found.setting(name))
        priority |= {key: _time(seconds)} if seconds else {}
    priority |= {"tres": _amounts(found.setting("PriorityWeightTRES"))}
    favor = found.setting("PriorityFavorSmall").lower() in ("yes", "true", "1")
    return {key: value for key, value in priority.items() if value != {}} | ({"favor_small": True} if favor else {})


def _preempt_action(mode: str) -> Content:
    action = next((word for word in mode.upper().replace("+", ",").split(",") if word in _PREEMPT_ACTIONS), "")
    return {"mode": action} if action else {}


def _qos(row: Mapping[str, str]) -> Content:
    """Return the content of a QOS; empty for Slurm's default QOS `normal` if it has no settings."""
    qos: Content = {}
    if integer(row["Priority"]):
        qos["priority"] = integer(row["Priority"])
    if row["Preempt"]:
        qos["preempts"] = _list(row["Preempt"])
    if _preempt_action(row["PreemptMode"]):
        qos["preempt_mode"] = _preempt_action(row["PreemptMode"])["mode"]
    if known(row["MaxWall"]):
        qos["max_time"] = row["MaxWall"]
    if amounts := _amounts(row["MaxTRESPerUser"]):
        qos["max_tres_per_user"] = amounts
    if (jobs := optional_integer(row["MaxJobsPerUser"])) is not None:
        qos["max_jobs_per_user"] = jobs
    if amounts := _amounts(row["GrpTRES"]):
        qos["group_tres"] = amounts
    factor = _number(row["UsageFactor"])
    if factor is not None and factor != 1:
        qos["usage_factor"] = factor
    return {"name": row["Name"], **qos} if qos or row["Name"] != "normal" else {}


def _amounts(tres: str) -> Content:
    amounts = {name: _amount(count) for name, count in parse_tres(known(tres)).items()}
    return {name: amount for name, amount in amounts.items() if amount is not None}


def _amount(text: str) -> int | str | None:
    number = _number(text)
    if number is not None:
        return int(number)
    return text if re.fullmatch(r"\d{1,12}(\.\d{1,3})?[KMGTP]", text) else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text.strip(), re.ASCII) else None


def _accounts(found: FoundCluster) -> Iterator[Content]:
    for name, row in found.accounts.accounts.items():
        if name == "root":
            continue
        account: Content = {"name": name}
        if row["ParentName"] and row["ParentName"] != "root":
            account["parent"] = row["ParentName"]
        if (share := optional_integer(row["Fairshare"])) is not None and share != 1:
            account["fair_share"] = share
        account |= {"qos": _list(row["QOS"])} if row["QOS"] else {}
        amounts = _amounts(row["GrpTRES"])
        yield account | ({"group_tres": amounts} if amounts else {})


def _users(found: FoundCluster) -> Iterator[Content]:
    held: dict[str, list[str]] = {}
    for member, account in found.accounts.members:
        held.setdefault(member, []).append(account)
    for name, accounts in held.items():
        if name == "root":
            continue
        about = found.accounts.users.get(name, {})
        user: Content = {"name": name, "accounts": accounts}
        if about.get("DefaultAccount") in accounts and about["DefaultAccount"] != accounts[0]:
            user["default_account"] = about["DefaultAccount"]
        if about.get("AdminLevel", "").startswith("Admin"):
            user["admin"] = True
        yield user


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _reservation(reservation: ReservationInfo) -> Content:
    start = datetime.fromtimestamp(reservation.starts_at).strftime("%Y-%m-%dT%H:%M:%S")
    content: Content = {"name": reservation.name, "start": start}
    content |= {"nodes": reservation.nodes} if reservation.nodes else {"node_count": reservation.node_count}
    content |= {"partition": reservation.partition} if reservation.partition else {}
    if 0 < reservation.ends_at - reservation.starts_at < _FOREVER_S:
        content["duration"] = _time(reservation.ends_at - reservation.starts_at)
    named = {"users": _list(reservation.users), "accounts": _list(reservation.accounts)}
    content |= {key: names for key, names in named.items() if names}
    return content | ({"flags": _list(reservation.flags)} if reservation.flags else {})


_FOREVER_S = 10 * 365 * 86_400  # Slurm stores a reservation without an end as one that lasts for years
