"""Run commands to their end, and stream bytes through commands.

`Runner` is the protocol, `LocalRunner` the real runner, and `FakeRunner` the one for tests.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Protocol

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError

CHUNK = 1 << 20
# Bytes buffered for a command's standard input, so that an archive of many small files does not cause many small
# writes.
_BUFFER = 1 << 16


@dataclass(frozen=True)
class Completed:
    """The result of a command."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: bytes = b""  # the output before decoding; empty from a fake runner

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
                f"`{argv[0]}` is not installed", hint="run `./dalsegno setup` to install what is missing"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise CommandTimedOut(argv, timeout_s, hint="it hangs, or the machine is overloaded") from error
        return Completed(tuple(argv), done.returncode, _text(done.stdout), _text(done.stderr), done.stdout)


def _text(output: bytes) -> str:
    return output.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


@dataclass
class FakeRunner:
    """A runner that answers from a function or a table (argv → answer) and records the calls."""

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


def through(argv: Sequence[str], chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the output of a filter (`zstd -dc`) for a stream. Raise an error at the end if the filter failed."""
    import tempfile  # imported here, because most commands do not need it and start faster without it
    import threading

    with tempfile.TemporaryFile() as errors, start_stream(argv, errors, stdout=subprocess.PIPE) as process:
        fault: list[BaseException] = []
        feeder = threading.Thread(target=_feed, args=(process, chunks, fault), daemon=True)
        feeder.start()
        try:
            assert process.stdout
            while piece := process.stdout.read(CHUNK):
                yield piece
        finally:
            if process.poll() is None and process.stdout and not process.stdout.closed:
                process.stdout.close()  # the caller has stopped reading, so the filter ends with a broken pipe
            feeder.join()
            code = process.wait()
        if fault:
            raise fault[0]
        if code:
            raise CommandFailed(argv, code, _output(errors), hint="its input may be damaged")


def _feed(process: subprocess.Popen[bytes], chunks: Iterable[bytes], fault: list[BaseException]) -> None:
    assert process.stdin
    try:
        with process.stdin as sink:
            for chunk in chunks:
                sink.write(chunk)
    except BrokenPipeError:
        pass  # the exit code will show the failure
    except BaseException as error:
        fault.append(error)


class Sink:
    """A program that reads a stream (`sqfstar FILE`). If it fails, the error shows the program's own output."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, keep: Sequence[int] = ()) -> None:
        """Start the program. `keep` contains further file descriptors that it inherits."""
        import tempfile

        self.argv = tuple(argv)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = start_stream(argv, self._errors, stdout=self._errors, env=env, keep=keep)

    def write(self, data: bytes | memoryview) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(data)
        except BrokenPipeError:
            raise self._failure() from None

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._process.stdin
        try:
            if kind is not None:
                self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            code = self._process.wait()
            if kind is None and code:
                raise self._failure()
        finally:
            self._process.kill()
            self._process.wait()
            self._errors.close()

    def _failure(self) -> CommandFailed:
        code = self._process.wait()
        return CommandFailed(self.argv, code, _output(self._errors), hint="see its output above")


def start_stream(
    argv: Sequence[str],
    errors: int | IO[bytes],
    *,
    stdin: int = subprocess.PIPE,
    stdout: int | IO[bytes],
    env: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
    before_exec: Callable[[], None] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own. `before_exec`, if given, is called in the new process."""
    try:
        return subprocess.Popen(
            list(argv),
            stdin=stdin,
            stdout=stdout,
            stderr=errors,
            env=env,
            pass_fds=tuple(keep),
            bufsize=_BUFFER,
            preexec_fn=before_exec,
            start_new_session=True,  # Ctrl-C must reach this process, but not the command
        )
    except FileNotFoundError as error:
        raise DalsegnoError(
            f"`{argv[0]}` is not installed", hint="run `./dalsegno setup` to install what is missing"
        ) from error


def _output(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace")
