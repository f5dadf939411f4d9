"""The doctor's facts about a job, its symptoms, and its findings. Values only.

A symptom is a name, a question, and a function that answers the question from a `Case` alone. A fact that is `None` is
not known: the function then finds nothing, and `Case.unchecked` says what was missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.doctor.batch import BatchFacts
from dalsegno.doctor.logs import LogEnd, LogSign, SignSeen
from dalsegno.doctor.script import ScriptFacts
from dalsegno.runs.hang import HangReport
from dalsegno.slurm.facts import JobInfo


class Severity(Enum):
    """The severity of a finding."""

    ERROR = "error"  # the job fails or has failed because of the finding
    WARNING = "warning"  # the job may fail or be slow
    NOTE = "note"  # information only; the exit code stays 0


@dataclass(frozen=True)
class Evidence:
    """The place where something was seen, such as `train.py:12`, `slurm-7.out:230` or `partition gpu`, and the text at
    that place."""

    where: str
    text: str = ""


@dataclass(frozen=True)
class DoctorFinding:
    """One thing that is wrong, and how to fix it: an exact command, or a line of code."""

    severity: Severity
    what: str
    fix: str
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class PathPlace:
    """A path and its file system. `shared` says whether all nodes see the same file; None if unknown."""

    path: str
    fstype: str = ""
    shared: bool | None = None
    mode: str = ""  # this user's permissions: some of `rwx`, or `-`; "" if the path does not exist


@dataclass(frozen=True)
class PythonFound:
    """The Python environment of a job. `torch` is the version of torch; "" if torch is missing, None if that is not
    known."""

    python: str
    place: PathPlace
    torch: str | None = None
    cuda: bool | None = None  # whether torch was built for CUDA; None if that is not known
    active: bool = True  # whether the job certainly uses this environment


@dataclass(frozen=True)
class NodeProbe:
    """The facts that a job step found on one node. None means that a fact was not examined."""

    node: str
    script: str | None = None  # this user's permissions: some of `rx`, or `-`; "" if there is no such file
    python: bool | None = None
    torch: bool | None = None
    port_in_use: bool | None = None
    containers: bool | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class CaseCluster:
    """The nodes that the job runs on, or would run on. `gpus_per_node` is 0 if none of them has a GPU."""

    where: str  # which nodes these are, for example `partition gpu`
    nodes: int = 0
    gpus_per_node: int = 0
    containers: bool | None = None  # whether srun knows `--container-image`
    same_files: bool = False  # true if the nodes are virtual hosts of this machine, which see its files


@dataclass(frozen=True)
class FoundSnapshot:
    """A checkpoint and the number of ranks that wrote it. If `needs_same_size` is set, only the same number of ranks
    can load it."""

    path: str
    world_size: int
    format: str  # the name to show to users
    needs_same_size: bool = False


@dataclass(frozen=True)
class RankTimes:
    """The step times of a run: how much slower each slow rank is than the median, the median step time, and the wait
    for data."""

    slow: Mapping[str, float] = field(default_factory=dict)  # rank -> ratio
    places: Mapping[int, str] = field(default_factory=dict)
    step_s: float = 0.0
    data_s: float = 0.0


@dataclass(frozen=True)
class Case:
    """Everything that is known about one job, before it starts or after it ended."""

    subject: str
    script: ScriptFacts | None = None
    place: PathPlace | None = None  # where the script is
    batch: BatchFacts | None = None
    words: tuple[str, ...] = ()  # the arguments after the script's name on the command line
    python: PythonFound | None = None
    cluster: CaseCluster | None = None
    job: JobInfo | None = None
    run: str = ""
    signs: tuple[SignSeen, ...] = ()
    failure: str = ""  # a sentence that says how the job or run failed; "" if it did not, or if that is not known
    ends: tuple[LogEnd, ...] = ()  # how the logs end
    read_next: str = ""  # a command that shows more about the failure
    hang: HangReport | None = None
    dumps: tuple[str, ...] = ()  # files of the flight recorder
    times: RankTimes | None = None
    snapshots: tuple[FoundSnapshot, ...] = ()
    left_snapshot: str = ""  # a snapshot file that the script names and may load
    world_size: int = 0  # number of ranks that the job has or requests; 0 if not known
    port: int = 0  # the MASTER_PORT, if it is fixed
    port_where: str = ""
    port_in_use: bool | None = None  # whether the port is in use on this machine
    missing_launcher: Evidence | None = None  # a torchrun that the batch script starts by its path
    missing_script: Evidence | None = None  # a Python script that the batch script starts
    missing_folders: tuple[Evidence, ...] = ()  # folders for output that do not exist
    probes: tuple[NodeProbe, ...] = ()
    unchecked: tuple[str, ...] = ()
    empty_log: bool = False  # whether the job has written nothing
    of_another_user: bool = False

    def seen(self, *signs: LogSign) -> list[SignSeen]:
        return [each for each in self.signs if each.sign in signs]

    @property
    def started(self) -> bool:
        """Return whether the job left signs in a log or a record. These take precedence over the files of the job."""
        return bool(self.signs or self.job or self.run)


Judge = Callable[[Case], Iterable[DoctorFinding]]


@dataclass(frozen=True)
class Symptom:
    """A known kind of fault. `judge` finds it from the case alone."""

    name: str
    question: str
    judge: Judge


def evidence_of(signs: Iterable[SignSeen]) -> tuple[Evidence, ...]:
    return tuple(Evidence(each.where, each.text) for each in signs)[:3]
