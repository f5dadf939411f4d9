"""The `slurm:` block: cluster-wide policy, QOS, topology; and reservations."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from dalsegno.hardware import did_you_mean
from dalsegno.spec.names import AccountName, Accounts, HostNames, PartitionName, PlainName, PlainNames, Users, matching
from dalsegno.spec.quantities import Limit, Minutes, Seconds, parse_size_mib
from dalsegno.spec.section import Section, fault, show

# ---- Slurm's fixed words, in the spelling Slurm writes them.


def word(*words: str, yes: str = "", no: str = "") -> Callable[[object], str]:
    """A validator for one of `words` in any case. YAML turns bare `off` and `no` into false; they are taken back."""

    def check(value: object) -> str:
        said = (yes if value else no) if isinstance(value, bool) else value
        if isinstance(said, str) and (found := [each for each in words if each.lower() == said.lower()]):
            return found[0]
        raise fault(f"must be one of {', '.join(words)}, not {show(value)}", did_you_mean(str(value), words))

    return check


def one_of(*words: str) -> WithJsonSchema:
    """For editors: the words in either case."""
    return WithJsonSchema({"enum": list(dict.fromkeys([*(each.lower() for each in words), *words]))})


def _split(value: object) -> object:
    """Slurm writes lists with commas."""
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

# As a list, or as Slurm writes it: `associations,limits`.
Enforce = Annotated[list[EnforceWord], BeforeValidator(_split, json_schema_input_type=str | list[EnforceWord])]
ReservationFlags = Annotated[
    list[ReservationFlag], BeforeValidator(_split, json_schema_input_type=str | list[ReservationFlag])
]


# ---- Raw Slurm settings a user may add, and those they may not because we write them ourselves.


_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# A space would start another setting, `#` a comment, a line break another line, `\` a continuation.
_VALUE = re.compile(r"[^\s\"'#\\\x00-\x1f\x7f]{1,1000}")


def _key(value: str) -> str:
    if not _KEY.fullmatch(value):
        raise fault(f"cannot be {show(value)}", "write it as in slurm.conf, letters and digits only")
    return value


def _as_text(value: Any) -> Any:
    """YAML turns YES into true and 30 into a number; Slurm reads words."""
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

# What we write into slurm.conf, and the key of the cluster file that steers it ("" where nothing does).
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
    "PrioritySpec": "priority",
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


# ---- The `slurm:` block: cluster-wide policy, QOS, topology; and reservations.


_TRES = re.compile(r"cpu|mem|node|billing|energy|fs/disk|(gres|license|bb)/[a-z0-9_.-]+(:[a-z0-9_.-]+)?")


def _tres(value: str) -> str:
    if _TRES.fullmatch(value):
        return value
    names = ("cpu", "mem", "node", "billing", "gres/gpu")
    hint = "did you mean `gres/gpu`?" if value.startswith("gpu") else did_you_mean(value, names)
    raise fault(f"cannot be {show(value)}", hint or f"Slurm counts {', '.join(names)} or gres/gpu:h100")


def _amount(value: Any) -> Any:
    """Memory may be written as 64G; Slurm counts it in MiB."""
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
    """A quality of service: who goes first, who may push whom aside, and how much one may use."""

    name: AccountName = Field(description="Name of the QOS, in lower case as Slurm keeps it.")
    priority: int = Field(default=0, ge=0, le=2**31 - 1, description="Share in a job's priority.")
    preempts: Accounts = Field(default=[], description="QOS whose jobs this one may push aside.")
    preempt_mode: PreemptMode = Field(default="", description="What happens to jobs of this QOS when pushed aside.")
    max_time: Limit = Field(default=None, description="Longest a job may run (MaxWall).")
    max_tres_per_user: dict[TresName, Amount] = Field(
        default={}, description="Most that one user's running jobs may hold: {gres/gpu: 8} (MaxTRESPerUser)."
    )
    max_jobs_per_user: int | None = Field(default=None, ge=0, le=10**6, description="Most running jobs of a user.")
    group_tres: dict[TresName, Amount] = Field(default={}, description="Most that all its jobs may hold (GrpTRES).")
    usage_factor: float | None = Field(default=None, ge=0, le=1000, description="How dear its use is for fair share.")


class PrioritySpec(Section):
    """Multifactor priority: Slurm's PriorityWeight settings and how past use fades."""

    age: Weight = Field(default=1000, description="Weight of waiting time.")
    fair_share: Weight = Field(default=10000, description="Weight of fair share.")
    job_size: Weight = Field(default=0, description="Weight of a job's size.")
    partition: Weight = Field(default=1000, description="Weight of the partition's priority_job_factor.")
    qos: Weight = Field(default=100000, description="Weight of the QOS's priority.")
    tres: dict[TresName, Weight] = Field(default={}, description="Weights of asked resources: {gres/gpu: 1000}.")
    half_life: Minutes = Field(default=7 * 24 * 60, description="Past use counts half after this time.")
    usage_reset: UsageReset = Field(default="NONE", description="When past use is forgotten altogether.")
    calc_period: Minutes = Field(default=5, description="How often past use is worked out.")
    max_age: Minutes = Field(default=7 * 24 * 60, description="Waiting longer than this adds nothing more.")
    favor_small: bool = Field(default=False, description="Small jobs first, rather than large ones.")


