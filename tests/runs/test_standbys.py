"""Standby workers: when they are ordered, which reports count, and how the agent uses and drops them."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dalsegno.runs.agent.gpu_use import MAX_SETTINGS, changed_settings, read_gpu_use
from dalsegno.runs.agent.orders import StandbyOrder, read_standby
from dalsegno.runs.agent.standbys import Standbys, hand_over
from dalsegno.runs.coordinator.agents.messages import read_message
from dalsegno.runs.coordinator.generations.events import AgentJoined, StoreOpened
from dalsegno.runs.coordinator.generations.generations import Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import (
    FIRST_STEPS,
    WARM_UP_S,
    GpuUse,
    StandbyMode,
    StandbyPlan,
    StandbyReady,
)
from dalsegno.wire.frames import Reader, send

USE = GpuUse({"NCCL_DEBUG": "INFO"}, "nccl")


def running(*agents: str) -> Run:
    """Return a run whose first generation runs on n1; other agents are spares."""
    run = Run(Shape(1, 1, 2), 3)
    for agent in agents:
        run, _ = advance(run, AgentJoined(agent))
    run, _ = advance(run, StoreOpened("n1", run.generation, 29400))
    return run


def after_steps(mode: StandbyMode = StandbyMode.AUTO, steps: int = FIRST_STEPS) -> StandbyPlan:
    plan = StandbyPlan(mode)
    for step in range(steps):
        plan.record_step(1, step)
        plan.record_step(1, step)  # another rank reports the same step
    return plan


def test_standbys_are_ordered_once_after_the_first_steps_of_gpu_workers():
    plan, run = after_steps(), running("n1", "n2")
    plan.record(USE)
    assert sorted(plan.due(run, 1.0)) == ["n1", "n2"], "the spare prepares them too"
    assert plan.due(run, 2.0) == []


def test_standbys_wait_for_the_first_steps_or_the_warm_up_time():
    plan, run = after_steps(steps=FIRST_STEPS - 1), running("n1")
    plan.record(USE)
    assert plan.due(run, WARM_UP_S - 0.1) == []
    assert plan.due(run, WARM_UP_S) == ["n1"]


def test_workers_without_gpus_get_standbys_only_if_asked():
    run = running("n1")
    assert after_steps().due(run, WARM_UP_S) == []
    assert after_steps(StandbyMode.ON).due(run, WARM_UP_S) == ["n1"]
    off = after_steps(StandbyMode.OFF)
    off.record(USE)
    assert off.due(run, WARM_UP_S) == []


def test_script_that_replaces_the_allocator_gets_no_standbys_and_says_so_once():
    plan = after_steps()
    unfit = GpuUse(unfit="the script uses the allocator pluggable")
    assert plan.record(unfit) == "no standby workers: the script uses the allocator pluggable"
    assert plan.record(unfit) == ""
    assert plan.due(running("n1"), WARM_UP_S) == []


def test_memory_of_standbys_is_reported_once():
    plan = after_steps()
    assert plan.record(StandbyReady(887)) == "standby workers are ready; each holds about 887 MiB of its GPU's memory"
    assert plan.record(StandbyReady(887)) == ""


def test_order_survives_the_wire():
    plan = after_steps()
    plan.record(USE)
    order = read_standby(plan.message([{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}])["standby"])
    assert order == StandbyOrder(({"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}), True, "nccl", {"NCCL_DEBUG": "INFO"})


def test_report_names_only_settings_that_the_script_changed():
    before = {"NCCL_DEBUG": "WARN", "CUDA_HOME": "/opt", "PATH": "/bin", "NCCL_ALGO": "Ring"}
    now = {"NCCL_DEBUG": "INFO", "CUDA_HOME": "/opt", "PATH": "/usr/bin"}
    assert changed_settings(before, now) == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": None}


def test_report_of_a_worker_is_bounded():
    data = {f"NCCL_{number}": "x" for number in range(200)}
    found = read_gpu_use({"env": {**data, "LD_PRELOAD": "x"}, "backend": "mpi", "unfit": "u" * 1000})
    assert len(found["env"]) == MAX_SETTINGS and (found["backend"], len(found["unfit"])) == ("", 200)
    assert "LD_PRELOAD" not in read_gpu_use({"env": {"LD_PRELOAD": "x"}})["env"]
    message = read_message({"gpu": read_gpu_use({"env": {"NCCL_ALGO": None}, "backend": "nccl"})})
    assert message == GpuUse({"NCCL_ALGO": None}, "nccl")


@pytest.mark.parametrize("data", [None, [], {}, {"env": 3}, "x"])
def test_report_that_is_not_one_is_refused(data: Any):
    with pytest.raises(ValueError, match="not a report"):
        read_gpu_use(data)


class PlayedParent:
    """Simulates the warm parent and its standbys. It keeps the task and the connection of each standby."""

    def __init__(self) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}
        self.connections: dict[str, socket.socket] = {}
        self.sent: list[dict[str, Any]] = []
        self.selector = selectors.DefaultSelector()
        self.standbys = Standbys("n1", self.selector, self._fork, self.sent.append)

    def _fork(self, name: str, task: dict[str, Any], files: Sequence[int]) -> None:
        self.tasks[name] = task
        self.connections[name] = socket.socket(fileno=os.dup(files[0]))

    def answer(self, name: str, outcome: dict[str, Any]) -> None:
        send(self.connections[name], {"standby": outcome})
        self.turn()

    def turn(self) -> None:
        for key, _ in self.selector.select(0):
            key.data()

    def prepare(self, *envs: dict[str, str], changes: dict[str, str | None] | None = None) -> None:
        self.standbys.prepare(StandbyOrder(envs, True, "nccl", changes or {}), {"PATH": "/bin"})
        for rank in range(len(envs)):
            self.standbys.forked(rank, 100 + rank)


ENV = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1", "RANK": "4"}


def test_ready_standby_is_handed_the_script_and_used_up():
    parent = PlayedParent()
    parent.prepare(ENV)
    assert parent.standbys.take(0, {**ENV, "RANK": "7"}) is None, "it is not ready yet"
    parent.answer("standby:0", {"mib": 900})
    assert parent.sent == [{"standby": {"mib": 900}}] and parent.standbys.pids == [100]
    standby = parent.standbys.take(0, {**ENV, "RANK": "7"})
    assert standby is not None and hand_over(standby, {"script": "train.py"})
    (order,) = Reader().feed(parent.connections["standby:0"].recv(65536))
    assert order == {"go": {"script": "train.py"}}
    assert parent.standbys.take(0, ENV) is None and parent.standbys.pids == []


def test_standby_starts_with_the_settings_that_the_script_makes():
    parent = PlayedParent()
    parent.prepare({**ENV, "NCCL_ALGO": "Ring"}, changes={"NCCL_DEBUG": "INFO", "NCCL_ALGO": None})
    task = parent.tasks["standby:0"]
    assert (task["env"]["NCCL_DEBUG"], "NCCL_ALGO" in task["env"], task["env"]["PATH"]) == ("INFO", False, "/bin")
    parent.answer("standby:0", {"mib": 900})
    assert parent.standbys.take(0, {**ENV, "NCCL_ALGO": "Ring"}) is not None


def test_standby_with_other_devices_is_dropped():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    assert parent.standbys.take(0, {**ENV, "CUDA_VISIBLE_DEVICES": "2,3"}) is None
    assert parent.connections["standby:0"].recv(10) == b"", "its connection is closed, so it ends"


def test_standbys_that_cannot_be_prepared_are_given_up_with_one_line():
    parent = PlayedParent()
    parent.prepare(ENV, {**ENV, "LOCAL_RANK": "1"})
    parent.answer("standby:0", {"why": "GPU 0 has only 300 MiB of free memory"})
    assert parent.sent == [{"note": "no standby workers on n1: GPU 0 has only 300 MiB of free memory"}]
    assert parent.connections["standby:1"].recv(10) == b""
    parent.tasks.clear()
    parent.prepare(ENV)
    assert parent.tasks == {} and len(parent.sent) == 1


def test_worker_without_gpu_memory_drops_the_standbys():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    parent.standbys.note_end({"code": 1, "traceback": "RuntimeError: x"})
    assert parent.standbys.pids == [100]
    parent.standbys.note_end({"code": 1, "traceback": "torch.OutOfMemoryError: CUDA out of memory."})
    assert parent.standbys.pids == []
    assert parent.sent[-1] == {"note": "no standby workers on n1: a worker ran out of GPU memory"}


def test_standby_that_died_is_replaced_by_the_next_order():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.connections["standby:0"].close()
    parent.turn()
    assert parent.standbys.take(0, ENV) is None
    parent.tasks.clear()
    parent.prepare(ENV)
    assert list(parent.tasks) == ["standby:0"]


def test_standby_that_dies_before_the_hand_over_is_noticed(tmp_path: Path):
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    standby = parent.standbys.take(0, ENV)
    parent.connections["standby:0"].close()
    assert standby is not None and not hand_over(standby, {"script": "x"})
