"""The output of torchrun's workers, which goes to the terminal, to files in torchrun's layout, or to both."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dalsegno.runs.torchrun.args import TorchrunArgs, parse_streams

# Following files: their lines are copied to this process's output with a prefix


INTERVAL_S = 0.05
_CHUNK = 1 << 20
Write = Callable[[int, bytes], None]  # stream (1 or 2), data


@dataclass
class WorkerTail:
    """A followed file.

    Its lines are copied to `stream` with `prefix`. Lines that contain one of `words` are also written to `kept`.
    """

    prefix: bytes
    stream: int
    kept: str = ""
    words: tuple[bytes, ...] = ()
    offset: int = 0
    rest: bytes = b""  # an incomplete line at the end

    def take(self, data: bytes, last: bool) -> list[bytes]:
        """Return the whole lines with their prefix. With `last`, also return an incomplete line."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if last and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        return [self.prefix + line + b"\n" for line in lines]


class Tee:
    """Copies followed files in a separate thread, so that a slow reader delays neither the workers nor the agent."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._tails: dict[str, WorkerTail] = {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, path: str, tail: WorkerTail) -> None:
        """Follow a file from its beginning, unless it is followed already."""
        self._tails.setdefault(path, tail)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tee", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Copy the remaining lines and stop. Call this when all writers have ended."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            self._copy_new(last=False)
        self._copy_new(last=True)

    def _copy_new(self, last: bool) -> None:
        for path, tail in list(self._tails.items()):
            for data in _new_data(path, tail):
                self._show(tail, tail.take(data, last=False))
            if last:
                self._show(tail, tail.take(b"", last=True))

    def _show(self, tail: WorkerTail, lines: list[bytes]) -> None:
        if lines:
            self._write(tail.stream, b"".join(lines))
        chosen = [line for line in lines if any(word in line for word in tail.words)]
        if chosen and tail.kept:
            with contextlib.suppress(OSError), open(tail.kept, "ab") as file:
                file.writelines(chosen)


def _new_data(path: str, tail: WorkerTail) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(tail.offset)
        while data := file.read(_CHUNK):
            tail.offset += len(data)
            yield data


def write_all(stream: int, data: bytes) -> None:
    """Write all data to stdout (1) or stderr (2). Errors, such as a closed pipe, are ignored."""
    with contextlib.suppress(OSError):
        view = memoryview(data)
        while view:
            view = view[os.write(stream, view) :]


# Temporary log folders, named as torchrun names them. Folders of killed processes are removed later.


PREFIX, LOCK = "torchelastic_", ".lock"


class TemporaryLogs:
    """A temporary log folder. It is locked while its owner lives."""

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        new = os.path.join(self.path, f"{LOCK}.new")
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(new, os.path.join(self.path, LOCK))  # locked before other processes can find it

    def close(self, *unwanted: str) -> None:
        """Remove the folder unless it contains output. Files with `unwanted` names do not count as output."""
        os.close(self._lock)
        _remove_if_bare(self.path, unwanted)


def sweep(*unwanted: str) -> None:
    """Remove folders without output whose owners were killed. torchrun's own folders have no lock and are kept."""
    there = tempfile.gettempdir()
    for name in os.listdir(there):
        path = os.path.join(there, name)
        with contextlib.suppress(OSError):  # the folder has no lock file, is in use, or was removed in the meantime
            if name.startswith(PREFIX) and os.lstat(path).st_uid == os.getuid() and _is_left(path):
                _remove_if_bare(path, unwanted)


def _is_left(path: str) -> bool:
    handle = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(handle)


def _remove_if_bare(path: str, unwanted: tuple[str, ...]) -> None:
    files = [os.path.join(where, name) for where, _, names in os.walk(path) for name in names if name not in unwanted]
    if not any(os.stat(file).st_size for file in files):
        shutil.rmtree(path, ignore_errors=True)


# Log files of the workers


STDOUT, STDERR = 1, 2  # both torchrun's bits and the file descriptors
ERROR_FILE = "error.json"
_NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Logs:
    """The log files of one node. Folders are created when workers start. An empty temporary folder is removed."""

    def __init__(self, args: TorchrunArgs, run: str, tee: Tee) -> None:
        self.args, self.run, self._tee = args, run, tee
        self._redirects, self._tees = parse_streams(args.redirects), parse_streams(args.tee)
        self._base: Path | None = None
        self._temporary: TemporaryLogs | None = None

    def files(self, restarts: int, local_rank: int, rank: int) -> dict[str, str]:
        """Return one worker's paths: `output`, `log` (stderr), `error_file`, and `stacks` and `flight` for hangs.

        "" for `output` or `log` means this process's own output. With `--log-dir /dev/null`, there are no files.
        """
        if self.args.log_dir == os.devnull:
            return {"output": "", "log": "", "error_file": ""}
        attempt = self._folder() / f"attempt_{restarts}"
        folder = attempt / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        paths = {stream: self._path(folder, stream, local_rank) for stream in (STDOUT, STDERR)}
        for stream, path in paths.items():
            if _bits(self._tees, local_rank) & stream and self._is_shown(local_rank):
                self._follow(path, attempt, stream, local_rank, rank)
        hang = {"stacks": str(folder / "stacks.txt"), "flight": str(folder / "flight.json")}
        return {"output": paths[STDOUT], "log": paths[STDERR], "error_file": str(folder / ERROR_FILE), **hang}

    def _path(self, folder: Path, stream: int, local_rank: int) -> str:
        redirected = _bits(self._redirects, local_rank) | _bits(self._tees, local_rank)
        if redirected & stream:
            return str(folder / f"{_NAMES[stream]}.log")
        return "" if self._is_shown(local_rank) else os.devnull

    def _is_shown(self, local_rank: int) -> bool:
        return not self.args.shown_ranks or local_rank in self.args.shown_ranks

    def _follow(self, path: str, attempt: Path, stream: int, local_rank: int, rank: int) -> None:
        template = self.args.log_line_prefix_template or "[${role_name}${local_rank}]:"
        prefix = Template(template).safe_substitute(role_name=self.args.role, local_rank=local_rank, rank=rank)
        words = self.args.duplicate_stdout_filters if stream == STDOUT else self.args.duplicate_stderr_filters
        kept = str(attempt / f"filtered_{_NAMES[stream]}.log") if words else ""
        self._tee.follow(path, WorkerTail(prefix.encode(), stream, kept, tuple(word.encode() for word in words)))

    def _folder(self) -> Path:
        if self._base is None:
            root = self.args.log_dir
            if not root:
                self._temporary = TemporaryLogs()
                root = self._temporary.path
            os.makedirs(root, exist_ok=True)
            safe = self.run.replace(os.sep, "_")
            self._base = Path(tempfile.mkdtemp(prefix=f"{safe}_", dir=root))
        return self._base

    def close(self, ended_well: bool) -> None:
        """Remove a temporary folder unless it contains output or, after a failure, error files."""
        self._tee.close()
        if self._temporary:
            self._temporary.close(*([ERROR_FILE] if ended_well else []))


def _bits(streams: Mapping[int | None, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(None, 0))
