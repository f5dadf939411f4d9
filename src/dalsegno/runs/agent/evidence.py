"""Find out why a worker died or hangs: from error files, logs, the OOM count, /proc, stacks and flight recorders."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

from dalsegno.runs.agent.script import STACKS_SIGNAL

_TAIL_BYTES = 65536
# If a script cannot be parsed, Python prints no "Traceback" line, because there is no frame yet.
_NOT_PARSED = re.compile(r'^  File ".+", line \d+\n(?:    .*\n)*(?:Syntax|Indentation|Tab)Error: .*$', re.MULTILINE)
_COMPLAINT = re.compile(r"error|exception|fatal|cannot|can't|not found|no such|denied|invalid|usage:", re.IGNORECASE)
_START = "Traceback (most recent call last):"
# Messages of PyTorch, of CUDA, HIP and their libraries, and of NCCL, which allocates its buffers itself
_NO_GPU_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|hipErrorOutOfMemory"
    r"|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:host )?(?:alloc|calloc|malloc)"
)
MAX_CHARS = 8000
_LINE_CHARS = 300
MAX_ERROR_FILE_BYTES = 1 << 20
_LATEST = 1 << 33  # later times in an error file are wrong


def gather(log: str, error_file: str, since: int = 0) -> dict[str, Any]:
    """Return the `traceback` of a worker and the time `at` of its error. A key is missing if its value is unknown.

    Only torch's error file has the time. `since` is the offset in the log at which the worker's output begins.
    """
    recorded = _read_error_file(error_file)
    tail = "" if recorded.get("traceback") else _tail(log, since)
    traceback = recorded.get("traceback") or last_traceback(tail) or _not_parsed(tail)
    found = {"traceback": traceback[-MAX_CHARS:]} if traceback else {}
    return dict(found, at=recorded["at"]) if "at" in recorded else found


def lacked_gpu_memory(traceback: str) -> bool:
    """Return whether a worker ended because its GPU had no memory left."""
    return _NO_GPU_MEMORY.search(traceback) is not None


def last_error_line(log: str, since: int = 0) -> dict[str, Any]:
    """Return the last line of a log as `traceback` if it looks like an error, otherwise {}."""
    line = next((line.strip() for line in reversed(_tail(log, since).splitlines()) if line.strip()), "")
    return {"traceback": line[:_LINE_CHARS]} if _COMPLAINT.search(line) else {}


def _not_parsed(text: str) -> str:
    found = _NOT_PARSED.findall(text)
    return found[-1] if found else ""


def last_traceback(text: str) -> str:
    """Return the last traceback in a log, from its first line to the line of the exception; "" if there is none.

    Chained exceptions form one traceback, which starts with the first exception in the chain.
    """
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _bare(line).startswith(_START)]
    if not starts:
        return ""
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = " ".join(lines[earlier:first])
        if "During handling of the above exception" not in between and "was the direct cause" not in between:
            break
        first = earlier
    return "\n".join(lines[first : _end(lines, starts[-1])])


def _bare(line: str) -> str:
    """Return the line without a prefix such as torch's `[rank2]: `."""
    return line.partition("]: ")[2] if line.startswith("[rank") else line


def _end(lines: list[str], start: int) -> int:
    """Return the index after the last line of the traceback that begins at `start`.

    The last line is the next unindented line, such as `ValueError: …`.
    """
    for number in range(start + 1, len(lines)):
        line = _bare(lines[number])
        if line and not line[0].isspace():
            return number + 1
    return len(lines)


def open_regular(path: str) -> BinaryIO:
    """Open a regular file for reading; raise OSError for anything else.

    The user's code can create any file in its log folder, and a pipe must not block the agent.
    """
    return open(_open_regular(path, os.O_RDONLY), "rb")


