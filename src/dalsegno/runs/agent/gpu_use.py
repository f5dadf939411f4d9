"""Report to the agent how a worker uses its GPU, so that standby workers are prepared in the same way.

CUDA and NCCL read their settings once, when they start. A script may set such variables itself, for example NCCL_DEBUG.
A standby worker has started CUDA before it runs the script, so it needs these variables earlier.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Container, Mapping
from typing import Any

from dalsegno.train.contract import AGENT
from dalsegno.train.groups import keep_new_groups
from dalsegno.wire.frames import Message, send

SETTINGS = ("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_", "PYTORCH_", "TORCH_", "FI_", "UCX_", "HIP_", "HSA_")
MAX_SETTINGS, MAX_VALUE_CHARS = 64, 4096
REPORTERS = ("dalsegno.train.checkpointer", "dalsegno.train.step_report")  # modules that report steps
ALLOCATORS = ("native", "cudaMallocAsync")
SEND_S = 1.0


def settings_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that CUDA, NCCL and their libraries read when they start."""
    return {name: value for name, value in env.items() if name.startswith(SETTINGS)}


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the settings that the script has changed since it started; None for those that it removed."""
    old, new = settings_of(before), settings_of(now)
    changed: dict[str, str | None] = {name: value for name, value in new.items() if old.get(name) != value}
    changed.update(dict.fromkeys(old.keys() - new.keys()))
    return changed


def has_reporter(modules: Container[str]) -> bool:
    """Return whether a process with these modules can report steps."""
    return any(module in modules for module in REPORTERS)


def report_gpu_use(env: Mapping[str, str]) -> None:
    """Report when the script starts CUDA, and again when it creates a process group.

    `env` is the script's current environment.
    """
    report = GpuReport(dict(env))
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    call_when_started = getattr(cuda, "_lazy_call", None)
    if call_when_started is not None:
        with contextlib.suppress(Exception):  # this function is private to torch, and the report is optional
            call_when_started(report.send)
    keep_new_groups(report.add_group)


class GpuReport:
    """A worker's report about its GPU: changed settings, the backend, and whether a standby can replace the worker."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env, self._backend = env, ""

    def add_group(self, group: Any) -> None:
        """Report that a process group was created, if CUDA has started."""
        with contextlib.suppress(Exception):  # the report is optional, so a failure must not end the script
            if "nccl" in sys.modules["torch"].distributed.get_backend(group):
                self._backend = "nccl"
            if sys.modules["torch"].cuda.is_initialized():
                self.send()

    def send(self) -> None:
        with contextlib.suppress(Exception):
            door = self._env.get(AGENT)
            if door:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.settimeout(SEND_S)
                    sock.connect("\0" + door)
                    send(sock, {"gpu": self.message()})

    def message(self) -> Message:
        allocator = str(sys.modules["torch"].cuda.get_allocator_backend())
        unfit = "" if allocator in ALLOCATORS else f"the script uses the allocator {allocator[:40]}"
        changes, reporter = changed_settings(self._env, os.environ), has_reporter(sys.modules)
        return {"env": changes, "backend": self._backend, "unfit": unfit, "reporter": reporter}


def read_gpu_use(data: Any) -> Message:
    """Parse a worker's report and limit its size.

    Raise ValueError for invalid values, because the report comes from user code.
    """
    if not isinstance(data, dict) or not isinstance(data.get("env"), dict):
        raise ValueError("not a report about a GPU")
    env: dict[str, str | None] = {
        str(name): None if value is None else str(value)
        for name, value in list(data["env"].items())[:MAX_SETTINGS]
        if str(name).startswith(SETTINGS) and len(str(name)) + len(str(value)) <= MAX_VALUE_CHARS
    }
    return {
        "env": env,
        "backend": "nccl" if data.get("backend") == "nccl" else "",
        "unfit": str(data.get("unfit") or "")[:200],
        "reporter": data.get("reporter") is True,
    }
