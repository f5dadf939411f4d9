"""The `slurm:` block: cluster-wide policy, QOS, topology; and reservations."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from dalsegno.hardware import did_you_mean
from dalsegno.spec.names import AccountName, Accounts, HostNames, PartitionName, PlainName, PlainNames, Users
from dalsegno.spec.patterns import matching
from dalsegno.spec.quantities import Limit, Minutes, Seconds, parse_size_mib
from dalsegno.spec.raw import RawSettings
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.words import Enforce, PreemptAction, PreemptMode, ReservationFlags, UsageReset

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


class Qos(Section):
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


class Priority(Section):
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


class Switch(Section):
    """A switch of the network: a leaf names nodes, any other names switches."""

    name: PlainName = Field(description="Name of the switch.")
    nodes: HostNames = Field(default=[], description="Nodes on this leaf switch: train-[1-16].")
    switches: PlainNames = Field(default=[], description="Switches below this one.")


class Topology(Section):
    """Which nodes are near each other, so that a job gets neighbours."""

    nodes_per_switch: int | None = Field(default=None, ge=1, le=4096, description="Build it: so many nodes on a leaf.")
    switches: list[Switch] = Field(default=[], max_length=10000, description="Or name every switch.")


class Slurm(Section):
    """Cluster-wide Slurm settings."""

    accounting: bool = Field(default=True, description="Keep job records, accounts, QOS and fair share in a database.")
    enforce: Enforce = Field(default=[], description="Refuse jobs without association, over limits … (Slurm's words).")
    rest: bool = Field(default=False, description="Run slurmrestd.")
    backup_controller: bool = Field(default=False, description="Run a second slurmctld that takes over.")
    slurmd_timeout: Seconds = Field(default=300, description="A node silent for so long is down (SlurmdTimeout).")
    qos: list[Qos] = Field(default=[], max_length=1000, description="Qualities of service.")
    priority: Priority = Field(default_factory=Priority, description="Multifactor priority.")
    preemption: Preemption | None = Field(default=None, description="Preemption; a QOS with `preempts` switches it on.")
    topology: Topology | None = Field(default=None, description="The network's switches.")
    extra: RawSettings = Field(default={}, description="Further settings, written last, as in slurm.conf.")


class Reservation(Section):
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
