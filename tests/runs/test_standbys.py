"""Standby workers: when they are ordered, which reports count, and how the agent uses and drops them."""

from __future__ import annotations

import importlib.util
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.runs.agent.gpu_use import MAX_SETTINGS, REPORTERS, changed_settings, read_gpu_use
from dalsegno.runs.agent.orders import StandbyOrder, read_standby
from dalsegno.runs.agent.standbys import Standbys
from dalsegno.runs.coordinator.agents.messages import read_message
from dalsegno.runs.coordinator.generations.events import AgentJoined, StoreOpened
from dalsegno.runs.coordinator.generations.generations import Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import (
    FIRST_STEPS,
    LATE_FIRST_STEPS_S,
    WARM_UP_S,
    GpuUse,
    StandbyLost,
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


def use(plan: StandbyPlan, use: GpuUse = USE, age_s: float = 0.0, generation: int = 1) -> str:
    """Let a worker report its use of GPUs."""
    return plan.record(use, "n1", generation, age_s)


def test_standbys_are_ordered_once_after_the_first_steps_of_gpu_workers():
    plan, run = after_steps(), running("n1", "n2")
    use(plan)
    assert sorted(plan.due(run, 1.0)) == ["n1", "n2"], "the spare prepares them too"
    assert plan.due(run, 2.0) == []


def test_script_that_reports_steps_gets_standbys_after_the_first_ones_however_long_they_take():
    plan, run = after_steps(steps=FIRST_STEPS - 1), running("n1")
    use(plan)
    assert plan.due(run, 100 * WARM_UP_S) == []
    plan.record_step(1, FIRST_STEPS)
    assert plan.due(run, 100 * WARM_UP_S) == ["n1"]


def test_script_that_reports_nothing_gets_standbys_some_time_after_the_start_of_cuda():
    plan, run = StandbyPlan(StandbyMode.AUTO), running("n1")
    assert plan.due(run, 300.0) == [], "it still loads its data"
    use(plan, age_s=300.0)
    use(plan, age_s=303.0)  # a process group
    assert plan.due(run, 303.0 + WARM_UP_S - 0.1) == []
    assert plan.due(run, 303.0 + WARM_UP_S) == ["n1"]


def test_script_that_can_report_steps_gets_time_for_its_first_one():
    plan, run = StandbyPlan(StandbyMode.AUTO), running("n1")
    use(plan, replace(USE, reporter=True), age_s=5.0)
    assert plan.due(run, LATE_FIRST_STEPS_S) == []
    assert plan.due(run, LATE_FIRST_STEPS_S + 5.0) == ["n1"], "it may have imported the reporter without using it"


def test_each_generation_starts_its_own_time():
    plan, run = StandbyPlan(StandbyMode.AUTO), running("n1")
    use(plan, age_s=1.0)
    assert plan.due(run, 1.0 + WARM_UP_S) == ["n1"]
    second = replace(run, generation=2)
    assert plan.due(second, 2 * WARM_UP_S) == [], "the new workers have not started CUDA yet"
    use(plan, age_s=0.1, generation=2)
    assert plan.due(second, 0.1 + WARM_UP_S) == ["n1"]


def test_first_report_of_a_generation_counts_although_the_plan_has_not_seen_the_generation():
    plan, run = StandbyPlan(StandbyMode.AUTO), running("n1")
    use(plan, age_s=1.0)
    plan.due(run, 2.0)
    use(plan, age_s=0.0, generation=2)  # a standby worker has started CUDA before the script begins
    assert plan.due(replace(run, generation=2), WARM_UP_S) == ["n1"]


EVENTS = st.lists(st.sampled_from(["step", "use", "tick", "restart"]), max_size=60)


@given(events=EVENTS, late_s=st.floats(0, 1000))
def test_script_that_has_reported_a_step_never_gets_standbys_before_its_first_steps(events: list[str], late_s: float):
    plan, run, age_s, steps = StandbyPlan(StandbyMode.AUTO), running("n1"), 0.0, 0
    plan.record_step(1, 0)
    run = replace(run, generation=2)
    for event in events:
        if event == "step":
            steps += 1
            plan.record_step(run.generation, steps)
        elif event == "use":
            use(plan, age_s=age_s, generation=run.generation)
        elif event == "restart":
            run, age_s, steps = replace(run, generation=run.generation + 1), 0.0, 0
        else:
            age_s += late_s
        assert steps >= FIRST_STEPS or plan.due(run, age_s) == []


def test_workers_without_gpus_get_standbys_only_if_asked():
    run = running("n1")
    assert after_steps().due(run, WARM_UP_S) == []
    assert after_steps(StandbyMode.ON).due(run, WARM_UP_S) == ["n1"]
    off = after_steps(StandbyMode.OFF)
    use(off)
    assert off.due(run, WARM_UP_S) == []


def test_script_that_replaces_the_allocator_gets_no_standbys_and_says_so_once():
    plan = after_steps()
    unfit = GpuUse(unfit="the script uses the allocator pluggable")
    assert use(plan, unfit) == "no standby workers: the script uses the allocator pluggable"
    assert use(plan, unfit) == ""
    assert plan.due(running("n1"), WARM_UP_S) == []


def test_memory_of_standbys_is_reported_once():
    plan = after_steps()
    line = "standby workers are ready; each holds about 887 MiB of its GPU's memory"
    assert plan.record(StandbyReady(887), "n1", 1, 20.0) == line
    assert plan.record(StandbyReady(887), "n2", 1, 20.0) == ""


def test_line_about_a_lost_standby_names_its_node():
    message = read_message(lost("no standby workers: a worker ran out of GPU memory"))
    assert message == StandbyLost("no standby workers: a worker ran out of GPU memory")
    assert after_steps().record(message, "n1", 1, 20.0) == "n1: no standby workers: a worker ran out of GPU memory"


def test_order_survives_the_wire():
    plan = after_steps()
    use(plan)
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
    assert read_message({"gpu": read_gpu_use({"env": {}, "reporter": True})}) == GpuUse(reporter=True)
    assert read_message({"gpu": read_gpu_use({"env": {}, "reporter": "x" * 1000})}) == GpuUse()


IMPORTS = """
import sys
import dalsegno.runs.agent.warm, dalsegno.runs.agent.script, dalsegno.runs.agent.standby_process
from dalsegno.runs.agent.gpu_use import has_reporter
print(has_reporter(sys.modules))
from dalsegno.train import report
print(has_reporter(sys.modules))
"""


def test_only_a_script_that_imports_a_reporter_can_report_steps():
    found = subprocess.run([sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
    assert all(importlib.util.find_spec(module) for module in REPORTERS)


@pytest.mark.parametrize("data", [None, [], {}, {"env": 3}, "x"])
def test_malformed_report_is_refused(data: Any):
    with pytest.raises(ValueError, match="not a report"):
        read_gpu_use(data)


class PlayedParent:
    """Simulates the warm parent and its standbys. It keeps the task and the connection of each standby."""

    def __init__(self) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}
        self.connections: dict[str, socket.socket] = {}
        self.sent: list[dict[str, Any]] = []
        self.selector = selectors.DefaultSelector()
        self.standbys = Standbys(self.selector, self._fork, self.sent.append)

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


def lost(text: str, local_rank: int | None = None) -> dict[str, Any]:
    """Return an agent's message about a standby that cannot be used."""
    return {"standby": {"lost": text, **({} if local_rank is None else {"local_rank": local_rank})}}


def test_ready_standby_is_handed_the_script_and_used_up():
    parent = PlayedParent()
    parent.prepare(ENV)
    assert parent.standbys.take(0, {**ENV, "RANK": "7"}) is None, "it is not ready yet"
    parent.answer("standby:0", {"mib": 900})
    assert parent.sent == [{"standby": {"mib": 900}}] and parent.standbys.pids == [100]
    task = {"script": "train.py", "env": {**ENV, "RANK": "7"}}
    assert parent.standbys.start(0, task) == 100
    (order,) = Reader().feed(parent.connections["standby:0"].recv(65536))
    assert order == {"go": task}
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


def test_standbys_that_cannot_be_prepared_are_abandoned_with_one_line():
    parent = PlayedParent()
    parent.prepare(ENV, {**ENV, "LOCAL_RANK": "1"})
    parent.answer("standby:0", {"why": "GPU 0 has only 300 MiB of free memory"})
    assert parent.sent == [lost("no standby workers: GPU 0 has only 300 MiB of free memory")]
    assert parent.connections["standby:1"].recv(10) == b""
    parent.tasks.clear()
    parent.prepare(ENV)
    assert parent.tasks == {} and len(parent.sent) == 1


NO_GPU_MEMORY = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 79.15 GiB total capacity)",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes",
]


