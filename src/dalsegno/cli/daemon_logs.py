"""`dalsegno logs --daemon`: print the logs of the cluster's daemons, and of a run's coordinator and agents."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from dalsegno.cli import out
from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.printable import one_line
from dalsegno.runs.folder import RunFolder
from dalsegno.system.plain_files import open_beneath
from dalsegno.targets.base import DaemonLog

EVERY_S = 0.3
OLD_LOGS = 9  # the most parts of a rotated log that are looked for
RUN_DAEMONS = ("coordinator", "run-agent")
_NONE = "`dalsegno status` shows what there is of the cluster"


def run_logs(run: RunFolder) -> list[DaemonLog]:
    """Return the logs of a run's own daemons. All agents of a run share one log."""
    paths = (run.coordinator_log, run.agents_log)
    return [DaemonLog("", name, path) for name, path in zip(RUN_DAEMONS, paths, strict=True)]


def select_logs(logs: Sequence[DaemonLog], daemon: str, node: str | None) -> list[DaemonLog]:
    """Return the logs of a daemon, on one host or on all. Raises NotThere if there are none."""
    found = [log for log in logs if log.name == daemon]
    if not found:
        names = ", ".join(dict.fromkeys(log.name for log in logs))
        raise NotThere(f"the cluster has no daemon `{daemon}`", hint=f"its daemons: {names}" if names else _NONE)
    here = [log for log in found if node in (None, log.host)]
    if not here:
        hosts = ", ".join(log.host for log in found[:8]) + (" …" if len(found) > 8 else "")
        raise NotThere(f"{daemon} does not run on `{node}`", hint=f"it runs on {hosts}")
    return here


def print_logs(logs: Sequence[DaemonLog], last: int | None, follow: bool) -> None:
    """Print logs one after the other, then new lines as they are written. With several, the host is in front."""
    width = max(len(log.host) for log in logs)
    readers = [(f"{log.host.ljust(width)}  " if len(logs) > 1 else "", LogReader(log.path)) for log in logs]
    printed = 0
    for prefix, reader in readers:
        lines = reader.all_lines(final=not follow)
        for line in lines if last is None else deque(lines, maxlen=last):
            printed += 1
            out.data(prefix + one_line(line))
    if not printed and not follow:
        out.talk(f"nothing was logged yet in {logs[0].path}")
    while follow:
        time.sleep(EVERY_S)
        for prefix, reader in readers:
            for line in reader.new():
                out.data(prefix + one_line(line))


class LogReader:
    """Reads a log that grows, and is emptied or replaced when its owner rotates it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file = 0  # the inode
        self._rest = b""

    def all_lines(self, *, final: bool) -> Iterator[str]:
        """Yield all lines, those of rotated parts first. `final`: also a last line that has no end yet."""
        for number in range(OLD_LOGS, 0, -1):
            yield from LogReader(self._path.with_name(f"{self._path.name}.{number}")).new()
        yield from self.new()
        if final and self._rest:
            yield self._rest.decode(errors="replace")

    def new(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call."""
        try:
            handle = open_beneath(self._path.parent, self._path.name)
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise DalsegnoError(f"{self._path} cannot be read: permission denied", hint="use sudo") from error
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if about.st_ino != self._file or about.st_size < self._offset:
                self._file, self._offset, self._rest = about.st_ino, 0, b""
            file.seek(self._offset)
            for line in file:
                self._offset += len(line)
                self._rest += line
                if line.endswith(b"\n"):
                    yield self._rest.rstrip(b"\r\n").decode(errors="replace")
                    self._rest = b""


def refuse_rank_options(given: Sequence[tuple[str, object]]) -> None:
    """Refuse options that select ranks: daemons have none."""
    wrong = [option for option, value in given if value is not None]
    if wrong:
        raise UsageError(f"{wrong[0]} does not apply to --daemon", hint="--node selects a host of a cluster's daemon")
