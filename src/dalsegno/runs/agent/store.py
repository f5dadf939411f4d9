"""The store of one generation, where its ranks meet: a process of its own, on a socket that the agent has opened.

It is not in a training rank, whose death would take the store along. The port is never closed between being chosen and
being used, so nobody else can take it. Workers that are not forked have this file run by the user's own Python, which
may not find the rest of this package: it imports nothing of it.
"""

from __future__ import annotations

import signal
import sys
from typing import Any


def serve_store(task: dict[str, Any]) -> None:
    """Hold torch's TCPStore on the first file of the task until killed."""
    hold(task["files"][0], task["port"])


def hold(listening: int, port: int) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    hold(int(sys.argv[1]), int(sys.argv[2]))
