"""Raw Slurm settings a user may add, and those they may not because we write them ourselves."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from dalsegno.spec.section import fault, show

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
