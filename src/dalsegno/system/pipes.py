"""Stream bytes through a program, or into one."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO

from dalsegno.errors import CommandFailed, DalsegnoError

CHUNK = 1 << 20
_BUFFER = 1 << 16  # a stream of small files is mostly headers


def through(argv: Sequence[str], chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the output of a filter (`zstd -dc`) for a stream. Raises an error at the end if the filter failed."""
    with tempfile.TemporaryFile() as errors, _start(argv, errors, stdout=subprocess.PIPE) as process:
        fault: list[BaseException] = []
        feeder = threading.Thread(target=_feed, args=(process, chunks, fault), daemon=True)
        feeder.start()
        try:
            assert process.stdout
            while piece := process.stdout.read(CHUNK):
                yield piece
        finally:
            if process.poll() is None and process.stdout and not process.stdout.closed:
                process.stdout.close()  # the caller stopped reading: the filter ends by a broken pipe
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
        pass  # the exit code shows the failure
    except BaseException as error:
        fault.append(error)


class Sink:
    """A program that reads a stream (`sqfstar FILE`). An error reports the program's own output."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None, keep: Sequence[int] = ()) -> None:
        """Start the program. `keep` are further file descriptors for it."""
        self.argv = tuple(argv)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = _start(argv, self._errors, stdout=self._errors, env=env, keep=keep)

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


def _start(
    argv: Sequence[str],
    errors: IO[bytes],
    *,
    stdout: int | IO[bytes],
    env: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=errors,
            env=env,
            pass_fds=tuple(keep),
            bufsize=_BUFFER,
            start_new_session=True,  # we handle Ctrl-C
        )
    except FileNotFoundError as error:
        raise DalsegnoError(
            f"`{argv[0]}` is not on this machine", hint="run `./dalsegno setup` to install what is missing"
        ) from error


def _output(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace")
