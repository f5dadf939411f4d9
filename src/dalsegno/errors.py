"""The error classes. Every error says what is wrong, where, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class DalsegnoError(Exception):
    """An error that is reported to the user. The CLI prints it and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint


def install_hint(extra: str) -> str:
    """Return the `pip` command that installs one of this package's extras into the current Python."""
    import shlex
    import sys

    return f"run `{shlex.quote(sys.executable)} -m pip install 'dalsegno[{extra}]'`"


class UsageError(DalsegnoError):
    """The command-line arguments are invalid."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One error in a file that the user wrote, and a hint on how to fix it. `line` is 0 for the file as a whole."""

    what: str
    file: str = ""
    hint: str = ""
    line: int = 0

    @property
    def where(self) -> str:
        """The place in the form `file:line`, for messages."""
        return f"{self.file}:{self.line}" if self.line else self.file


class SpecError(DalsegnoError):
    """The errors found in a cluster file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.what, where=first.where, hint=first.hint)
        self.problems = tuple(problems)


class CommandFailed(DalsegnoError):
    """A command that Dal Segno ran has failed."""

    def __init__(self, argv: Sequence[str], exit_code: int, stderr: str, *, host: str = "", hint: str = "") -> None:
        import shlex

        on = f" on {host}" if host else ""
        tail = "\n".join(f"  {line}" for line in stderr.strip().splitlines()[-10:])
        output = f":\n{tail}" if tail else ""
        super().__init__(f"`{shlex.join(argv)}`{on} ended with code {exit_code}{output}", hint=hint)
        self.argv = tuple(argv)
        self.command_exit_code = exit_code
        self.stderr = stderr


class CommandTimedOut(CommandFailed):
    """A command that Dal Segno ran exceeded its time limit and was killed."""

    def __init__(self, argv: Sequence[str], timeout_s: float | None, *, host: str = "", hint: str = "") -> None:
        super().__init__(argv, 124, f"no answer within {timeout_s} s", host=host, hint=hint)


class TargetError(DalsegnoError):
    """A target failed to carry out an operation."""


class NotThere(DalsegnoError):
    """The named cluster, node or other object does not exist."""
