"""Logging for the daemons: one line per event, which starts with the time, the level and the component.

DALSEGNO_LOG_LEVEL sets the lowest level that is written: debug, info (the default), warning or error. `up` and `run`
check it and pass it on to the daemons that they start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.printable import logged, one_line

LEVEL = "DALSEGNO_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
MAX_BYTES, OLD_FILES = 8 << 20, 2  # maximum size and number of old parts of a log that this process rotates itself


def start_logging(component: str, path: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Send log records to the file, rotated by size, or to standard error; return the component's logger.

    Standard error is for daemons whose supervisor writes and rotates their log. `level` applies unless the user sets
    another one. A record that cannot be written, for example because the disk is full, is dropped without an error.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
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
