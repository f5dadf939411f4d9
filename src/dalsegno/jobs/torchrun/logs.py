"""Where the workers of a torchrun write: to our own output, to files in torchrun's layout, or to both."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template

from dalsegno.jobs.torchrun.args import TorchrunArgs, parse_streams
from dalsegno.jobs.torchrun.tee import Tail, Tee
from dalsegno.jobs.torchrun.temporary import Temporary

STDOUT, STDERR = 1, 2  # torchrun's bits for them, and their numbers as files
ERROR_FILE = "error.json"
_NAMES = {STDOUT: "stdout", STDERR: "stderr"}


class Logs:
    """One node's part. Folders are made when workers start; a folder of ours with nothing in it is not left behind."""

    def __init__(self, args: TorchrunArgs, run: str, tee: Tee) -> None:
        self.args, self.run, self._tee = args, run, tee
        self._redirects, self._tees = parse_streams(args.redirects), parse_streams(args.tee)
        self._base: Path | None = None
        self._temporary: Temporary | None = None

    def files(self, restarts: int, local_rank: int, rank: int) -> dict[str, str]:
        """Of one life of a worker: `output`, `log` (its errors), `error_file`. "" is where our own goes."""
        if self.args.log_dir == os.devnull:
            return {"output": "", "log": "", "error_file": ""}
        attempt = self._folder() / f"attempt_{restarts}"
        folder = attempt / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        paths = {stream: self._path(folder, stream, local_rank) for stream in (STDOUT, STDERR)}
        for stream, path in paths.items():
            if _bits(self._tees, local_rank) & stream and self._is_shown(local_rank):
                self._follow(path, attempt, stream, local_rank, rank)
        return {"output": paths[STDOUT], "log": paths[STDERR], "error_file": str(folder / ERROR_FILE)}

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
        self._tee.follow(path, Tail(prefix.encode(), stream, kept, tuple(word.encode() for word in words)))

    def _folder(self) -> Path:
        if self._base is None:
            root = self.args.log_dir
            if not root:
                self._temporary = Temporary()
                root = self._temporary.path
            os.makedirs(root, exist_ok=True)
            safe = self.run.replace(os.sep, "_")
            self._base = Path(tempfile.mkdtemp(prefix=f"{safe}_", dir=root))
        return self._base

    def close(self, ended_well: bool) -> None:
        """Of a temporary folder nothing stays but output, and after a failure the errors that the report names."""
        self._tee.close()
        if self._temporary:
            self._temporary.close(*([ERROR_FILE] if ended_well else []))


def _bits(streams: Mapping[int | None, int], local_rank: int) -> int:
    return streams.get(local_rank, streams.get(None, 0))
