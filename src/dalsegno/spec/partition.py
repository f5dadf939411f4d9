"""Machines and the partitions over them, as written in the cluster file."""

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
    said = ("YES" if value else "NO") if isinstance(value, bool) else value
    if isinstance(said, str) and _OVERSUBSCRIBE.fullmatch(said.upper()):
        return said.upper()
    raise fault(f"cannot be {show(value)}", "write `no`, `exclusive`, `yes`, `yes:4` or `force:2`")


OverSubscribe = Annotated[str, PlainValidator(_oversubscribe), WithJsonSchema({"type": ["string", "boolean"]})]


class MachineSpec(Section):
    """How large a machine is: an instance type of the catalog, or plain sizes."""

    instance: InstanceName = Field(default="", description="Instance type, such as p5.48xlarge or BM.GPU.H100.8.")
    cpus: int | None = Field(default=None, ge=1, le=4096, description="CPUs of the machine, as Slurm counts them.")
    memory: SizeMiB | None = Field(default=None, description="Memory of the machine, with its unit: 64G.")


class Head(MachineSpec):
    """The machine that runs slurmctld and our controller."""

    name: PartitionName = Field(default="head", description="Host name of the head node.")


class Login(MachineSpec):
    """The machines people log in to."""

    count: int = Field(default=0, ge=0, le=64, description="How many login nodes; none: people use the head node.")
    names: HostNames = Field(default=[], description="Their host names, where they exist already: login[1-2].")


class PartitionSpec(MachineSpec):
    """A Slurm partition and the machines in it."""

    name: PartitionName = Field(description="Name of the partition; its nodes are called <name>-1, <name>-2 …")
    nodes: NodeCount | None = Field(default=None, description="How many nodes, or their names: gpu[001-064].")
    nodes_from: PartitionNames = Field(
        default=[], description="Partitions whose machines this one shares; with `nodes: K` only the first K of them."
    )
    spares: SpareCount = Field(default=0, description="Nodes kept ready but out of scheduling until one is lost.")
    gpus: int | None = Field(
        default=None, ge=0, le=256, description="GPUs of each node; an instance type knows its own."
    )
    gpu_type: GpuType = Field(default="", description="GPU type in Slurm's words: h100, a100, l4.")
    default: bool = Field(
        default=False, description="Jobs that name no partition come here (else the first partition)."
    )
    time_limit: Limit = Field(default=None, description="Longest a job may run (MaxTime).")
    default_time: Limit = Field(default=None, description="Time of a job that asks for none (DefaultTime).")
    max_nodes: int | None = Field(default=None, ge=1, description="Most nodes of one job (MaxNodes).")
    min_nodes: int | None = Field(default=None, ge=0, description="Fewest nodes of one job (MinNodes).")
    priority: int | None = Field(default=None, ge=0, le=_PRIORITY_MAX, description="Sets both of the next two.")
    priority_tier: int | None = Field(
        default=None, ge=0, le=_PRIORITY_MAX, description="Jobs here go before jobs of a lower tier (PriorityTier)."
    )
    priority_job_factor: int | None = Field(
        default=None, ge=0, le=_PRIORITY_MAX, description="Share in a job's priority (PriorityJobFactor)."
    )
    weight: int = Field(default=1, ge=1, le=2**31 - 1, description="Slurm takes nodes of low weight first (Weight).")
    features: Features = Field(default=[], description="Features of the nodes, for `--constraint` (Features).")
    allow_accounts: Accounts = Field(default=[], description="Only these accounts may use it (AllowAccounts).")
    allow_groups: Groups = Field(default=[], description="Only these Unix groups may use it (AllowGroups).")
    allow_qos: Accounts = Field(default=[], description="Only these QOS may be used here (AllowQos).")
    oversubscribe: OverSubscribe = Field(default="", description="no, exclusive, yes[:N] or force[:N] (OverSubscribe).")
    preempt_mode: PreemptMode = Field(default="", description="What happens to preempted jobs here (PreemptMode).")
    hidden: bool = Field(default=False, description="Left out of `sinfo` and `squeue` unless asked for (Hidden).")
    extra: RawSettings = Field(default={}, description="Further settings of the PartitionName line, as in slurm.conf.")
