"""Hangs under torchrun, where there is no run folder: evidence is kept in memory, and reports are printed."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from dalsegno.printable import one_line
from dalsegno.runs.agent.evidence import open_regular
from dalsegno.runs.agent.worker_processes import GenerationWorkers
from dalsegno.runs.coordinator.agents.activity import SILENCE_WITHOUT_OUTPUT, Idle
from dalsegno.runs.coordinator.agents.hangs import ALL_IDLE_S, HangWatch
from dalsegno.runs.coordinator.agents.messages import LogPiece
from dalsegno.runs.coordinator.nodes.node_source import RunControl
from dalsegno.runs.flight_recorder import CollectiveCall, FlightDump, read_dump
from dalsegno.runs.hang import HangReport, RankStack, judge_hang, parse_stacks
from dalsegno.runs.torchrun.rendezvous import host_of
from dalsegno.wire.frames import Message

MAX_FILE_BYTES = 256 << 10  # maximum number of bytes that are sent from the end of each file
MAX_CALLS = 500_000  # limit on the calls that a coordinator keeps, of which each rank gets the same share
MAX_PATH_CHARS = 4096
_NAME = re.compile(r"(stacks|flight|folder)/(\d{1,9})/(\d{1,9})")
log = logging.getLogger("coordinator")
V = TypeVar("V")


def evidence_messages(current: GenerationWorkers) -> Iterator[Message]:
    """Yield an agent's messages with the stacks and flight recorder dumps of its workers, and with their folders."""
    for worker in current.workers.values():
        files = {"stacks": _end_of(worker.stacks), "flight": _end_of(worker.flight)}
        folder = os.path.dirname(worker.stacks) if any(files.values()) else ""
        for kind, text in {**files, "folder": folder}.items():
            if text:
                name = f"{kind}/{current.generation}/{worker.rank}"
                yield {"log": name, "text": text, "at": 0, "stream": "hang"}


def _end_of(path: str) -> str:
    """Return the end of a file, from the beginning of a line; "" if it is no regular file."""
    try:
        with open_regular(path) as file:
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
    """The stacks and flight recorder dumps that agents have sent, and the ranks in which a collective timed out."""

    def __init__(self, max_calls: int = MAX_CALLS) -> None:
        self._max_calls = max_calls
        self._stacks: dict[_Place, RankStack] = {}
        self._dumps: dict[_Place, FlightDump] = {}
        self._timed_out: set[_Place] = set()
        self._nodes: dict[_Place, str] = {}
        self._folders: dict[_Place, str] = {}

    def start(self, generation: int, nodes: Mapping[int, str]) -> None:
        """Forget older generations, and record the node of each rank of a new one."""
        for table in (self._stacks, self._dumps, self._timed_out, self._folders):
            table.clear()
        self._nodes = {_Place(generation, rank): node for rank, node in nodes.items()}

    def record_timeout(self, generation: int, rank: int) -> None:
        self._timed_out.add(_Place(generation, rank))

    def add(self, piece: LogPiece) -> None:
        """Record a file of a rank. A malformed one is ignored, because the user's code may have written it."""
        named = _NAME.fullmatch(piece.name)
        place = _Place(int(named[2]), int(named[3])) if named else None
        if named is None or place not in self._nodes:
            return
        try:
            if named[1] == "folder":
                self._folders[place] = one_line(piece.text)[:MAX_PATH_CHARS]
            elif named[1] == "stacks":
                self._stacks[place] = parse_stacks(piece.text)
            elif piece.data[:1] == b"{":  # not a pickle
                share = max(1, self._max_calls // len(self._nodes))
                self._dumps[place] = keep_newest(read_dump(piece.data, place.rank), share)
        except ValueError as error:  # also for text that cannot be encoded
            log.warning("the flight recorder of rank %d was not understood: %s", place.rank, error)

    def judge(self, generation: int, idle: Collection[int] | None = None) -> HangReport | None:
        """Return why this generation hangs or hung; None if there is no evidence.

        `idle` contains the ranks that have not returned, if they are all idle.
        """
        # Copies, because another thread may add late evidence, or start the next generation, meanwhile
        nodes, timed_out = _of(generation, dict(self._nodes)), set(self._timed_out)
        dumps, stacks = _of(generation, dict(self._dumps)), _of(generation, dict(self._stacks))
        places = {place.rank: node for place, node in nodes.items()}
        if not places:
            return None
        returned = [] if idle is None else [rank for rank in places if rank not in idle]
        return judge_hang(
            generation,
            [dumps[place] for place in sorted(dumps, key=lambda each: each.rank)],
            {place.rank: stack for place, stack in stacks.items() if place.rank not in returned},
            places,
            returned=returned,
            timed_out=[place.rank for place in timed_out if place.generation == generation],
        )

    def describe(self, what: str, report: HangReport | None) -> str:
        """Return one line: how the hang was detected (`what`), why, and the files of the first suspected rank."""
        known = {place.rank: f"{self._nodes[place]}:{folder}" for place, folder in self._folders.items()}
        ranks = [*(report.ranks if report else ()), *sorted(known)]
        files = next((known[rank] for rank in ranks if rank in known), "")
        return "; ".join(filter(None, [what, report.describe() if report else "", f"see {files}" if files else ""]))


def _of(generation: int, table: Mapping[_Place, V]) -> dict[_Place, V]:
    return {place: value for place, value in table.items() if place.generation == generation}


def keep_newest(dump: FlightDump, most: int) -> FlightDump:
    """Return the dump with about `most` calls: the newest of each group."""
    groups: dict[str, list[CollectiveCall]] = {}
    for call in dump.calls:
        groups.setdefault(call.group, []).append(call)
    each = max(1, most // max(1, len(groups)))
    return replace(dump, calls=tuple(call for calls in groups.values() for call in calls[-each:]))


class TorchrunHangWatch(HangWatch):
    """Prints hangs and idle ranks, with their cause.

    The output of workers is not seen here, because they write to the terminal themselves. If the user has set no hang
    timeout, a hang is ended only if a restart is left: by default, torchrun has none.
    """

    sees_output = False

    def __init__(
        self,
        control: RunControl,
        timeout_s: float | None,
        evidence: HangEvidence,
        talk: Callable[[str], None],
        all_idle_s: float = ALL_IDLE_S,
    ) -> None:
        super().__init__(control, timeout_s, all_idle_s=all_idle_s)
        self._evidence, self._talk = evidence, talk

    def may_end(self) -> bool:
        run = self._control.run
        return self._timeout_s is not None or run.spent < run.max_restarts

    def name_of(self, agent: str) -> str:
        return host_of(agent)

    def reason_to_end(self, what: str) -> str:
        return what

    def diagnose(self, generation: int, idle: Collection[int] | None) -> HangReport | None:
        return self._evidence.judge(generation, idle)

    def tell(self, text: str) -> None:
        self._talk(text)

    def report_hang(self, what: str, report: HangReport | None) -> None:
        if what or report is not None:
            self._talk(self._evidence.describe(what, report))

    async def report_idle(self, idle: Idle) -> None:
        report = await self.find_cause(idle.generation, [int(rank) for rank in idle.ranks])
        self._talk(self._evidence.describe(idle.what(SILENCE_WITHOUT_OUTPUT), report))
