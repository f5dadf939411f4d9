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
    """Return the command that installs an extra of this package for the Python that runs now."""
    import shlex
    import sys

    return f"run `{shlex.quote(sys.executable)} -m pip install 'dalsegno[{extra}]'`"


class UsageError(DalsegnoError):
    """The command line itself is wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One error in a file that the user wrote: `what`, `where` (file:line), and a hint on how to fix it."""

    what: str
    where: str = ""
    hint: str = ""


class SpecError(DalsegnoError):
    """All errors in a cluster file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        super().__init__(first.what, where=first.where, hint=first.hint)
        self.problems = tuple(problems)


class CommandFailed(DalsegnoError):
    """A command that we ran failed."""

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
    """A command that we ran did not end in time and was killed."""

    def __init__(self, argv: Sequence[str], timeout_s: float | None, *, host: str = "", hint: str = "") -> None:
        super().__init__(argv, 124, f"no answer within {timeout_s} s", host=host, hint=hint)


class TargetError(DalsegnoError):
    """A target failed to carry out an operation."""


class NotThere(DalsegnoError):
    """The named cluster, node or other object does not exist."""
