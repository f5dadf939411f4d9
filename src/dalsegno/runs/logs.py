"""Read the logs of a run while they grow, in whole lines, by generation and rank."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.runs import journal
from dalsegno.runs.files import names_in, open_log
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent

PARTIAL_S = 1.0  # an incomplete line is shown after this time, since it may be a prompt or a progress bar
MAX_LINE_CHARS = 65_536  # a longer line is split
_CHUNK = 1 << 18
_FOLDER = re.compile(r"g(\d{4,})")
_RANK = re.compile(r"^\[rank\d+\]: ?")
_BEGINS = re.compile(r'Traceback \(most recent call last\):|  File ".+", line \d+$|usage: ')
_FILE = re.compile(r"rank(\d+)\.log")

Wanted = Callable[[int, int], bool]  # (generation, rank) -> whether to show its log


@dataclass(frozen=True)
class Line:
    """One line of one rank's log."""

    generation: int
    rank: int
    text: str


class LogTail:
    """Reads the lines of a growing file."""

    def __init__(self, run: RunFolder, path: Path) -> None:
        self._run, self._path = run, path
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._rest_since: float | None = None

    def read(self, now: float, *, final: bool = False) -> Iterator[str]:
        """Yield the lines appended since the last call. With `final`, also yield an incomplete last line."""
        for data in self._grown():
            *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
            self._rest_since = None if lines else self._rest_since
            yield from lines
            if len(self._rest) > MAX_LINE_CHARS:
                yield self._rest
                self._rest = ""
        if final:
            self._rest += self._decoder.decode(b"", final=True)
        if self._rest and (final or self._overdue(now)):
            yield self._rest
            self._rest, self._rest_since = "", None

    def _overdue(self, now: float) -> bool:
        self._rest_since = now if self._rest_since is None else self._rest_since
        return len(self._rest) > MAX_LINE_CHARS or now - self._rest_since >= PARTIAL_S

    def _grown(self) -> Iterator[bytes]:
        """Yield the new data. The file is reopened each time, so that a network file system checks for changes."""
        try:
            handle = open_log(self._run, self._path)
        except (FileNotFoundError, NotADirectoryError):
            return
        with open(handle, "rb") as file:
            size = os.fstat(handle).st_size
            file.seek(self._offset)
            while self._offset < size and (data := file.read(min(_CHUNK, size - self._offset))):
                self._offset += len(data)
                yield data


class Repeats:
    """Shows each traceback once, because all ranks of a run that cannot start usually fail in the same way."""

    def __init__(self) -> None:
        self._shown: dict[str, int] = {}  # traceback -> the first rank that had it

    def once(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yield the lines, but shorten a repeated traceback to its last line and the rank that had it first."""
        block: list[Line] = []
        for line in lines:
            if block and (line.generation, line.rank) != (block[0].generation, block[0].rank):
                yield from block  # the traceback is incomplete; its remaining lines follow later
                block = []
            text = _RANK.sub("", line.text)
            if not block and not _BEGINS.match(text):
                yield line
                continue
            block.append(line)
            if _is_end(block, text):
                yield from self._block(block)
                block = []
        yield from block

    def has_shown(self, report: str) -> bool:
        return any(_key(report.splitlines()) in shown for shown in self._shown)

    def _block(self, block: Sequence[Line]) -> Sequence[Line]:
        first, key = block[0], _key([line.text for line in block])
        if key not in self._shown:
            self._shown[key] = first.rank
            return block
        last, rank = block[-1].text, self._shown[key]
        again = "as before" if rank == first.rank else f"as rank {rank}"
        return [Line(first.generation, first.rank, f"{last} ({again})")]


def _key(lines: Sequence[str]) -> str:
    return "\n".join(_RANK.sub("", line).rstrip() for line in lines)


def _is_end(block: Sequence[Line], text: str) -> bool:
    """Return whether `text`, the last line of the block so far, is the last line of the whole error.

    A traceback ends with the line of the exception, a usage message with the error from argparse.
    """
    if len(block) == 1:
        return False
    return ": error: " in text if block[0].text.startswith("usage: ") else bool(text) and not text[0].isspace()


def everything(_generation: int, _rank: int) -> bool:
    return True


class RunLogs:
    """The logs of a run that `wanted` selects, including those that do not exist yet."""

    def __init__(self, run: RunFolder, wanted: Wanted = everything) -> None:
        self._run = run
        self._wanted = wanted
        self._tails: dict[tuple[int, int], LogTail] = {}
        self._complete = 0  # generations up to this number are complete

    @property
    def count(self) -> int:
        return len(self._tails)

    def lines(self, now: float, *, final: bool = False) -> Iterator[Line]:
        """Yield the lines written since the last call. With `final`, also yield incomplete last lines."""
        self._find()
        newest = max((generation for generation, _ in self._tails), default=0)
        for (generation, rank), tail in sorted(self._tails.items()):
            # All workers of generations before the last two have ended, so their logs are complete.
            over = generation < newest - 1
            yield from (Line(generation, rank, text) for text in tail.read(now, final=final or over))
            if over:
                del self._tails[generation, rank]
                self._complete = generation

    def _find(self) -> None:
        for generation in self._numbers(self._run.logs, _FOLDER):
            if generation > self._complete:
                for rank in self._numbers(self._run.generation(generation), _FILE):
                    if (generation, rank) not in self._tails and self._wanted(generation, rank):
                        self._tails[generation, rank] = LogTail(self._run, self._run.log(generation, rank))

    def _numbers(self, folder: Path, pattern: re.Pattern[str]) -> list[int]:
        return sorted(int(found[1]) for name in names_in(self._run, folder) if (found := pattern.fullmatch(name)))


def on_node(run: RunFolder, node: str) -> Wanted:
    """Return a filter that accepts the ranks on this node, which may differ between generations."""
    places: dict[int, range] = {}

    def wanted(generation: int, rank: int) -> bool:
        if generation not in places:
            places.update(ranks_on(run, node))
        return rank in places.get(generation, range(0))

    return wanted


def ranks_on(run: RunFolder, node: str) -> dict[int, range]:
    """Return the ranks on this node, by generation."""
    formed = [entry for entry in journal.read(run.journal) if entry.get("event") == RunEvent.GENERATION]
    return {
        int(entry["generation"]): _ranks(list(entry["nodes"]), node, int(entry["nproc_per_node"])) for entry in formed
    }


def _ranks(nodes: list[str], node: str, each: int) -> range:
    """Return the ranks of a node. `nodes` is in the order of the group ranks."""
    first = nodes.index(node) * each if node in nodes else 0
    return range(first, first + each) if node in nodes else range(0)
