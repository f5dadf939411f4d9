"""Write PyTorch's flight recorder to a file when the agent asks, from a thread of the worker.

The thread waits on a socket and costs nothing until then. The main thread may be inside a collective: PyTorch releases
the interpreter there. For NCCL, PyTorch also writes a dump of its own when a collective times out.
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

MAX_DUMPS = 100  # of one worker
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
KEPT = 32  # calls of each process group, the last ones
DUMP_PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # torch appends the rank to it
OLD_PREFIX = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # torch's functions: for NCCL, and for other backends


def serve_dumps(name: str, path: str) -> None:
    """Start the thread. `name` is the abstract socket on which the agent asks, `path` the file to append to."""
    if DUMP_PREFIX not in os.environ and OLD_PREFIX not in os.environ:
        os.environ[DUMP_PREFIX] = own_prefix(path)
    with contextlib.suppress(OSError, RuntimeError):  # without the thread, the script runs all the same
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind(f"\0{name}")
        # Calls from before the script belong to the preparation of a standby worker.
        args = (sock, path, time.time_ns())
        threading.Thread(target=_serve, args=args, name="flight-dump", daemon=True).start()


def own_prefix(path: str) -> str:
    """Return the prefix for torch's own dumps, which then lie beside ours and have no `.json` in their names."""
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
        with contextlib.suppress(Exception):  # the functions are private, and may fail in any way
            line = json.dumps(read_recorder(since_ns)) + "\n"
            with open(path, "a") as file:
                file.write(line)


def _is_own_user(sent: Sequence[tuple[int, int, bytes]]) -> bool:
    """Return whether this user or root has sent a message. Every user can see the names of abstract sockets."""
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
