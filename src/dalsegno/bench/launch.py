"""Split the start of a run into timed phases, from the run's journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from dalsegno.runs.journal import Entry, RunEvent

SCRIPT = """import os, sys, time
began = time.time()
with open(f"{sys.argv[1]}.{os.environ.get('RANK', 0)}", "w") as file:
    file.write(repr(began))
"""
PHASES = (
    ("coordinator", "from the request until the run's coordinator runs"),
    ("allocation", "until Slurm has allocated the nodes"),
    ("agents", "until an agent on each node has imported the framework"),
    ("ranks", "until all ranks have their numbers and addresses"),
    ("script", "until the script of the last rank runs"),
    ("end", "from then until the run is over"),
)


@dataclass(frozen=True)
class LaunchTimes:
    """The seconds that each phase of one start took, in the order of PHASES."""

    phases: tuple[float, ...]

    @property
    def until_script(self) -> float:
        return sum(self.phases[:-1])


def launch_times(asked: float, entries: Sequence[Entry], scripts: Sequence[float], over: float) -> LaunchTimes | None:
    """Return the phases of a start; None if an event is missing in the journal, or if no script ran.

    `asked`, `scripts` and `over` are Unix times.
    """
    at: dict[str, float] = {}
    for entry in entries:
        event = str(entry.get("event"))
        if event == RunEvent.READY or event not in at:  # use the last READY, and the first of every other event
            at[event] = float(entry["at"])
    marks = [at.get(each) for each in (RunEvent.BEGAN, RunEvent.GRANTED, RunEvent.READY, RunEvent.GENERATION)]
    if None in marks or not scripts:
        return None
    # The clocks of nodes differ a little, so a negative phase counts as zero.
    moments = [asked, *(mark for mark in marks if mark is not None), max(scripts), over]
    return LaunchTimes(tuple(max(0.0, after - before) for before, after in pairwise(moments)))


HEADERS = ("PHASE", "MEDIAN", "BEST", "MEANING")


def table_rows(times: Sequence[LaunchTimes], srun_s: Sequence[float]) -> list[list[str]]:
    rows = [
        [name, *_figures([each.phases[at] for each in times]), meaning] for at, (name, meaning) in enumerate(PHASES)
    ]
    rows.append(
        ["until script", *_figures([each.until_script for each in times]), "from the request until all scripts run"]
    )
    if srun_s:
        rows.append(["srun true", *_figures(srun_s), "the same nodes with Slurm alone, without Python"])
    return rows


def _figures(values: Sequence[float]) -> list[str]:
    return [f"{median(values):.2f} s", f"{min(values):.2f} s"]


def to_dict(times: Sequence[LaunchTimes], srun_s: Sequence[float]) -> Mapping[str, object]:
    """Return all measurements for `--json`."""
    named = [dict(zip((name for name, _ in PHASES), each.phases, strict=True)) for each in times]
    return {"starts": named, "until_script_s": [each.until_script for each in times], "srun_s": list(srun_s)}
