"""Tests that faults are injected only into a run that trains, and no longer once it fails to recover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dalsegno.drill.impacts import FaultImpact, TrainedStep
from dalsegno.drill.play import RESUME_TIMEOUT_S, play
from dalsegno.drill.schedule import FaultKind, ScheduledFault
from dalsegno.inject.faults import FaultOptions

POWER, XID = FaultKind("power-off"), FaultKind("xid", FaultOptions(code=79), stops=False, by_agent=True)
AGENT = FaultKind("agent-dead", stops=False, needs_repair=False, by_agent=True)


@dataclass
class Run:
    """A run with ten steps a second on two nodes; a power cut takes `power_off_s` and starts a generation."""

    total: int = 1000
    power_off_s: float = 2.0
    now: float = 0.0
    done: int = 0
    generation: int = 1
    away_until: float = 0.0
    bare_until: float = 0.0
    last: TrainedStep | None = None
    struck: list[tuple[str, str, float]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        if self.now >= self.away_until and int(self.now * 10) > int(before * 10):
            self.last = TrainedStep(self.now, self.done, 1.0, self.generation)
            self.done += 1

    def look(self) -> None: ...

    def members(self) -> Sequence[str]:
        return ["n1", "n2"] if self.now >= self.away_until else []

    def lacks_spare(self) -> bool:
        return self.now < self.bare_until

    def newest(self) -> TrainedStep | None:
        return self.last

    def over(self) -> bool:
        return self.done >= self.total

    def inject(self, kind: FaultKind, node: str) -> None:
        self.struck.append((kind.label, node, self.now))
        if kind.fault == "power-off":
            self.away_until = self.now + self.power_off_s
            self.bare_until = self.now + 10.0
            self.generation += 1


def played(run: Run, *faults: ScheduledFault, with_spares: bool = False) -> list[FaultImpact]:
    return play(run, faults, lambda impact: None, lambda: run.now, run.sleep, with_spares)


def test_each_fault_waits_for_its_number_of_steps():
    run = Run()
    impacts = played(run, ScheduledFault(POWER, 10, 3), ScheduledFault(XID, 5, 0), ScheduledFault(POWER, 5, 0))
    assert [(impact.number, impact.fault, impact.node) for impact in impacts] == [
        (1, "power-off", "n2"),
        (2, "xid 79", "n1"),
        (3, "power-off", "n1"),
    ]
    assert run.struck == [(impact.fault, impact.node, impact.at) for impact in impacts]
    gaps = [later.at - earlier.at for earlier, later in pairwise(impacts)]
    assert gaps[0] > 2.4 and gaps[1] > 0.9  # two seconds without steps, then five steps; half a second, then five steps


def test_a_fault_without_a_ready_spare_is_marked():
    impacts = played(Run(), ScheduledFault(POWER, 5, 0), ScheduledFault(XID, 5, 0), ScheduledFault(POWER, 5, 0))
    assert [impact.without_spare for impact in impacts] == [False, False, True], "the second stops nothing"


def test_with_spares_each_fault_waits_until_a_spare_is_ready():
    first, second = played(Run(), ScheduledFault(POWER, 5, 0), ScheduledFault(POWER, 5, 0), with_spares=True)
    assert second.at - first.at >= 10.0 and not second.without_spare


def test_a_fault_that_only_an_agent_detects_skips_nodes_with_a_killed_agent():
    run, said = Run(), list[str]()
    faults = (
        ScheduledFault(AGENT, 5, 0),
        ScheduledFault(XID, 5, 0),
        ScheduledFault(POWER, 5, 0),
        ScheduledFault(AGENT, 5, 0),
        ScheduledFault(XID, 5, 1),
    )
    impacts = play(run, faults, lambda what: said.append(str(what)), lambda: run.now, run.sleep)
    assert [(impact.number, impact.fault, impact.node) for impact in impacts] == [
        (1, "agent-dead", "n1"),
        (2, "xid 79", "n2"),
        (3, "power-off", "n1"),
        (4, "agent-dead", "n2"),
    ]
    assert said[-1] == "xid 79 is skipped: no training node has an agent any more"


def test_no_fault_is_injected_after_the_run_has_ended():
    assert len(played(Run(total=50), *[ScheduledFault(XID, 20, 0)] * 5)) == 2


def test_slow_start_of_a_run_costs_no_fault():
    run = Run(away_until=4 * RESUME_TIMEOUT_S)
    assert len(played(run, *[ScheduledFault(POWER, 5, 0)] * 2)) == 2
    assert played(Run(away_until=1e9), ScheduledFault(POWER, 5, 0)) == [], "a run that never trains gets none"


def test_slow_machine_has_more_time_to_resume():
    faults = [ScheduledFault(POWER, 5, 0)] * 2
    run = Run(power_off_s=2 * RESUME_TIMEOUT_S)
    assert len(play(run, faults, lambda impact: None, lambda: run.now, run.sleep)) == 1
    run = Run(power_off_s=2 * RESUME_TIMEOUT_S)
    assert len(play(run, faults, lambda impact: None, lambda: run.now, run.sleep, slowness=4.0)) == 2


def test_no_more_faults_are_injected_if_the_run_does_not_recover():
    run = Run(power_off_s=1e9)
    assert len(played(run, *[ScheduledFault(POWER, 5, 0)] * 3)) == 1
    assert run.now < 2 * RESUME_TIMEOUT_S
