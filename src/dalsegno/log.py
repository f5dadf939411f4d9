"""Logging of the daemons: one line per event, with time, level and component in front.

DALSEGNO_LOG_LEVEL sets the lowest level that is written: DEBUG, INFO (the default), WARNING or ERROR.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from dalsegno.printable import logged

LEVEL = "DALSEGNO_LOG_LEVEL"
MOST_BYTES, OLD_FILES = 8 << 20, 2  # of a log that this process rotates itself


def start_logging(component: str, path: Path | None = None, level: int = logging.INFO) -> logging.Logger:
    """Send log records to the file, rotated by size, or to standard error; return the component's logger.

    Standard error is for daemons whose supervisor writes and rotates their log. `level` holds unless the user sets
    another. A record that cannot be written, on a full disk for example, is lost and does no harm.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if path is not None:
        from logging.handlers import RotatingFileHandler  # agents and hosts, which log to stderr, do without

        with contextlib.suppress(OSError):
            handler = RotatingFileHandler(path, maxBytes=MOST_BYTES, backupCount=OLD_FILES)
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(chosen_level(level))
    logging.raiseExceptions = False
    return logging.getLogger(component)


def chosen_level(default: int) -> int:
    """Return the level that the environment names, if it names one."""
    level = logging.getLevelName(os.environ.get(LEVEL, "").upper())
    return level if isinstance(level, int) else default


class LogFormatter(logging.Formatter):
    """Escapes what a message or traceback must not do to a terminal, and indents further lines."""

    def format(self, record: logging.LogRecord) -> str:
        return logged(super().format(record))
