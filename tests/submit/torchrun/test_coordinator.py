"""The coordinator of a torchrun command: its thread may end at any moment, and it prints instead of saving."""

from __future__ import annotations

import pytest

from dalsegno.runs.coordinator.generations.events import AgentJoined, GenerationStopped, Hung, StoreOpened
from dalsegno.runs.coordinator.generations.generations import Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import StandbyLost, StandbyMode, StandbyPlan, StandbyReady
from dalsegno.runs.torchrun.args import TorchrunArgs
from dalsegno.runs.torchrun.coordinator import CoordinatorThread, OutputWriter, TorchrunSite
from dalsegno.runs.torchrun.launch import read_hang_timeout_s
from dalsegno.runs.torchrun.rendezvous import ALONE, Keys


def test_ended_coordinator_accepts_leave_and_stop() -> None:
    keys, said = Keys("j", "h:1", None), list[str]()
    keys.make()
    hosted = CoordinatorThread(TorchrunSite(TorchrunArgs("train.py"), "j", "id", 1, ALONE), keys, said.append)
    assert hosted.open() > 0
    hosted.stop("seen enough")
    hosted.join(30)
    hosted.leave("SIGTERM")
    hosted.stop("seen more than enough")
    assert said == []


def test_each_lost_standby_worker_is_printed_and_other_notes_are_not() -> None:
    said = list[str]()
    output = OutputWriter(TorchrunSite(TorchrunArgs("train.py"), "j", "id", 1, ALONE), said.append)
    plan, agent = StandbyPlan(StandbyMode.ON), "0@gpu-1#4711"
    messages = [
        StandbyReady(887),
        StandbyReady(887),
        StandbyLost("standby worker 0 was killed by SIGKILL; the next worker is forked without it", 0),
        StandbyLost("standby worker 0 was killed by SIGKILL; the next worker is forked without it", 0),
        StandbyLost("no standby workers: a worker ran out of GPU memory"),
        StandbyLost("no standby workers: the CUDA driver is too old"),
    ]
    for message in messages:
        output.note_standby(plan.record(message, output.name_of(agent), 1, 20.0))
    output.note("modules are not preloaded on gpu-1: no torch")
    assert said == [
        "standby workers are ready; each holds about 887 MiB of its GPU's memory",
        "gpu-1: standby worker 0 was killed by SIGKILL; the next worker is forked without it",
        "gpu-1: standby worker 0 was killed by SIGKILL; the next worker is forked without it",
        "gpu-1: no standby workers: a worker ran out of GPU memory",
    ]


def test_nothing_is_said_about_standby_workers_while_the_nodes_leave() -> None:
    said = list[str]()
    output = OutputWriter(TorchrunSite(TorchrunArgs("train.py"), "j", "id", 1, ALONE), said.append)
    output.quiet = True
    output.note_standby("gpu-1: no standby workers: a worker ran out of GPU memory")
    assert said == []


def test_restart_after_a_hang_blames_no_rank() -> None:
    said, agent = list[str](), "0@gpu-1#4711"
    output = OutputWriter(TorchrunSite(TorchrunArgs("train.py"), "j", "id", 1, ALONE), said.append)
    run = Run(Shape(1, 1, 1), max_restarts=1, literal=True)
    hung = Hung(1, "no step for 60 s", 60.0)
    for event in (AgentJoined(agent), StoreOpened(agent, 1, 5000), hung, GenerationStopped(agent, 1)):
        run, _ = advance(run, event)
    output.generation(run)
    assert said == ["restarting on 1 node (1 of 1 restarts used): no step for 60 s"]


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("", None), ("90", 90), ("10m", 600), ("off", 0), ("0", 0)]
)
def test_hang_timeout_is_the_option_of_run(text: str | None, seconds: int | None) -> None:
    assert read_hang_timeout_s({} if text is None else {"DALSEGNO_RUN_HANG_TIMEOUT": text}) == seconds
