"""The store of one generation, through which its ranks find each other. It runs in its own process.

If a training rank ran the store, the store would die with that rank. The agent opens the socket when it chooses the
port, so that no other process can take the port. Without a warm parent, the user's Python runs this file as a program.
That Python may not find the package, so this file imports nothing from it.
"""

from __future__ import annotations

import signal
import sys
from typing import Any


def serve_store(task: dict[str, Any]) -> None:
    """Serve torch's TCPStore on the socket that is the task's first file, until killed."""
    hold(task["files"][0], task["port"])


def hold(listening: int, port: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    hold(int(sys.argv[1]), int(sys.argv[2]))
