"""Logging for the daemons: one line per event, which starts with the time, the level and the component.

DALSEGNO_LOG_LEVEL sets the lowest level that is written: debug, info (the default), warning or error. `up` and `run`
check it and pass it on to the daemons that they start.

A daemon that is started with the path of its log opens and rotates it. Any other daemon writes to standard error, which
its supervisor appends to a log. Dal Segno's own init rotates these logs. systemd does not rotate logs: its unit names
the log in DALSEGNO_LOG_FILE, and the daemon rotates all logs in the folder of that log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.printable import logged, one_line

LEVEL = "DALSEGNO_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
LOG_FILE = "DALSEGNO_LOG_FILE"  # the log to which systemd appends the daemon's standard error
MAX_BYTES, OLD_FILES = 8 << 20, 2  # of a log that this process rotates: its maximum size, and the number of old parts
LOCK = ".rotation.lock"
LOOK_S = 1.0  # minimum time between two checks of the logs' sizes


def start_logging(component: str, path: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Send log records to the file, rotated by size, or to standard error; return the component's logger.

    Standard error is for daemons whose supervisor writes their log. `level` applies unless the user sets another one. A
    record that cannot be written, for example because the disk is full, is dropped without an error.
    """
    log = os.environ.get(LOG_FILE, "")
    handler: logging.Handler = SupervisedHandler(log) if log else logging.StreamHandler(sys.stderr)
    if path is not None:
        from logging.handlers import RotatingFileHandler  # imported late: programs that log to stderr do not need it

        with contextlib.suppress(OSError):
            handler = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=OLD_FILES)
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    set_level(os.environ)
    logging.raiseExceptions = False
    return logging.getLogger(component)


def set_level(environ: Mapping[str, str]) -> None:
    """Set the log level from $DALSEGNO_LOG_LEVEL in `environ`; do nothing if it is unset or unknown."""
    name = environ.get(LEVEL, "").lower()
    if name in LEVELS:
        logging.getLogger().setLevel(name.upper())


def check_level(environ: Mapping[str, str]) -> str:
    """Return $DALSEGNO_LOG_LEVEL from `environ` in lower case, or "". Raise UsageError if the level is unknown."""
    name = environ.get(LEVEL, "")
    if name and name.lower() not in LEVELS:
        raise UsageError(f"{LEVEL}={one_line(name)} is not a log level", hint=f"use one of {', '.join(LEVELS)}")
    return name.lower()


class LogFormatter(logging.Formatter):
    """A formatter that escapes control characters in messages and tracebacks and indents all lines after the first."""

    def format(self, record: logging.LogRecord) -> str:
        return logged(super().format(record))


class SupervisedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error, which systemd appends to a log, and rotates all logs in the folder of that log.

    The log stays open, so that it also gets what Python prints when the daemon crashes. The sizes of all logs in the
    folder are checked whenever this daemon logs something, and in `look_at_logs`.
    """

    def __init__(self, log: str) -> None:
        super().__init__(sys.stderr)
        self._folder = os.path.dirname(log)
        self._look_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.look()

    def look(self) -> None:
        """Rotate the logs in the folder that are too long, unless they were checked less than LOOK_S ago."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            rotate_folder(self._folder, MAX_BYTES, OLD_FILES)


def look_at_logs() -> None:
    """Rotate the logs in this daemon's folder. The controller calls this often, because other programs that log to
    the folder never rotate their logs."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, SupervisedHandler):
            handler.acquire()  # a line written between the copy and the truncation would be lost
            try:
                handler.look()
            finally:
                handler.release()


def rotate_folder(folder: str, most_bytes: int, old: int) -> None:
    """Rotate the logs in a folder that are too long."""
    try:
        names = os.listdir(folder)
    except OSError:
        return  # the folder was removed a moment ago
    for name in names:
        if name.endswith(".log"):
            rotate(os.path.join(folder, name), most_bytes, old)


def rotate(path: str, most_bytes: int = MAX_BYTES, old: int = OLD_FILES) -> bool:
    """Copy a log that is too long to PATH.1 and truncate it, so that its writers need not reopen it.

    Return whether it was truncated. Lines that are written between the copy and the truncation are lost.
    """
    try:
        source = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _is_too_long(source, most_bytes):
            return False
        with _lock_of(os.path.dirname(path)) as locked:
            return locked and _rotate(source, path, most_bytes, old)
    finally:
        os.close(source)


def _is_too_long(source: int, most_bytes: int) -> bool:
    """Return whether a log is a regular file with one link and larger than `most_bytes`."""
    found = os.fstat(source)
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_size > most_bytes


@contextmanager
def _lock_of(folder: str) -> Iterator[bool]:
    """Lock a folder of logs, and yield whether this daemon may rotate there; False if another daemon rotates.

    Where locks do not exist, as on some shared file systems, yield True. The lock is a file that only its owner can
    open: any user who can read a log could lock the log itself.
    """
    import fcntl  # missing on Windows, where the commands for other machines import this module

    try:
        lock = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True  # a full disk must not stop the rotation
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = True
    except BlockingIOError:
        locked = False
    except OSError:
        locked = True
    try:
        yield locked
    finally:
        os.close(lock)


def _rotate(source: int, path: str, most_bytes: int, old: int) -> bool:
    if not _is_too_long(source, most_bytes):
        return False  # another daemon has rotated it in the meantime
    try:
        for number in range(old, 1, -1):
            if os.path.exists(f"{path}.{number - 1}"):
                os.replace(f"{path}.{number - 1}", f"{path}.{number}")
        _copy_end(source, path, most_bytes)
    except OSError as error:
        logging.getLogger("log").warning("%s not rotated: %s", path, error)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False  # on a full disk, truncate anyway, because new lines need space
    os.ftruncate(source, 0)
    return True


def _copy_end(source: int, path: str, most_bytes: int) -> None:
    temp, at = f"{path}.{os.getpid()}.tmp", max(os.fstat(source).st_size - most_bytes, 0)
    target = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(target, stat.S_IMODE(os.fstat(source).st_mode))
        while data := os.pread(source, 1 << 20, at):
            os.write(target, data)
            at += len(data)
    finally:
        os.close(target)
        os.replace(temp, f"{path}.1")
