"""Run commands: the Protocol, the real runner, and the fake one for tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError


@dataclass(frozen=True)
class Completed:
    """The result of a command."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: bytes = b""  # unchanged; empty from a fake runner

    @property
    def raw(self) -> bytes:
        """Standard output, byte for byte."""
        return self.stdout_bytes or self.stdout.encode()

    def checked(self, hint: str = "") -> Completed:
        """Return this result, or raise CommandFailed if the command failed."""
        if self.exit_code != 0:
            raise CommandFailed(self.argv, self.exit_code, self.stderr or self.stdout, hint=hint)
        return self


class Runner(Protocol):
    """Runs one command to its end and returns its result. A failed command is a result, not an exception."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed: ...


class LocalRunner:
    """Runs commands on this machine. `env`, if given, is the whole environment."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        try:
            done = subprocess.run(
                list(argv),
                input=None if stdin is None else stdin.encode(),
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                env=env,
                cwd=cwd,
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError as error:
            raise DalsegnoError(
                f"`{argv[0]}` is not on this machine", hint="run `./dalsegno setup` to install what is missing"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise CommandTimedOut(argv, timeout_s, hint="it hangs, or the machine is overloaded") from error
        return Completed(tuple(argv), done.returncode, _text(done.stdout), _text(done.stderr), done.stdout)


def _text(output: bytes) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


@dataclass
class FakeRunner:
    """Answers from a function or a table of argv → answer, and records the calls."""

    answers: Mapping[tuple[str, ...], Completed | str] | Callable[[tuple[str, ...], str | None], Completed | str]
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        key = tuple(argv)
        self.calls.append(key)
        answer = self.answers(key, stdin) if callable(self.answers) else self.answers[key]
        return Completed(key, 0, answer) if isinstance(answer, str) else answer