class Preemption(Section):
    """Who may push running jobs aside, and what happens to them."""

    by: Literal["qos", "partition"] = Field(
        default="qos", description="QOS `preempts` lists, or partition priority tiers."
    )
    mode: PreemptAction = Field(default="REQUEUE", description="What happens to the jobs pushed aside.")
    exempt_time: Seconds | None = Field(default=None, description="A job is safe for this long after its start.")


class SwitchSpec(Section):
    """A switch of the network: a leaf names nodes, any other names switches."""

    name: PlainName = Field(description="Name of the switch.")
    nodes: HostNames = Field(default=[], description="Nodes on this leaf switch: train-[1-16].")
    switches: PlainNames = Field(default=[], description="Switches below this one.")


class Topology(Section):
    """Which nodes are near each other, so that a job gets neighbours."""

    nodes_per_switch: int | None = Field(default=None, ge=1, le=4096, description="Build it: so many nodes on a leaf.")
    switches: list[SwitchSpec] = Field(default=[], max_length=10000, description="Or name every switch.")


class SlurmSpec(Section):
    """Cluster-wide Slurm settings."""

    accounting: bool = Field(default=True, description="Keep job records, accounts, QOS and fair share in a database.")
    enforce: Enforce = Field(default=[], description="Refuse jobs without association, over limits … (Slurm's words).")
    rest: bool = Field(default=False, description="Run slurmrestd.")
    backup_controller: bool = Field(default=False, description="Run a second slurmctld that takes over.")
    slurmd_timeout: Seconds = Field(default=300, description="A node silent for so long is down (SlurmdTimeout).")
    qos: list[QosSpec] = Field(default=[], max_length=1000, description="Qualities of service.")
    priority: PrioritySpec = Field(default_factory=PrioritySpec, description="Multifactor priority.")
    preemption: Preemption | None = Field(default=None, description="Preemption; a QOS with `preempts` switches it on.")
    topology: Topology | None = Field(default=None, description="The network's switches.")
    extra: RawSettings = Field(default={}, description="Further settings, written last, as in slurm.conf.")


class ReservationSpec(Section):
    """Nodes set aside for a time."""

    name: PlainName = Field(description="Name of the reservation.")
    nodes: HostNames = Field(default=[], description="The nodes: train-[1-2]. Or give node_count.")
    node_count: int | None = Field(default=None, ge=1, description="Any so many nodes of the partition.")
    partition: PartitionName = Field(default="", description="Partition they are taken from.")
    start: Start = Field(default="now", description="When it begins, in Slurm's words.")
    duration: Limit = Field(default=None, description="How long it lasts.")
    users: Users = Field(default=[], description="Who may use it.")
    accounts: Accounts = Field(default=[], description="Accounts that may use it.")
    flags: ReservationFlags = Field(default=[], description="Slurm's flags: MAINT, DAILY, FLEX …")
