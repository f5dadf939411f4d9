"""Sections of the cluster file: machines and partitions."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, PlainValidator, WithJsonSchema

from dalsegno.spec.names import (
    Accounts,
    Features,
    GpuType,
    Groups,
    HostNames,
    InstanceName,
    NodeCount,
    PartitionName,
    PartitionNames,
    SpareCount,
)
from dalsegno.spec.quantities import Limit, SizeMiB
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.slurm import PreemptMode, RawSettings

_OVERSUBSCRIBE = re.compile(r"NO|EXCLUSIVE|(YES|FORCE)(:[1-9]\d{0,3})?")
_PRIORITY_MAX = 65533


def _oversubscribe(value: object) -> str:
    text = ("YES" if value else "NO") if isinstance(value, bool) else value
    if isinstance(text, str) and _OVERSUBSCRIBE.fullmatch(text.upper()):
        return text.upper()
    raise fault(f"cannot be {show(value)}", "write `no`, `exclusive`, `yes`, `yes:4` or `force:2`")


OverSubscribe = Annotated[str, PlainValidator(_oversubscribe), WithJsonSchema({"type": ["string", "boolean"]})]


class MachineSpec(Section):
    """The size of a machine: an instance type from the catalog, or plain sizes."""

    instance: InstanceName = Field(default="", description="Instance type, such as p5.48xlarge or BM.GPU.H100.8.")
    cpus: int | None = Field(default=None, ge=1, le=4096, description="CPUs of the machine, as Slurm counts them.")
    memory: SizeMiB | None = Field(default=None, description="Memory of the machine, with its unit: 64G.")


class Head(MachineSpec):
    """The head node, which runs slurmctld and Dal Segno's controller."""

    name: PartitionName = Field(default="head", description="Host name of the head node.")


class Login(MachineSpec):
    """The login nodes."""

    count: int = Field(
        default=0, ge=0, le=64, description="Number of login nodes. With 0, users log in to the head node."
    )
    names: HostNames = Field(default=[], description="Host names of existing login nodes: login[1-2].")


class PartitionSpec(MachineSpec):
    """A Slurm partition and the machines in it."""

    name: PartitionName = Field(description="Name of the partition. Its nodes are named <name>-1, <name>-2 …")
    nodes: NodeCount | None = Field(default=None, description="Number of nodes, or their names: gpu[001-064].")
    nodes_from: PartitionNames = Field(
        default=[], description="Partitions whose nodes this one shares; with `nodes: K`, only the first K nodes."
    )
    spares: SpareCount = Field(default=0, description="Nodes that replace lost ones; out of scheduling until then.")
    gpus: int | None = Field(
        default=None, ge=0, le=256, description="GPUs per node. Default: those of the instance type."
    )
    gpu_type: GpuType = Field(default="", description="GPU type, as in Slurm's gres: h100, a100, l4.")
    default: bool = Field(default=False, description="Partition of jobs that name none. Default: the first partition.")
    time_limit: Limit = Field(default=None, description="Maximum run time of a job (MaxTime).")
    default_time: Limit = Field(default=None, description="Time limit of a job that requests none (DefaultTime).")
    max_nodes: int | None = Field(default=None, ge=1, description="Maximum nodes per job (MaxNodes).")
    min_nodes: int | None = Field(default=None, ge=0, description="Minimum nodes per job (MinNodes).")
    priority: int | None = Field(
        default=None, ge=0, le=_PRIORITY_MAX, description="Sets both `priority_tier` and `priority_job_factor`."
    )
    priority_tier: int | None = Field(
        default=None,
        ge=0,
        le=_PRIORITY_MAX,
        description="Jobs are scheduled before jobs of a lower tier (PriorityTier).",
    )
    priority_job_factor: int | None = Field(
        default=None, ge=0, le=_PRIORITY_MAX, description="Partition factor in a job's priority (PriorityJobFactor)."
    )
    weight: int = Field(
        default=1, ge=1, le=2**31 - 1, description="Nodes with a lower weight are allocated first (Weight)."
    )
    features: Features = Field(default=[], description="Features of the nodes, for `--constraint` (Features).")
    allow_accounts: Accounts = Field(
        default=[], description="Only these accounts may use the partition (AllowAccounts)."
    )
    allow_groups: Groups = Field(default=[], description="Only these Unix groups may use the partition (AllowGroups).")
    allow_qos: Accounts = Field(default=[], description="Only these QOS may use the partition (AllowQos).")
    oversubscribe: OverSubscribe = Field(default="", description="no, exclusive, yes[:N] or force[:N] (OverSubscribe).")
    preempt_mode: PreemptMode = Field(
        default="", description="What happens to preempted jobs of the partition (PreemptMode)."
    )
    hidden: bool = Field(default=False, description="Hide the partition from `sinfo` and `squeue` by default (Hidden).")
    extra: RawSettings = Field(default={}, description="Further settings of the PartitionName line, as in slurm.conf.")
