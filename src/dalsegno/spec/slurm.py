"""Sections of the cluster file: the `slurm:` block (policy, QOS, topology) and reservations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from dalsegno.hardware import did_you_mean
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.values import (
    AccountName,
    Accounts,
    HostNames,
    Limit,
    Minutes,
    PartitionName,
    PlainName,
    PlainNames,
    Seconds,
    Users,
    matching,
    parse_size_mib,
)


def word(*words: str, yes: str = "", no: str = "") -> Callable[[object], str]:
    """Return a validator that accepts each of `words` in upper or lower case, and returns it as spelled in `words`.

    YAML reads a bare `on` or `off` as a boolean. `yes` is the word for true, and `no` the word for false.
    """

    def check(value: object) -> str:
        text = (yes if value else no) if isinstance(value, bool) else value
        if isinstance(text, str) and (found := [each for each in words if each.lower() == text.lower()]):
            return found[0]
        raise fault(f"must be one of {', '.join(words)}, not {show(value)}", did_you_mean(str(value), words))

    return check


def one_of(*words: str) -> WithJsonSchema:
    """Return a JSON schema for editors that accepts each word as given here or in lower case."""
    return WithJsonSchema({"enum": list(dict.fromkeys([*(each.lower() for each in words), *words]))})


def _split(value: object) -> object:
    """Split a comma-separated list in Slurm's notation."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_PREEMPT = ("OFF", "CANCEL", "REQUEUE", "SUSPEND")
_JOBS_OUT = ("CANCEL", "REQUEUE", "SUSPEND")
_RESETS = ("NONE", "NOW", "DAILY", "WEEKLY", "MONTHLY", "QUARTERLY", "YEARLY")
_ENFORCE = ("associations", "limits", "nojobs", "nosteps", "qos", "safe", "wckeys", "all")
_FLAGS = (
    *("ANY_NODES", "DAILY", "FIRST_CORES", "FLEX", "HOURLY", "IGNORE_JOBS", "LICENSE_ONLY", "MAGNETIC", "MAINT"),
    *("NO_HOLD_JOBS_AFTER", "OVERLAP", "PART_NODES", "PURGE_COMP", "REPLACE", "REPLACE_DOWN", "SPEC_NODES"),
    *("STATIC_ALLOC", "TIME_FLOAT", "USER_DELETE", "WEEKDAY", "WEEKEND", "WEEKLY"),
)

PreemptMode = Annotated[str, PlainValidator(word(*_PREEMPT, no="OFF")), one_of(*_PREEMPT)]
PreemptAction = Annotated[str, PlainValidator(word(*_JOBS_OUT)), one_of(*_JOBS_OUT)]
UsageReset = Annotated[str, PlainValidator(word(*_RESETS, no="NONE")), one_of(*_RESETS)]
EnforceWord = Annotated[str, PlainValidator(word(*_ENFORCE)), one_of(*_ENFORCE)]
ReservationFlag = Annotated[str, PlainValidator(word(*_FLAGS)), one_of(*_FLAGS)]

# A list, or text in Slurm's notation: `associations,limits`
Enforce = Annotated[list[EnforceWord], BeforeValidator(_split, json_schema_input_type=str | list[EnforceWord])]
ReservationFlags = Annotated[
    list[ReservationFlag], BeforeValidator(_split, json_schema_input_type=str | list[ReservationFlag])
]


# Raw Slurm settings
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# A space would start another setting, `#` a comment, a line break another line, and `\` a continuation.
_VALUE = re.compile(r"[^\s\"'#\\\x00-\x1f\x7f]{1,1000}")


def _key(value: str) -> str:
    if not _KEY.fullmatch(value):
        raise fault(f"cannot be {show(value)}", "write it as in slurm.conf, letters and digits only")
    return value


def _as_text(value: Any) -> Any:
    """Return a value as text for slurm.conf, because YAML reads YES as true and 30 as a number."""
    if isinstance(value, bool):
        return "YES" if value else "NO"
    return str(value) if isinstance(value, (int, float)) else value


