"""Becoming another program: the last thing a command does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dalsegno.errors import DalsegnoError


class CannotStart(DalsegnoError):
    """The program to become is not there (127) or may not be run (126): a shell's own codes."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replace this process; signals, terminal and exit code are then the program's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except FileNotFoundError:
        raise CannotStart(f"`{argv[0]}`: no such command", 127) from None
    except PermissionError:
        raise CannotStart(f"`{argv[0]}`: may not be run", 126) from None
