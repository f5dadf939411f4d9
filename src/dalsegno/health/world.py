"""What checks may ask of the node they run on: its files, its commands, its GPUs' library. The real one, and a folder
that plays one: `proc/meminfo` in it is /proc/meminfo, `commands/df` what `df` would say.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dalsegno.health.expected import Expected
from dalsegno.health.facts import GpuFacts, SeenBefore
from dalsegno.health.readers.nvml import Nvml
from dalsegno.system import apart
from dalsegno.system.apart import NoAnswer, Patient
from dalsegno.system.kernel import KernelLog, greatest_error_s, listening_ports, parse_listening
from dalsegno.system.machine import program
from dalsegno.system.processes import Completed

NVML_TIMEOUT_S = 6.0
MOST_PACE_S = 1.0
SAME_LOOK_S = 0.3
NVML_SHARE, NVML_OLDEST_S = 0.005, 10.0  # of a processor's time; and how old its answer may become for that
OPENED_S = 2.0  # the same of an answer that took long because the library was opened for it
Gpus = tuple[GpuFacts, ...] | None  # None: no library, or no driver


class NodeWorld(Protocol):
    """The node. `seen` is what earlier looks have found, for what shows only in time."""

    expected: Expected
    env: Mapping[str, str]
    seen: SeenBefore

    def now(self) -> float: ...

    def read(self, path: str) -> str:
        """A file's text; NoAnswer if it cannot be read."""
        ...

    def names(self, path: str) -> list[str]:
        """What is in a folder; nothing if there is none."""
        ...

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 5.0) -> Completed:
        """A command, in a process of its own. NoAnswer if it is missing; Late if it hangs."""
        ...

    def pace_s(self) -> float:
        """How long a program that does nothing takes here, now."""
        ...

    def has(self, program: str) -> bool: ...

    def listening(self) -> set[int]:
        """The ports on which somebody listens."""
        ...

    def kernel_records(self) -> list[str]:
        """The kernel's log since the last look, in the form of /dev/kmsg."""
        ...

    def clock_error_s(self) -> float:
        """By how much the kernel's clock may be off."""
        ...

    def nvml(self) -> Gpus:
        """The GPUs, from NVIDIA's library; None where it is not."""
        ...


class LocalNode:
    """The node that this runs on. `gpus` asks NVML; by default within this process.

    `until` (monotonic) is for who is in a hurry: no question is waited for longer, however much hangs.
    """

    def __init__(
        self, expected: Expected, env: Mapping[str, str] = os.environ, gpus: Callable[[], Gpus] | None = None
    ) -> None:
        self.expected, self.env, self.seen = expected, env, SeenBefore()
        self._log, self._nvml = KernelLog(), Nvml()
        self._patient = Patient("NVML", gpus or self._nvml.read)
        self._gpus: tuple[float, Gpus] = (-math.inf, None)
        self.until = math.inf

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
            return apart.ask(argv, stdin=stdin, env={**plain, "LC_ALL": "C.UTF-8"}, timeout_s=left_s)
        except apart.Late as error:
            if left_s < timeout_s:  # our own hurry, and no fault of what was asked
                raise NoAnswer("no time was left for it") from error
            raise

    def pace_s(self) -> float:
        return apart.pace_s(most_s=self._left(MOST_PACE_S))

    def _left(self, timeout_s: float) -> float:
        left = min(timeout_s, self.until - time.monotonic())
        if left <= 0:
            raise NoAnswer("no time was left for it")
        return left

    def has(self, name: str) -> bool:
        return program(name) is not None

    def listening(self) -> set[int]:
        try:
            return listening_ports()
        except OSError:  # a kernel that can only be read
            return parse_listening(self.read("/proc/net/tcp"))

    def kernel_records(self) -> list[str]:
        try:
            return self._log.new_records()
        except OSError as error:
            raise NoAnswer(f"the kernel's log may not be read: {error.strerror or error}") from error

    def clock_error_s(self) -> float:
        try:
            return greatest_error_s()
        except (OSError, AttributeError) as error:
            raise NoAnswer(f"adjtimex: {error}") from error

    def nvml(self) -> Gpus:
        """Several checks of one look share an answer. One that took long to get is used for longer: eight GPUs that are
        asked every second would cost more than all other checks together."""
        began = time.monotonic()
        if began >= self._gpus[0]:
            oldest_s = OPENED_S if self._gpus[0] == -math.inf else NVML_OLDEST_S
            found = self._patient.within(self._left(NVML_TIMEOUT_S))
            self._gpus = (began + min(good_for_s(time.monotonic() - began), oldest_s), found)
        return self._gpus[1]

    def close(self) -> None:
        """Let go of the GPUs, so that they can be reset, and of the log; the next look takes hold of them again."""
        self._gpus = (-math.inf, None)
        self._nvml.close()
        self._log.close()


def good_for_s(took_s: float) -> float:
    """How long an answer of NVML is used, so that asking it takes a small share of the time."""
    return min(max(took_s / NVML_SHARE, SAME_LOOK_S), NVML_OLDEST_S)


class FolderWorld:
    """A node played from a folder. A command's file is named by its first words, with `.exit2` after them if it fails
    so; `.hangs` makes it late. `env` is the environment, `now` the time, `pace_s` how slow the machine is."""

    def __init__(self, folder: Path, expected: Expected, seen: SeenBefore | None = None) -> None:
        self.folder, self.expected, self.seen = folder, expected, seen or SeenBefore()
        self.env: Mapping[str, str] = dict(line.split("=", 1) for line in self._lines("env"))
        if (folder / "telemetry.json").exists():
            self.env = {**self.env, "DALSEGNO_TELEMETRY": "/telemetry.json"}

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
        words = " ".join(argv)
        files = (path for path in (self.folder / "commands").glob("*") if words.startswith(_said(path)[0]))
        file = max(files, key=lambda path: len(path.name), default=None)
        if file is None:
            raise NoAnswer(f"`{argv[0]}` is not on this machine")
        if file.name.endswith(".hangs"):
            raise apart.Late(f"`{words}` gave no answer within {timeout_s:g} s")
        return Completed(tuple(argv), _said(file)[1], file.read_text(errors="replace"))

    def pace_s(self) -> float:
        return float(next(iter(self._lines("pace_s")), "0.005"))

    def has(self, program: str) -> bool:
        return any(name.split(" ")[0].split(".")[0] == program for name in self.names("/commands"))

    def listening(self) -> set[int]:
        return parse_listening(self.read("/proc/net/tcp"))

    def kernel_records(self) -> list[str]:
        return self.read("/dev/kmsg").splitlines()

    def clock_error_s(self) -> float:
        return float(self.read("/clock_error_s"))

    def nvml(self) -> Gpus:
        return None

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


def _said(path: Path) -> tuple[str, int]:
    """A command's first words, with `+` for the slash that no file's name can have, and its exit code."""
    words, _, code = path.name.replace("+", "/").removesuffix(".hangs").partition(".exit")
    return words, int(code or 0)
