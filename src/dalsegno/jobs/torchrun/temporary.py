"""Folders for logs that nobody asked to have anywhere: named as torchrun names them, and swept after a lost node.

Whoever uses one holds a lock in it, which dies with its holder, however that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

PREFIX, LOCK = "torchelastic_", ".lock"


class Temporary:
    """One such folder, ours until it is closed."""

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        new = os.path.join(self.path, f"{LOCK}.new")
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, os.path.join(self.path, LOCK))  # held before anyone can find it

    def close(self, *unwanted: str) -> None:
        """Gone, unless somebody wrote something; files of the names that are not wanted do not count."""
        os.close(self._lock)
        _remove_if_bare(self.path, unwanted)


def sweep(*unwanted: str) -> None:
    """Those whose holders were killed. torchrun's own have no lock, and are left alone."""
    there = tempfile.gettempdir()
    for name in os.listdir(there):
        path = os.path.join(there, name)
        with contextlib.suppress(OSError):  # removed, or in use
            if name.startswith(PREFIX) and os.lstat(path).st_uid == os.getuid() and _is_left(path):
                _remove_if_bare(path, unwanted)


def _is_left(path: str) -> bool:
    handle = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(handle)


def _remove_if_bare(path: str, unwanted: tuple[str, ...]) -> None:
    files = [os.path.join(where, name) for where, _, names in os.walk(path) for name in names if name not in unwanted]
    if not any(os.stat(file).st_size for file in files):
        shutil.rmtree(path, ignore_errors=True)
