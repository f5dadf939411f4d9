"""Write PyTorch's flight recorder to a file when the agent asks, from a thread of the worker.

The thread sleeps until a request arrives. It works even if the main thread is inside a collective, because PyTorch
releases the GIL there. For NCCL, PyTorch also writes a dump of its own when a collective times out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

MAX_DUMPS = 100  # limit on dumps per worker
_CREDENTIALS = struct.Struct("iII")  # fields: pid, uid, gid
KEPT = 32  # number of most recent calls in a dump, per process group
DUMP_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank to it
OLD_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
# torch's dump functions: the first for NCCL, the second for other backends
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


def serve_dumps(name: str, path: str) -> None:
    """Start the thread that writes dumps.

    It receives requests on the abstract socket `name` and appends dumps to the file `path`.
    """
    if DUMP_PREFIX not in os.environ and OLD_PREFIX not in os.environ:
        os.environ[DUMP_PREFIX] = own_prefix(path)
    with contextlib.suppress(OSError, RuntimeError):  # if the thread cannot be started, the script runs without it
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind(f"\0{name}")
        # Calls made before the script starts are omitted, because they belong to the preparation of a standby worker.
        args = (sock, path, time.time_ns())
        threading.Thread(target=_serve, args=args, name="flight-dump", daemon=True).start()


def own_prefix(path: str) -> str:
    """Return the prefix for torch's own dumps.

    They are in the same folder as ours, but have no `.json` in their names.
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
    """Return the last calls of each process group, in the form of torch's own dump."""
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
