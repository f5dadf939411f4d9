"""Tests of which faults and runs a drill removes when it ends, and which it leaves unchanged."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dalsegno.cli.health.drill_traces import Traces
from dalsegno.drill.schedule import FaultKind
from dalsegno.errors import DalsegnoError
from dalsegno.inject.faults import FaultOptions, InjectableFault, InjectedFault
from dalsegno.runs.status import RunPhase, read_status
from tests.cli.runs import make_run, tell


class Bench:
    """Nodes into which faults can be injected. A power cut leaves no lasting fault."""

    def __init__(self, *faults: InjectedFault) -> None:
        self.faults = {(each.fault, each.node): each for each in faults}

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> dict[str, Any]:
        if fault.name != "power-off":
            self.faults[fault.name, node] = InjectedFault(fault.name, node, time.time())
        return {}

    def injected(self) -> Sequence[InjectedFault]:
        return list(self.faults.values())

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        if node == "stuck":
            raise DalsegnoError("stuck is being replaced", hint="wait")
        return [self.faults.pop(key) for key in list(self.faults) if key[1] == node and fault in (None, key[0])]


def test_drill_undoes_only_its_own_faults():
    others = (
        InjectedFault("gpu-lost", "n1", 1.0),
        InjectedFault("bad-replacement", "n2", 1.0),
        InjectedFault("xid", "n3", 1.0),
    )
    bench, said = Bench(*others), list[str]()
    traces = Traces(bench)
    with traces.removed(said.append):
        traces.inject(FaultKind("xid", FaultOptions(code=79)), "n1")
        traces.inject(FaultKind("agent-dead"), "n2")
    assert bench.injected() == list(others) and said == []


def test_runs_of_a_successful_drill_are_removed_and_other_runs_are_kept(tmp_path: Path):
    run, others = make_run(tmp_path), make_run(tmp_path, "train-x")
    gone = make_run(tmp_path, "drill-gone")
    traces = Traces(Bench(), runs=[run, gone])
    shutil.rmtree(gone.root)  # another process has already removed it
    traces.discard(tmp_path)
    assert not run.root.exists() and others.root.is_dir()


def test_interrupted_drill_cancels_its_run_and_reports_its_cleanup_in_one_line(tmp_path: Path):
    run, never_begun = make_run(tmp_path), make_run(tmp_path, "drill-other")
    tell(run, phase=RunPhase.RUNNING)
    never_begun.status.unlink()
    bench, said = Bench(), list[str]()
    traces = Traces(bench, runs=[run, never_begun])
    with pytest.raises(KeyboardInterrupt), traces.removed(said.append):
        traces.inject(FaultKind("power-off"), "n1")
        traces.inject(FaultKind("agent-dead"), "n2")
        traces.inject(FaultKind("agent-dead"), "stuck")
        raise KeyboardInterrupt
    ended = read_status(run.status)
    assert ended is not None and (ended.phase, ended.message) == (RunPhase.ENDED, "cancelled")
    assert said == [
        f"the drill is cut short: run {run.run} is cancelled; agent-dead on n2 is undone; "
        "agent-dead on stuck is not undone: stuck is being replaced; "
        "n1 may still be off: the controller repairs it if it may, and `dalsegno up` boots it"
    ]
