"""Read how much each process uses its GPUs, through NVIDIA's library NVML.

This requires the Python package `nvidia-ml-py` where the agent runs. Without it, the coordinator judges workers by
their CPU time and I/O alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("run-agent")

DRIVER = "/dev/nvidiactl"  # exists where NVIDIA's driver is loaded
MAX_PERCENT = 100  # some drivers return larger values for processes that have ended


@dataclass(frozen=True)
class GpuLoad:
    """The use of a process's GPUs over several samples. Each share is a percentage of a sample's time."""

    least_sm: int  # lowest share of time in which a kernel ran
    most_memory: int  # highest share of time in which GPU memory was read or written; 0 in a waiting collective

    def joined(self, other: GpuLoad) -> GpuLoad:
        return GpuLoad(min(self.least_sm, other.least_sm), max(self.most_memory, other.most_memory))


def load_nvml() -> Any:
    """Return the module `pynvml`; None if there is no driver or no such module."""
    if os.path.exists(DRIVER):
        with contextlib.suppress(ImportError):
            import pynvml

            return pynvml
    return None


class GpuWatch:
    """Reads the load in a thread, because a faulty GPU may never answer. `take` never waits.

    The library is closed after each reading, because GPUs cannot be reset while it is open.
    """

    def __init__(self, load: Callable[[], Any] = load_nvml) -> None:
        self._load = load
        self._found: Mapping[int, GpuLoad] = {}
        self._seen: dict[int, int] = {}  # index of a GPU -> time of its newest sample, in the driver's clock
        self._usable = True
        self._thread: threading.Thread | None = None

    def take(self) -> Mapping[int, GpuLoad]:
        """Return the load that was read last, by PID, and start the next reading.

        Processes that have run no kernel are missing. The result is empty while a reading is still in progress.
        """
        if self._thread is not None and self._thread.is_alive():
            return {}
        found, self._found = self._found, {}
        if self._usable:
            self._thread = threading.Thread(target=self.look, name="gpus", daemon=True)
            self._thread.start()
        return found

    def join(self) -> None:
        """Wait until the current reading has ended."""
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Read the samples since the last call. Stop for good if the library is missing or cannot be used."""
        nvml = self._load()
        if nvml is None:
            self._usable = False
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            log.info("the use of GPUs cannot be read: %s", error)
            self._usable = False
            return
        try:
            self._found = self._read(nvml)
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _read(self, nvml: Any) -> Mapping[int, GpuLoad]:
        found: dict[int, GpuLoad] = {}
        with contextlib.suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                for sample in self._samples(nvml, index):
                    load = GpuLoad(int(sample.smUtil), int(sample.memUtil))
                    found[sample.pid] = found[sample.pid].joined(load) if sample.pid in found else load
        return found

    def _samples(self, nvml: Any, index: int) -> list[Any]:
        """Return the new valid samples of a GPU; none if the GPU does not report any, for example with MIG."""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._seen.get(index, 0))
        except (nvml.NVMLError, AttributeError):  # no new samples, or the library or driver is too old
            return []
        self._seen[index] = max([self._seen.get(index, 0), *(sample.timeStamp for sample in samples)])
        return [each for each in samples if max(each.smUtil, each.memUtil) <= MAX_PERCENT]


def load_of(pids: Iterable[int], loads: Mapping[int, GpuLoad]) -> list[int]:
    """Return the GPU load of a worker's processes as [least_sm, most_memory]; empty if none has run a kernel."""
    joined: GpuLoad | None = None
    for pid in pids:
        if pid in loads:
            joined = loads[pid].joined(joined) if joined else loads[pid]
    return [joined.least_sm, joined.most_memory] if joined else []
