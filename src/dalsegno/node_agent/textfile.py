"""The file with the node's metrics, for node_exporter's textfile collector.

The process that runs the checks writes the file (`metrics_writer`). The agent removes the file when the agent stops,
and when the file is no longer updated.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dalsegno.system.files import make_folder
from dalsegno.system.ownership import trusted_folder

NAME, TEMPORARY = "dalsegno.prom", ".dalsegno.tmp"  # node_exporter reads only *.prom
STALE_S = 30.0  # an older file is removed: values that nobody updates must not look current


class Textfile:
    """The file `dalsegno.prom` in a folder that only root, or the cluster's owner, can write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, data: bytes) -> None:
        """Replace the file atomically. Raise OSError on failure."""
        if not self.folder.is_dir():
            make_folder(self.folder)
        with trusted_folder(self.folder) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(TEMPORARY, dir_fd=folder)  # a killed process may have left the file behind
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(TEMPORARY, flags, 0o644, dir_fd=folder), "wb") as file:
                os.fchmod(file.fileno(), 0o644)  # set explicitly, because node_exporter may run as another user
                file.write(data)
            os.replace(TEMPORARY, NAME, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self) -> None:
        """Remove the file, if there is one."""
        with contextlib.suppress(OSError), trusted_folder(self.folder) as folder:
            for name in (NAME, TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)

    def remove_stale(self, now: float) -> None:
        """Remove the file if it has not been written for a while, for example because the driver hangs."""
        with contextlib.suppress(OSError):
            if now - (self.folder / NAME).stat().st_mtime > STALE_S:
                self.remove()
