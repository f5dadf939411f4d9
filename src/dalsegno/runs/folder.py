"""The paths in the folder of a run. `dalsegno runs`, `logs` and `cancel` need only this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run folder. The name of `root` is the run's id."""

    root: Path

    @property
    def run(self) -> str:
        return self.root.name

    @property
    def plan(self) -> Path:
        """The plan (`plan.RunPlan`): the user's request and the Slurm job that follows from it."""
        return self.root / "plan.json"

    @property
    def environment(self) -> Path:
        """The environment of the agents. The file has mode 0600, because it may contain tokens."""
        return self.root / "environment.json"

    @property
    def connect(self) -> Path:
        """The coordinator's addresses and the run's secret. The file has mode 0600; agents get its content through
        stdin.
        """
        return self.root / "connect.json"

    @property
    def status(self) -> Path:
        """The status for users (`status.RunStatus`), replaced whenever it changes."""
        return self.root / "status.json"

    @property
    def progress(self) -> Path:
        """Progress and time accounting (`goodput.TrainingProgress`), if the script reports steps."""
        return self.root / "progress.json"

    @property
    def history(self) -> Path:
        """Loss and step time over the whole run (`history.StepPoint`), if the script reports steps."""
        return self.root / "history.json"

    @property
    def state(self) -> Path:
        """The state from which the next coordinator continues if this one dies."""
        return self.root / "state.json"

    @property
    def journal(self) -> Path:
        """Events, one line of JSON each (`journal.Entry`)."""
        return self.root / "journal.jsonl"

    @property
    def cancel(self) -> Path:
        """A file whose existence tells the coordinator to cancel the run."""
        return self.root / "cancel"

    @property
    def exit_code(self) -> Path:
        """The exit code of srun, if the run's processes are srun's tasks."""
        return self.root / "exit-code"

    @property
    def coordinator_log(self) -> Path:
        return self.root / "coordinator.log"

    @property
    def agents_log(self) -> Path:
        """The output of srun and the agents, in all jobs of the run."""
        return self.root / "agents.log"

    def salloc_log(self, number: int) -> Path:
        """The output of salloc for one job of the run. `number` is the coordinator's own number for the job."""
        return self.root / f"salloc-{number}.log"

    @property
    def job_log(self) -> Path:
        """The output of a batch step. sbatch replaces `%j` with the job's id."""
        return self.root / "job-%j.log"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def generation(self, number: int) -> Path:
        return self.logs / f"g{number:04d}"

    def log(self, generation: int, rank: int) -> Path:
        """The standard output and standard error of one rank in one generation."""
        return self.generation(generation) / f"rank{rank}.log"

    @property
    def store_log(self) -> Path:
        """The output of stores that run as separate programs."""
        return self.logs / "store.log"

    @property
    def all_stacks(self) -> Path:
        """The folder for the stacks of ranks that hung."""
        return self.root / "stacks"

    def stacks(self, generation: int, rank: int) -> Path:
        """The file for the stacks of one rank that hung."""
        return self.all_stacks / f"g{generation:04d}-rank{rank}.txt"

    def flight_dump(self, generation: int, rank: int) -> Path:
        """Return the path for a rank's flight recorder dump. torch's own dump has the same name without `.json`."""
        return self.all_stacks / f"g{generation:04d}-flight-{rank}.json"

    def inside(self, name: str) -> Path | None:
        """Return the path for a log name that an agent sent; None if it is not below `logs` or `stacks`."""
        path = self.root / name
        plain = not name.startswith("/") and ".." not in Path(name).parts
        return path if plain and Path(name).parts[:1] in ((self.logs.name,), (self.all_stacks.name,)) else None


def repair_hint(path: Path) -> str:
    """Return the hint for a damaged file of a run."""
    run = RunFolder(path.parent)
    return (
        f"it may have been edited by hand; end the run's jobs with `scancel --name={run.run}`, then remove {run.root}"
    )
