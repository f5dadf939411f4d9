"""The demo scene of a training run that survives faults: the faults, and the times of other tools."""

from __future__ import annotations

import re
from dataclasses import replace

from dalsegno.drill.impacts import Drill
from dalsegno.drill.report import Comparison, seconds
from dalsegno.drill.schedule import FaultKind, ScheduledFault
from dalsegno.inject.faults import FaultOptions

SEED = 1
FAULTS = (
    ScheduledFault(FaultKind("power-off"), after_steps=40, node=2),
    ScheduledFault(FaultKind("xid", FaultOptions(code=79)), after_steps=120, node=1),
)

# These times were measured by benchmarks/restart.py on two cores and four virtual hosts, with the same cluster and
# Python; see docs/performance.md.
OTHERS = (
    ("torchrun, elastic, its defaults", "never within 120 s"),
    ("torchrun in a Slurm job that is requeued", "never within 180 s"),
)
NOTES = (
    "the other tools were measured once by benchmarks/restart.py on two cores, see docs/performance.md",
    "the hosts are virtual: a replaced one boots in a second, a real one in minutes, so that time is not compared",
)


def remove_paths(drill: Drill, folder: str) -> Drill:
    """Return the drill without paths into the cluster's folder, because the page outlives that folder."""
    under = re.compile(rf":? ?{re.escape(folder)}\S*")
    return replace(drill, marks=tuple(replace(mark, text=under.sub("", mark.text)) for mark in drill.marks))


def compare(drill: Drill) -> Comparison:
    """Return a comparison of this drill's time to resume after a power loss with the times of other tools."""
    cut = next((each for each in drill.recoveries if each.impact.fault == "power-off"), None)
    ours = seconds(cut.resumed_s) if cut else "not run"
    lines = [("dalsegno run, with a spare (just now)", ours), *OTHERS]
    return Comparison(("A NODE LOSES POWER", "TRAINING RESUMES AFTER"), lines, NOTES)
