"""The folder of a run: every path in it has a name here. Whoever runs `runs`, `logs` or `cancel` reads only this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """`root` is the run's own folder; its name is the run's id."""

    root: Path

    @property
    def run(self) -> str:
        return self.root.name

    @property
    def plan(self) -> Path:
        """What was asked for, and what it asks of Slurm."""
        return self.root / "plan.json"

    @property
    def environment(self) -> Path:
        """The variables the agents start with. 0600: people keep tokens in theirs."""
        return self.root / "environment.json"

    @property
    def connect(self) -> Path:
        """Where the coordinator listens, and the run's secret. 0600; the agents get it through srun's stdin."""
        return self.root / "connect.json"

    @property
    def status(self) -> Path:
        """How the run fares, for people (`status.Status`). Replaced whole whenever it changes."""
        return self.root / "status.json"

    @property
    def progress(self) -> Path:
        """How far it has got and where its time went (`progress.Progress`), if its script reports steps."""
        return self.root / "progress.json"

    @property
    def state(self) -> Path:
        """What a coordinator needs to go on after its own death."""
        return self.root / "state.json"

    @property
    def journal(self) -> Path:
        """What happened, a line of JSON each (`journal.Entry`)."""
        return self.root / "journal.jsonl"

    @property
    def cancel(self) -> Path:
        """There once the user does not want the run any more."""
        return self.root / "cancel"

    @property
    def exit_code(self) -> Path:
        """Of a run of srun's own tasks: what srun ended with."""
        return self.root / "exit-code"

    @property
    def coordinator_log(self) -> Path:
        return self.root / "coordinator.log"

    @property
    def agents_log(self) -> Path:
        """What srun and the agents say, all jobs of the run one after the other."""
        return self.root / "agents.log"

    def salloc_log(self, number: int) -> Path:
        """What salloc said of the run's job of this number."""
        return self.root / f"salloc-{number}.log"

    @property
    def job_log(self) -> Path:
        """Of a batch step; the name is sbatch's pattern."""
        return self.root / "job-%j.log"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def generation(self, number: int) -> Path:
        return self.logs / f"g{number:04d}"

    def log(self, generation: int, rank: int) -> Path:
        """Output and errors of one rank in one generation, as they came."""
        return self.generation(generation) / f"rank{rank}.log"

    @property
    def store_log(self) -> Path:
        """Of stores that are programs of their own."""
        return self.logs / "store.log"

    @property
    def all_stacks(self) -> Path:
        """Where ranks hung, if they did."""
        return self.root / "stacks"

    def stacks(self, generation: int, rank: int) -> Path:
        """Where a rank hung."""
        return self.all_stacks / f"g{generation:04d}-rank{rank}.txt"

    def inside(self, name: str) -> Path | None:
        """The path of a log that an agent names; None for a name that would lead out of the folder."""
        path = self.root / name
        plain = not name.startswith("/") and ".." not in Path(name).parts
        return path if plain and Path(name).parts[:1] in ((self.logs.name,), (self.all_stacks.name,)) else None


def mending(path: Path) -> str:
    """What to do about a file of a run that is not as we wrote it."""
    run = RunFolder(path.parent)
    return f"was it edited by hand? `scancel --name={run.run}` ends the run's jobs; then {run.root} can be removed"