def append_regular(path: str) -> BinaryIO:
    """Open a regular file to append to it, and create it if it is missing; raise OSError for anything else."""
    return open(_open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return handle


def _tail(path: str, since: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(since, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _read_error_file(path: str) -> dict[str, Any]:
    """Return the `traceback` and the time `at` from a worker's error file; {} if it is unreadable.

    `at` is 0 if it is missing or no plausible time. torch's `record` (elastic.multiprocessing.errors) writes the file.
    """
    unreadable = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
    with contextlib.suppress(*unreadable), open_regular(path) as file:
        message = json.loads(file.read(MAX_ERROR_FILE_BYTES))["message"]
        if isinstance(message, str):
            return {"traceback": message}
        extra = message.get("extraInfo") or {}
        traceback, at = extra.get("py_callstack") or message["message"], float(extra.get("timestamp") or 0)
        if isinstance(traceback, str):
            return {"traceback": traceback, "at": at if 0 <= at < _LATEST else 0.0}  # "nan" is a float, too
    return {}


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


# Facts from /proc, read without third-party libraries


def own_processes() -> list[int]:
    """Return the PIDs of this user's processes, except this one."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid() and int(name) != os.getpid():
                found.append(int(name))
    return found


def environment(pid: int) -> set[bytes]:
    """Return the initial environment of a process; empty if it is not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the PIDs of all living descendants, excluding zombies."""
    found, ask = [], children(pid)
    while ask:
        child = ask.pop()
        ask += children(child)
        if not is_zombie(child):
            found.append(child)
    return found


def is_zombie(pid: int) -> bool:
    return _state(pid) in (b"", b"Z", b"X")


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process."""
    return _state(pid) == b"T"


def is_blocked(pid: int) -> bool:
    """Return whether the process is in uninterruptible sleep, for example because a disk does not respond."""
    return _state(pid) == b"D"


def _state(pid: int) -> bytes:
    """Return the state of a process as ps shows it; b"" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for this signal. Without one, the signal would kill the process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            line = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def measure_work(pids: Iterable[int]) -> tuple[float, int]:
    """Return the CPU seconds of these processes and their ended children, and the bytes read and written by them.

    Pages of mapped files that are read from a disk count too.
    """
    ticks, moved = 0, 0
    for each in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{each}/stat", "rb") as file:
                ticks += sum(map(int, file.read().rpartition(b")")[2].split()[11:15]))
            with open(f"/proc/{each}/io", "rb") as file:
                moved += sum(int(line.split()[1]) for line in file if line.startswith((b"rchar", b"wchar", b"read_b")))
    return ticks / os.sysconf("SC_CLK_TCK"), moved


# Stacks of a hanging worker: from py-spy if it is installed, otherwise from the worker's faulthandler through a signal


WAIT_S = 1.0  # timeout for the first line of a dump
QUIET_S = 0.05  # a dump is complete after this time without new lines
PYSPY_S = 5.0


def capture_all(workers: Iterable[tuple[int, str]]) -> None:
    """Append the stacks of these processes, given as (pid, path), to their files, in parallel."""
    threads = [threading.Thread(target=capture, args=each) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def capture(pid: int, path: str) -> None:
    """Append the stacks of a process to a file, or a line that says why there are none."""
    with contextlib.suppress(OSError):  # the agent continues without stacks if the file cannot be written
        if not (_by_pyspy(pid, path) or _by_signal(pid, path)):
            with append_regular(path) as file:
                file.write(f"process {pid} {_why_silent(pid)}\n".encode())


def _why_silent(pid: int) -> str:
    if is_stopped(pid):
        return "was stopped (SIGSTOP) and cannot write its stacks; install py-spy to capture them"
    return "writes no stacks; install py-spy to capture them"


def _by_pyspy(pid: int, path: str) -> bool:
    program = shutil.which("py-spy")
    if program is None:
        return False
    with append_regular(path) as file, contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], stdout=file, stderr=subprocess.DEVNULL, timeout=PYSPY_S, check=False
        )
        return done.returncode == 0
    return False


def _by_signal(pid: int, path: str) -> bool:
    if not catches(pid, STACKS_SIGNAL):
        return False
    before = os.stat(path).st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    return _grows(path, before, WAIT_S) and _wait_quiet(path)


def _grows(path: str, size: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if os.stat(path).st_size > size:
            return True
        time.sleep(0.01)
    return False


def _wait_quiet(path: str) -> bool:
    until = time.monotonic() + WAIT_S
    while _grows(path, os.stat(path).st_size, QUIET_S) and time.monotonic() < until:
        pass
    return True


# Flight recorder dumps. Each worker writes its own dump (`flight_dump.py`) if it can


DUMP_S = 2.0  # timeout for the dumps of all workers


def request_dump(name: str) -> None:
    """Ask a worker for its dump. Do nothing if the worker has no thread that writes dumps."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(b"?", f"\0{name}")


def size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def await_dumps(workers: Sequence[tuple[int, str, int]]) -> None:
    """Wait until the workers have written their dumps, or until a timeout. Workers are given as (pid, path, size).

    A worker has written its dump when its file at `path` is larger than `size`, the size before the request. For each
    worker that wrote nothing, append the state of its process to its file.
    """
    until = time.monotonic() + DUMP_S
    silent = list(workers)
    while silent and time.monotonic() < until:
        silent = [each for each in silent if size_of(each[1]) <= each[2]]
        time.sleep(0.02 if silent else 0)
    for pid, path, _ in silent:
        with contextlib.suppress(OSError), append_regular(path) as file:
            file.write(json.dumps({"process": _state_name(pid)}).encode() + b"\n")


def _state_name(pid: int) -> str:
    if is_zombie(pid):
        return "gone"
    if is_stopped(pid):
        return "stopped"
    return "blocked" if is_blocked(pid) else "silent"
