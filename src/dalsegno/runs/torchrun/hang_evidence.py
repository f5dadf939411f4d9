"""The evidence about a hang under torchrun, where there is no run folder: the coordinator keeps it in memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dalsegno.runs.agent.worker_processes import GenerationWorkers
from dalsegno.runs.coordinator.agents.messages import LogPiece
from dalsegno.runs.flight_recorder import BadDump, FlightDump, read_dump
from dalsegno.runs.hang import HangReport, RankStack, judge_hang, parse_stacks
from dalsegno.wire.frames import Message

MAX_FILE_BYTES = 256 << 10  # of each file, the end is sent
MAX_PIECES = 4096  # limit on the files that a coordinator keeps
_NAME = re.compile(r"(stacks|flight)/(\d{1,9})/(\d{1,9})")
log = logging.getLogger("coordinator")


def evidence_messages(current: GenerationWorkers) -> Iterator[Message]:
    """Yield an agent's messages with the stacks and the flight recorders of its workers."""
    for worker in current.workers.values():
        for kind, path in (("stacks", worker.stacks), ("flight", worker.flight)):
            text = _end_of(path)
            if text:
                name = f"{kind}/{current.generation}/{worker.rank}"
                yield {"log": name, "text": text, "at": 0, "stream": "hang"}


def _end_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - MAX_FILE_BYTES)
            file.seek(left_out)
            text = file.read(MAX_FILE_BYTES).decode(errors="replace")
            return text.partition("\n")[2] if left_out else text
    except OSError:
        return ""


@dataclass(frozen=True)
class _Place:
    generation: int
    rank: int


class HangEvidence:
    """The stacks and flight recorders that agents have sent, and the ranks in which a collective timed out."""

    def __init__(self) -> None:
        self._stacks: dict[_Place, RankStack] = {}
        self._dumps: dict[_Place, FlightDump] = {}
        self._timed_out: set[_Place] = set()
        self._nodes: dict[_Place, str] = {}

    def start(self, generation: int, nodes: Mapping[int, str]) -> None:
        """Forget older generations, and record the node of each rank of a new one."""
        for table in (self._stacks, self._dumps, self._timed_out):
            table.clear()
        self._nodes = {_Place(generation, rank): node for rank, node in nodes.items()}

    def record_timeout(self, generation: int, rank: int) -> None:
        self._timed_out.add(_Place(generation, rank))

    def add(self, piece: LogPiece) -> None:
        """Record a file of a rank. A malformed one is ignored, because the user's code may have written it."""
        named = _NAME.fullmatch(piece.name)
        place = _Place(int(named[2]), int(named[3])) if named else None
        if named is None or place not in self._nodes or len(self._stacks) + len(self._dumps) >= MAX_PIECES:
            return
        try:
            if named[1] == "stacks":
                self._stacks[place] = parse_stacks(piece.text)
            elif piece.data[:1] == b"{":  # not a pickle
                self._dumps[place] = read_dump(piece.data, place.rank)
        except BadDump as error:
            log.warning("the flight recorder of rank %d was not understood: %s", place.rank, error)

    def judge(self, generation: int) -> HangReport | None:
        """Return why this generation hung; None if there is no evidence."""
        return judge_hang(
            generation,
            [dump for place, dump in sorted(self._dumps.items(), key=lambda each: each[0].rank)],
            {place.rank: stack for place, stack in self._stacks.items()},
            {place.rank: node for place, node in self._nodes.items()},
            timed_out=[place.rank for place in self._timed_out],
        )
