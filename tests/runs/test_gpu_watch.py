"""Reading the use of GPUs by process, through a fake NVML."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from dalsegno.runs.agent.gpu_watch import GpuLoad, GpuWatch, load_of
from tests.waiting import eventually


def sample(pid: int, at: int, sm: int, memory: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, timeStamp=at, smUtil=sm, memUtil=memory)


class PlayedUtilization:
    """An NVML with some GPUs, given by their samples; None for a GPU that provides none."""

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: list[SimpleNamespace] | None, answers: bool = True) -> None:
        self.gpus, self.answers = gpus, answers
        self.opened = 0
        self.uses = 0

    def nvmlInit(self) -> None:
        self.uses += 1
        if not self.answers:
            raise self.NVMLError("driver not loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> list[SimpleNamespace]:
        found = [each for each in self.gpus[handle] or () if each.timeStamp > since]
        if not found:
            raise self.NVMLError("not found")
        return found


def loads(watch: GpuWatch) -> dict[int, GpuLoad]:
    """Return what the watch reads now."""
    watch.look()
    found = dict(watch.take())
    watch.join()
    return found


def test_samples_of_a_process_are_joined() -> None:
    nvml = PlayedUtilization(
        [sample(7, 1, 100, 0), sample(8, 1, 90, 30), sample(7, 2, 98, 0)], [sample(7, 1, 60, 2)], None
    )
    watch = GpuWatch(lambda: nvml)
    watch.look()
    assert watch.take() == {7: GpuLoad(60, 2), 8: GpuLoad(90, 30)}
    watch.join()
    assert nvml.opened == 0, "GPUs cannot be reset while the library is open"


def test_samples_are_read_once() -> None:
    samples = [sample(7, 5, 100, 20)]
    watch = GpuWatch(lambda: PlayedUtilization(samples))
    assert loads(watch) == {7: GpuLoad(100, 20)}
    assert loads(watch) == {}
    samples.append(sample(7, 6, 100, 0))
    assert loads(watch) == {7: GpuLoad(100, 0)}


def test_impossible_percentages_are_ignored() -> None:
    watch = GpuWatch(lambda: PlayedUtilization([sample(7, 1, 4_000_000, 0), sample(8, 1, 50, 1)]))
    assert loads(watch) == {8: GpuLoad(50, 1)}


def test_reading_runs_beside_the_caller_and_its_result_comes_next_time() -> None:
    nvml = PlayedUtilization([sample(7, 1, 100, 20)])
    watch = GpuWatch(lambda: nvml)
    assert watch.take() == {}
    watch.join()
    assert watch.take() == {7: GpuLoad(100, 20)}


def test_gpu_that_does_not_answer_delays_nobody() -> None:
    go, asked = threading.Event(), list[int]()

    def hang() -> None:
        asked.append(1)
        go.wait(60)

    watch = GpuWatch(hang)
    assert [dict(watch.take()) for _ in range(3)] == [{}] * 3
    eventually(lambda: asked)
    assert asked == [1], "one reading at a time"
    go.set()
    watch.join()


def test_machine_without_a_usable_driver_is_asked_once() -> None:
    refused, missing = PlayedUtilization(answers=False), list[int]()
    for watch in (GpuWatch(lambda: refused), GpuWatch(lambda: missing.append(1))):
        for _ in range(3):
            assert watch.take() == {}
            watch.join()
    assert refused.uses == 1 and missing == [1]


def test_load_of_a_worker_includes_its_children() -> None:
    loads = {7: GpuLoad(100, 0), 9: GpuLoad(95, 12)}
    assert load_of([7, 8, 9], loads) == [95, 12] and load_of([8], loads) == []