@pytest.mark.parametrize("error", NO_GPU_MEMORY)
def test_worker_without_gpu_memory_drops_the_standbys(error: str):
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    parent.standbys.note_end({"code": 1, "traceback": "RuntimeError: x"})
    assert parent.standbys.pids == [100]
    parent.standbys.note_end({"code": 1, "traceback": error})
    assert parent.standbys.pids == []
    assert parent.sent[-1] == lost("no standby workers: a worker ran out of GPU memory")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'",
    ],
)
def test_worker_with_another_error_keeps_the_standbys(error: str):
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    parent.standbys.note_end({"code": 1, "traceback": error})
    assert parent.standbys.pids == [100]


@pytest.mark.parametrize(
    ("code", "how"),
    [(-9, "was killed by SIGKILL"), (-63, "was killed by signal 63"), (1, "ended with code 1")],
)
def test_standby_that_died_is_dropped_with_one_line_and_the_worker_is_forked(code: int, how: str):
    parent = PlayedParent()
    parent.prepare(ENV, {**ENV, "LOCAL_RANK": "1"})
    parent.answer("standby:0", {"mib": 900})
    parent.sent.clear()
    parent.connections["standby:0"].close()
    parent.turn()
    assert parent.standbys.start(0, {"env": ENV}) == 0
    parent.standbys.ended(100, code)
    parent.standbys.ended(7, -9)  # the end of another process
    assert parent.sent == [lost(f"standby worker 0 {how}; the next worker is forked without it", 0)]
    assert parent.standbys.pids == [101], "the standby of the other rank stays"