def _value(value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise fault(f"cannot be {show(value)}", "write one value without spaces, quotes, `#`, `\\` or line breaks")
    return value


_VALUE_SCHEMA = WithJsonSchema({"type": ["string", "number", "boolean"]})
RawKey = Annotated[str, AfterValidator(_key)]
RawValue = Annotated[str, BeforeValidator(_as_text), AfterValidator(_value), _VALUE_SCHEMA]
RawSettings = dict[RawKey, RawValue]

# setting that Dal Segno writes to slurm.conf -> the key in the cluster file that controls it, or ""
OWNED: dict[str, str] = {
    "ClusterName": "name",
    "SlurmctldHost": "slurm.backup_controller",
    "SlurmctldAddr": "",
    "ControlMachine": "",
    "ControlAddr": "",
    "BackupController": "slurm.backup_controller",
    "BackupAddr": "",
    "NodeName": "partitions",
    "NodeSet": "partitions",
    "DownNodes": "",
    "FrontendName": "",
    "PartitionName": "partitions",
    "Include": "",
    "AuthType": "",
    "AuthInfo": "",
    "AuthAltTypes": "",
    "AuthAltParameters": "",
    "CredType": "",
    "CryptoType": "",
    "SlurmUser": "",
    "SlurmdUser": "",
    "SlurmctldPort": "",
    "SlurmdPort": "",
    "SlurmctldPidFile": "",
    "SlurmdPidFile": "",
    "SlurmctldLogFile": "",
    "SlurmdLogFile": "",
    "SlurmdSpoolDir": "",
    "StateSaveLocation": "",
    "PlugStackConfig": "containers",
    "GresTypes": "partitions",
    "ReturnToService": "health",
    "SlurmdTimeout": "slurm.slurmd_timeout",
    "AccountingStorageType": "slurm.accounting",
    "AccountingStorageHost": "slurm.accounting",
    "AccountingStorageBackupHost": "slurm.accounting",
    "AccountingStoragePort": "slurm.accounting",
    "AccountingStoragePass": "slurm.accounting",
    "AccountingStorageUser": "slurm.accounting",
    "AccountingStorageEnforce": "slurm.enforce",
    "TopologyPlugin": "slurm.topology",
    "PreemptType": "slurm.preemption.by",
    "PreemptMode": "slurm.preemption.mode",
    "PreemptExemptTime": "slurm.preemption.exempt_time",
    "PriorityType": "slurm.priority",
    "PriorityWeightAge": "slurm.priority.age",
    "PriorityWeightFairshare": "slurm.priority.fair_share",
    "PriorityWeightJobSize": "slurm.priority.job_size",
    "PriorityWeightPartition": "slurm.priority.partition",
    "PriorityWeightQOS": "slurm.priority.qos",
    "PriorityWeightTRES": "slurm.priority.tres",
    "PriorityDecayHalfLife": "slurm.priority.half_life",
    "PriorityUsageResetPeriod": "slurm.priority.usage_reset",
    "PriorityCalcPeriod": "slurm.priority.calc_period",
    "PriorityMaxAge": "slurm.priority.max_age",
    "PriorityFavorSmall": "slurm.priority.favor_small",
}
OWNED_IN_PARTITION: dict[str, str] = {
    "PartitionName": "name",
    "Nodes": "nodes",
    "State": "",
    "Default": "default",
    "MaxTime": "time_limit",
    "DefaultTime": "default_time",
    "MaxNodes": "max_nodes",
    "MinNodes": "min_nodes",
    "Priority": "priority",
    "PriorityTier": "priority_tier",
    "PriorityJobFactor": "priority_job_factor",
    "OverSubscribe": "oversubscribe",
    "Shared": "oversubscribe",
    "AllowAccounts": "allow_accounts",
    "AllowGroups": "allow_groups",
    "AllowQos": "allow_qos",
    "PreemptMode": "preempt_mode",
    "Hidden": "hidden",
}


_TRES = re.compile(r"cpu|mem|node|billing|energy|fs/disk|(gres|license|bb)/[a-z0-9_.-]+(:[a-z0-9_.-]+)?")


def _tres(value: str) -> str:
    if _TRES.fullmatch(value):
        return value
    names = ("cpu", "mem", "node", "billing", "gres/gpu")
    hint = "did you mean `gres/gpu`?" if value.startswith("gpu") else did_you_mean(value, names)
    raise fault(f"cannot be {show(value)}", hint or f"Slurm counts {', '.join(names)} or gres/gpu:h100")


def _amount(value: Any) -> Any:
    """Convert memory such as `64G` to MiB, Slurm's unit."""
    try:
        return parse_size_mib(value) if isinstance(value, str) else value
    except ValueError:
        return value


TresName = Annotated[str, AfterValidator(_tres)]
Amount = Annotated[
    int, BeforeValidator(_amount), Field(ge=0, le=10**15), WithJsonSchema({"type": ["integer", "string"], "minimum": 0})
]
Start = Annotated[
    str, matching(r"[0-9A-Za-z][0-9A-Za-z:+/.-]{0,39}", "write `now`, `now+2hours` or `2030-01-31T08:00:00`")
]
Weight = Annotated[int, Field(ge=0, le=2**31 - 1)]


class QosSpec(Section):
    """A quality of service (QOS): priority, preemption and limits of its jobs."""

    name: AccountName = Field(description="Name of the QOS, in lower case.")
    priority: int = Field(default=0, ge=0, le=2**31 - 1, description="QOS factor in a job's priority (Priority).")
    preempts: Accounts = Field(default=[], description="QOS whose jobs this one may preempt (Preempt).")
    preempt_mode: PreemptMode = Field(
        default="", description="What happens to preempted jobs of this QOS (PreemptMode)."
    )
    max_time: Limit = Field(default=None, description="Maximum run time of a job (MaxWall).")
    max_tres_per_user: dict[TresName, Amount] = Field(
        default={}, description="Limit on the resources of a user's running jobs: {gres/gpu: 8} (MaxTRESPerUser)."
    )
    max_jobs_per_user: int | None = Field(default=None, ge=0, le=10**6, description="Maximum running jobs per user.")
    group_tres: dict[TresName, Amount] = Field(
        default={}, description="Limit on the resources of all its running jobs (GrpTRES)."
    )
    usage_factor: float | None = Field(
        default=None, ge=0, le=1000, description="Factor on the usage charged to fair share (UsageFactor)."
    )


class PrioritySpec(Section):
    """Multifactor priority: Slurm's PriorityWeight settings and the decay of past usage."""

    age: Weight = Field(default=1000, description="Weight of waiting time.")
    fair_share: Weight = Field(default=10000, description="Weight of fair share.")
    job_size: Weight = Field(default=0, description="Weight of a job's size.")
    partition: Weight = Field(default=1000, description="Weight of the partition's priority_job_factor.")
    qos: Weight = Field(default=100000, description="Weight of the QOS's priority.")
    tres: dict[TresName, Weight] = Field(default={}, description="Weights of requested resources: {gres/gpu: 1000}.")
    half_life: Minutes = Field(default=7 * 24 * 60, description="Half-life of past usage (PriorityDecayHalfLife).")
    usage_reset: UsageReset = Field(default="NONE", description="When past usage is reset (PriorityUsageResetPeriod).")
    calc_period: Minutes = Field(default=5, description="Interval at which usage is recalculated (PriorityCalcPeriod).")
    max_age: Minutes = Field(
        default=7 * 24 * 60, description="Waiting time after which the age factor is at its maximum (PriorityMaxAge)."
    )
    favor_small: bool = Field(default=False, description="Favor small jobs instead of large ones (PriorityFavorSmall).")


class Preemption(Section):
    """Preemption: which jobs may preempt others, and what happens to preempted jobs."""

    by: Literal["qos", "partition"] = Field(
        default="qos", description="qos: by the QOS `preempts` lists; partition: by priority tiers (PreemptType)."
    )
    mode: PreemptAction = Field(default="REQUEUE", description="What happens to preempted jobs (PreemptMode).")
    exempt_time: Seconds | None = Field(default=None, description="Minimum run time before a job may be preempted.")


class SwitchSpec(Section):
    """A network switch: a leaf switch has nodes, any other has switches."""

    name: PlainName = Field(description="Name of the switch.")
    nodes: HostNames = Field(default=[], description="Nodes on this leaf switch: train-[1-16].")
    switches: PlainNames = Field(default=[], description="Switches below this one.")


class Topology(Section):
    """The network topology, so that Slurm allocates nodes that are close to each other."""

    nodes_per_switch: int | None = Field(
        default=None, ge=1, le=4096, description="Nodes per leaf switch of a generated tree."
    )
    switches: list[SwitchSpec] = Field(
        default=[], max_length=10000, description="All switches, instead of `nodes_per_switch`."
    )


class SlurmSpec(Section):
    """Cluster-wide Slurm settings."""

    accounting: bool = Field(
        default=True, description="Run slurmdbd and a database for job records, accounts, QOS and fair share."
    )
    enforce: Enforce = Field(
        default=[], description="What Slurm enforces: associations, limits, qos … (AccountingStorageEnforce)."
    )
    rest: bool = Field(default=False, description="Run slurmrestd.")
    backup_controller: bool = Field(default=False, description="Run a backup slurmctld.")
    slurmd_timeout: Seconds = Field(
        default=300, description="Slurm sets a node DOWN after this time without an answer (SlurmdTimeout)."
    )
    qos: list[QosSpec] = Field(default=[], max_length=1000, description="Qualities of service.")
    priority: PrioritySpec = Field(default_factory=PrioritySpec, description="Multifactor priority.")
    preemption: Preemption | None = Field(default=None, description="Preemption. A QOS with `preempts` turns it on.")
    topology: Topology | None = Field(default=None, description="Network topology.")
    extra: RawSettings = Field(default={}, description="Further settings, written last, as in slurm.conf.")


class ReservationSpec(Section):
    """A Slurm reservation."""

    name: PlainName = Field(description="Name of the reservation.")
    nodes: HostNames = Field(default=[], description="Reserved nodes: train-[1-2]. Or give `node_count`.")
    node_count: int | None = Field(default=None, ge=1, description="Number of nodes, chosen by Slurm.")
    partition: PartitionName = Field(default="", description="Partition of the nodes.")
    start: Start = Field(default="now", description="Start time, in Slurm's format.")
    duration: Limit = Field(default=None, description="Duration.")
    users: Users = Field(default=[], description="Users that may use it.")
    accounts: Accounts = Field(default=[], description="Accounts that may use it.")
    flags: ReservationFlags = Field(default=[], description="Slurm's reservation flags: MAINT, DAILY, FLEX …")
