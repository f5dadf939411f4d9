"""A job as Slurm sees it."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.slurm.states import JobState


@dataclass(frozen=True)
class JobInfo:
    """One job, from whichever command told. Times are seconds since 1970.

    Of a job that waits, `cpus`, `gpus` and `memory_mib` are what it asks for, and `started_at` is a forecast.
    """

    id: int
    name: str
    user: str
    state: JobState
    uid: int | None = None  # None: the command did not tell
    account: str = ""
    qos: str = ""
    partition: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    cpus: int = 0
    gpus: int = 0
    memory_mib: int = 0
    priority: int = 0
    array_id: int | None = None
    array_task: str = ""  # "3", or "4-9%2" for those that have not started
    het_id: int | None = None
    het_offset: int | None = None
    submitted_at: int | None = None
    started_at: int | None = None
    ends_at: int | None = None  # ended, or will at the latest
    preempted_at: int | None = None
    elapsed_s: int = 0
    time_limit_s: int | None = None  # None: no limit
    exit_code: int = 0
    exit_signal: int = 0
    restarts: int = 0
    reservation: str = ""
    batch_host: str = ""
    comment: str = ""
    batch: bool = False  # it has a script, which Slurm can start again
    # Told only of one job that is asked for by its id.
    work_dir: str = ""
    command: str = ""
    excluded: tuple[str, ...] = ()  # nodes it may not have
    stdout: str = ""
    stderr: str = ""

    @property
    def label(self) -> str:
        """The id as users know it: `5`, `5_3`, `5+1`."""
        if self.array_id is not None:
            return f"{self.array_id}_{self.array_task if self.array_task.isdigit() else f'[{self.array_task}]'}"
        return f"{self.het_id}+{self.het_offset}" if self.het_id is not None else str(self.id)
