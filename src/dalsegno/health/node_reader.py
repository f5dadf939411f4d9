"""Read a node for its checks: files, commands and the GPU library. The node is real, or recorded in a folder.

In a recording, `proc/meminfo` stands for /proc/meminfo, and `commands/df` for the output of `df`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from dalsegno.health.expected import Expected
from dalsegno.health.facts import GpuFacts, SeenBefore
from dalsegno.health.readers.nvml import Nvml
from dalsegno.system import hanging_calls
from dalsegno.system.hanging_calls import AbandonableCall, NoAnswer
from dalsegno.system.kernel import KernelLog, greatest_error_s, listening_ports, parse_listening
from dalsegno.system.machine import program
from dalsegno.system.network import nfs_answers
from dalsegno.system.processes import Completed
from dalsegno.wire.instance_metadata import InstanceMetadata, NoMetadata

NVML_TIMEOUT_S = 6.0
MAX_PACE_S = 1.0
SAME_ROUND_S = 0.3
NVML_SHARE, NVML_MAX_AGE_S = 0.005, 10.0  # maximum share of time spent on queries, and maximum age of a reused answer
DETAILS_MAX_AGE_S = 20.0  # maximum age of values for metrics; dcgm-exporter queries them every 30 s
OPENED_S = 2.0  # maximum age of the first answer, which is slow only because the library is opened
Gpus = tuple[GpuFacts, ...] | None  # None if there is no library or no driver


class NodeReader(Protocol):
    """Reads a node for its checks. `seen` holds earlier observations, for checks that need a history."""

    expected: Expected
    env: Mapping[str, str]
    seen: SeenBefore

    def now(self) -> float: ...

    def read(self, path: str) -> str:
        """Return a file's text; raise NoAnswer if it cannot be read."""
        ...

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        ...

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 5.0) -> Completed:
        """Run a command in a separate process; raise NoAnswer if it is not installed, and TooLate if it hangs."""
        ...

    def pace_s(self) -> float:
        """Return how long it takes to run an empty program now."""
        ...

    def has(self, program: str) -> bool: ...

    def listening(self) -> set[int]:
        """Return the ports with listeners."""
        ...

    def nfs_answers(self, address: str, port: int, version: int, *, timeout_s: float) -> bool:
        """Return whether an NFS server answers an empty request; raise NoAnswer if there was too little time to ask."""
        ...

    def kernel_records(self) -> list[str]:
        """Return the new records of the kernel log, in the form of /dev/kmsg."""
        ...

    def clock_error_s(self) -> float:
        """Return the largest possible error of the kernel's clock."""
        ...

    def nvml(self, detailed: bool = False) -> Gpus:
        """Return the GPUs as NVML reports them; None without the library or driver.

        `detailed` adds values that the metrics need, but no check does. They may be older than the others.
        """
        ...

    def metadata(self, path: str) -> str | None:
        """Return an item of the cloud's metadata service; None if it is missing. Raise NoAnswer if no answer comes."""
        ...


class LocalNode:
    """The local node. `gpus` queries NVML, by default within this process.

    `until` (monotonic) is a deadline for all reads and commands together.
    """

    def __init__(
        self, expected: Expected, env: Mapping[str, str] = os.environ, gpus: Callable[[], Gpus] | None = None
    ) -> None:
        self.expected, self.env, self.seen = expected, env, SeenBefore()
        self._log, self._nvml = KernelLog(), Nvml()
        # Checks and metrics query NVML separately: metrics need more values, which take twice as long to read.
        self._patient = {
            detailed: AbandonableCall("NVML", gpus or partial(self._nvml.read, detailed)) for detailed in (False, True)
        }
        self._gpus: dict[bool, tuple[float, Gpus]] = {}
        self.until = math.inf
        self._metadata = InstanceMetadata()

    def now(self) -> float:
        return time.time()

    def read(self, path: str) -> str:
        try:
            with open(path, errors="replace") as file:
                return file.read()
        except OSError as error:
            raise NoAnswer(f"{path}: {error.strerror or error}") from error

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 5.0) -> Completed:
        plain = {name: value for name, value in self.env.items() if name != "LD_PRELOAD"}
        left_s = self._left(timeout_s)
        try:
            return hanging_calls.ask(argv, stdin=stdin, env={**plain, "LC_ALL": "C.UTF-8"}, timeout_s=left_s)
        except hanging_calls.TooLate as error:
            if left_s < timeout_s:  # the deadline `until` ended the command, so a timeout is not the command's fault
                raise NoAnswer("not run: out of time") from error
            raise

    def pace_s(self) -> float:
        return hanging_calls.pace_s(most_s=self._left(MAX_PACE_S))

    def _left(self, timeout_s: float) -> float:
        left = min(timeout_s, self.until - time.monotonic())
        if left <= 0:
            raise NoAnswer("not run: out of time")
        return left

    def has(self, name: str) -> bool:
        return program(name) is not None

    def listening(self) -> set[int]:
        try:
            return listening_ports()
        except OSError:  # the kernel does not support the netlink request
            return parse_listening(self.read("/proc/net/tcp"))

    def nfs_answers(self, address: str, port: int, version: int, *, timeout_s: float) -> bool:
        left_s = self._left(timeout_s)
        answers = nfs_answers(address, port, version, left_s)
        if not answers and left_s < timeout_s:  # the server had less time than it may take
            raise NoAnswer("not run: out of time")
        return answers

    def kernel_records(self) -> list[str]:
        try:
            return self._log.new_records()
        except OSError as error:
            raise NoAnswer(f"the kernel log cannot be read: {error.strerror or error}") from error

    def clock_error_s(self) -> float:
        try:
            return greatest_error_s()
        except (OSError, AttributeError) as error:
            raise NoAnswer(f"adjtimex: {error}") from error

    def nvml(self, detailed: bool = False) -> Gpus:
        """Return the GPUs. All checks of one round share the answer.

        If the query took long, its answer is reused for longer: querying eight GPUs every second would cost more than
        all other checks.
        """
        began = time.monotonic()
        until, found = self._gpus.get(detailed, (-math.inf, None))
        if began >= until:
            oldest_s = OPENED_S if not self._gpus else DETAILS_MAX_AGE_S if detailed else NVML_MAX_AGE_S
            found = self._patient[detailed].within(self._left(NVML_TIMEOUT_S))
            self._gpus[detailed] = began + good_for_s(time.monotonic() - began, oldest_s), found
        return found

    def metadata(self, path: str) -> str | None:
        try:
            return self._metadata.get(path)
        except NoMetadata as error:
            raise NoAnswer(str(error)) from error

    def close(self) -> None:
        """Release the log, and the GPUs so that they can be reset. The next round opens them again."""
        self._gpus = {}
        self._nvml.close()
        self._log.close()