def test_standby_whose_end_is_reported_before_its_connection_breaks_is_dropped():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    parent.standbys.ended(100, -9)
    parent.turn()
    assert parent.standbys.pids == [] and "was killed by SIGKILL" in parent.sent[-1]["standby"]["lost"]


def test_standby_that_died_is_replaced_by_the_next_order():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.connections["standby:0"].close()
    parent.turn()
    parent.standbys.ended(100, -9)
    parent.tasks.clear()
    parent.prepare(ENV)
    assert list(parent.tasks) == ["standby:0"]


def test_standby_that_the_agent_ends_is_not_reported():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    parent.sent.clear()
    parent.standbys.drop()
    parent.standbys.ended(100, 0)
    assert parent.sent == []


def test_standby_is_used_only_once_its_pid_is_known():
    parent = PlayedParent()
    parent.standbys.prepare(StandbyOrder((ENV,), True, "nccl"), {})
    parent.answer("standby:0", {"mib": 900})
    assert parent.standbys.start(0, {"env": ENV}) == 0
    parent.standbys.forked(0, 100)
    assert parent.standbys.start(0, {"env": ENV}) == 100


def test_standby_that_dies_before_the_hand_over_is_noticed():
    parent = PlayedParent()
    parent.prepare(ENV)
    parent.answer("standby:0", {"mib": 900})
    parent.connections["standby:0"].close()
    assert parent.standbys.start(0, {"env": ENV}) == 0
    assert parent.sent[-1] == lost("standby worker 0 ended; the next worker is forked without it", 0)
