"""The store of one generation, where its ranks meet: a process of its own, on a socket that the agent has opened.

Not in a training rank: its death would take the store along. And no port is ever chosen, closed and opened again, so
it cannot be taken in between. Run as a file, it is the same for workers that are not forked.
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
