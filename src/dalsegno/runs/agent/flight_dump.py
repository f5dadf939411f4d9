"""Dump PyTorch's flight recorder to a file when the agent asks, from a thread of the worker.

The thread sleeps until a request arrives. It works even if the main thread is inside a collective, because PyTorch
releases the GIL there. For NCCL, PyTorch also writes a dump of its own when a collective times out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

MAX_DUMPS = 100  # limit on dumps per worker
_CREDENTIALS = struct.Struct("iII")  # fields: pid, uid, gid
OWN_S = 1.0  # how long an ending worker waits for its own dump
KEPT = 32  # number of most recent calls in a dump, per process group
DUMP_PREFIX, OLD_PREFIX = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"  # torch appends the rank
BUFFER, OLD_BUFFER = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"  # number of calls that torch records
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
RENAMED_IN = (2, 9)  # from this version on, torch warns about the old names
RECORDED_CALLS = "2000"  # the default of the torch versions that record calls by default
# torch's dump functions: the first for NCCL, the second for other backends
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def serve_dumps(name: str, path: str, with_settings: bool = True) -> None:
    """Start the thread that writes dumps.

    It receives requests on the abstract socket `name` and appends dumps to the file `path`. With `with_settings`, torch
    writes its own dumps beside that file.
    """
    if with_settings:
        os.environ.update(recorder_settings(own_prefix(path), _torch_version(), os.environ))
    with contextlib.suppress(OSError, RuntimeError):  # if the thread cannot be started, the script runs without it
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind(f"\0{name}")
        # Calls made before the script starts are omitted, because they belong to the preparation of a standby worker.
        args = (sock, path, time.time_ns())
        threading.Thread(target=_serve, args=args, name="flight-dump", daemon=True).start()


def is_collective_timeout(error: BaseException) -> bool:
    """Return whether gloo raised this error because another rank did not arrive. NCCL ends the process instead."""
    return re.search(r"Timed out waiting \d+ ?ms for (recv|send)", str(error)) is not None


def dump_own(name: str, path: str) -> None:
    """Let the dump thread write this process's dump, and wait briefly. Only that thread knows when the script began."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(b"?", f"\0{name}")
        until = time.monotonic() + OWN_S
        while time.monotonic() < until and not (os.path.exists(path) and os.path.getsize(path)):
            time.sleep(0.005)


def recorder_settings(prefix: str, version: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make torch record calls, and write its own dumps to files with this prefix.

    Older versions of torch record and write nothing by default. Variables in `env`, the user's own, are not changed. If
    torch's version is unknown (""), both names of a variable are set; a newer torch then warns about the old one.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    is_new = numbers is not None and (int(numbers[1]), int(numbers[2])) >= RENAMED_IN
    places = (0,) if is_new else (1,) if numbers else (0, 1)
    wanted = {(DUMP_PREFIX, OLD_PREFIX): prefix, (BUFFER, OLD_BUFFER): RECORDED_CALLS}
    settings = {
        names[place]: value
        for names, value in wanted.items()
        if not any(name in env for name in names)
        for place in places
    }
    return settings if DUMP_ON_TIMEOUT in env else {**settings, DUMP_ON_TIMEOUT: "1"}


def _torch_version() -> str:
    """Return the version of torch, without importing it; "" if there is no torch."""
    if "torch" in sys.modules:
        return str(getattr(sys.modules["torch"], "__version__", ""))
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            return read_torch_version(os.path.dirname(spec.origin))
    return ""


def read_torch_version(folder: str) -> str:
    """Return the version of torch in its folder; "" if it cannot be read."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "version.py")) as file:
        found = re.search(r"^__version__ = ['\"]([^'\"]+)", file.read(4096), re.MULTILINE)
        return found[1] if found else ""
    return ""


def own_prefix(path: str) -> str:
    """Return the prefix of the paths to which torch writes its own dumps.

    Those dumps are in the same folder as ours, but have no `.json` in their names.
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, name.rpartition("-")[0] + "-")


def _serve(sock: socket.socket, path: str, since_ns: int) -> None:
    asked = 0
    while asked < MAX_DUMPS:
        try:
            _, sent, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            return
        if not _is_own_user(sent):
            continue
        asked += 1
        with contextlib.suppress(Exception):  # these functions are private to torch and may raise any exception
            line = json.dumps(read_recorder(since_ns)) + "\n"
            with open(path, "a") as file:
                file.write(line)


def _is_own_user(sent: Sequence[tuple[int, int, bytes]]) -> bool:
    """Return whether this user or root sent a message.

    This check is needed because all users can see abstract socket names.
    """
    found = [data for level, kind, data in sent if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)]
    return bool(found) and _CREDENTIALS.unpack(found[0][: _CREDENTIALS.size])[1] in (0, os.getuid())


def read_recorder(since_ns: int) -> dict[str, Any]:
    """Return the most recent collectives of each process group, in the format of torch's own dump.

    Collectives that began before `since_ns` are omitted.
    """
    torch = sys.modules.get("torch._C._distributed_c10d")
    dumps = [json.loads(getattr(torch, name)()) for name in _DUMPS if hasattr(torch, name)]
    entries = [
        entry for dump in dumps for entry in dump.get("entries") or () if entry.get("time_created_ns", 0) >= since_ns
    ]
    groups: dict[str, list[Any]] = {}
    for entry in entries:
        groups.setdefault(str(entry.get("process_group")), []).append(entry)
    config = {name: group for dump in dumps for name, group in (dump.get("pg_config") or {}).items()}
    return {
        "version": next((dump["version"] for dump in dumps if "version" in dump), ""),
        "pg_config": config,
        "entries": [entry for group in groups.values() for entry in group[-KEPT:]],
    }