def good_for_s(took_s: float, oldest_s: float = NVML_MAX_AGE_S) -> float:
    """Return how long an answer from NVML is reused. The longer a query took, the longer its answer is reused."""
    return min(max(took_s / NVML_SHARE, SAME_ROUND_S), oldest_s)


class RecordedNode:
    """A node recorded in a folder, for tests.

    A command's file is named after its first words, with `.exit2` appended for exit code 2, or `.hangs` if it hangs.
    The files `env`, `now` and `pace_s` contain the environment, the time and the time that an empty program takes.
    `nfs_servers_away` lists the NFS servers that do not answer.
    `metadata/` contains the items of the cloud's metadata service.
    """

    def __init__(self, folder: Path, expected: Expected, seen: SeenBefore | None = None) -> None:
        self.folder, self.expected, self.seen = folder, expected, seen or SeenBefore()
        self.env: Mapping[str, str] = dict(line.split("=", 1) for line in self._lines("env"))
        if (folder / "telemetry.json").exists():
            self.env = {**self.env, "DALSEGNO_TELEMETRY": "/telemetry.json"}
        if (folder / "cloud.json").exists():
            self.expected = replace(expected, cloud_file="/cloud.json")

    def now(self) -> float:
        return float(next(iter(self._lines("now")), "1700000000"))

    def read(self, path: str) -> str:
        try:
            return (self.folder / path.lstrip("/")).read_text(errors="replace")
        except OSError as error:
            raise NoAnswer(f"{path}: {error.strerror}") from error

    def names(self, path: str) -> list[str]:
        folder = self.folder / path.lstrip("/")
        return sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 5.0) -> Completed:
        command = " ".join(argv)
        files = (path for path in (self.folder / "commands").glob("*") if command.startswith(_parse_name(path)[0]))
        file = max(files, key=lambda path: len(path.name), default=None)
        if file is None:
            raise NoAnswer(f"`{argv[0]}` is not installed")
        if file.name.endswith(".hangs"):
            raise hanging_calls.TooLate(f"`{command}` gave no answer within {timeout_s:g} s")
        return Completed(tuple(argv), _parse_name(file)[1], file.read_text(errors="replace"))

    def pace_s(self) -> float:
        return float(next(iter(self._lines("pace_s")), "0.005"))

    def has(self, program: str) -> bool:
        return any(name.split(" ")[0].split(".")[0] == program for name in self.names("/commands"))

    def listening(self) -> set[int]:
        return parse_listening(self.read("/proc/net/tcp"))

    def nfs_answers(self, address: str, port: int, version: int, *, timeout_s: float) -> bool:
        return address not in self._lines("nfs_servers_away")

    def kernel_records(self) -> list[str]:
        return self.read("/dev/kmsg").splitlines()

    def clock_error_s(self) -> float:
        return float(self.read("/clock_error_s"))

    def nvml(self, detailed: bool = False) -> Gpus:
        return None

    def metadata(self, path: str) -> str | None:
        """Return the file below `metadata/`; None if it is missing. Raise NoAnswer if the folder is missing."""
        if not (self.folder / "metadata").is_dir():
            raise NoAnswer("the metadata service does not answer")
        file = self.folder / "metadata" / path
        return file.read_text() if file.exists() else None

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def _parse_name(path: Path) -> tuple[str, int]:
    """Return a command's first words and its exit code. `+` in the file name stands for a slash."""
    command, _, code = path.name.replace("+", "/").removesuffix(".hangs").partition(".exit")
    return command, int(code or 0)
