"""Find out which rank and collective a hanging run waits for, and whether to suspect the code or a node.

The evidence is in the run folder: the flight recorder and the Python stacks of each rank. `judge_hang` does no I/O.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress
from dalsegno.printable import one_line
from dalsegno.runs.files import names_in
from dalsegno.runs.flight_recorder import (
    MAX_ALL_CALLS,
    MAX_DUMP_BYTES,
    BadDump,
    FlightDump,
    ProcessState,
    Stall,
    StallKind,
    find_stall,
    read_dump,
    with_timeout,
)
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import Entry, RunEvent
from dalsegno.system.ownership import read_beneath

_MAX_STACKS_BYTES = 4 << 20
_MAX_RANKS = 1 << 18  # limit on the ranks of a generation
_SHOWN = 4  # maximum number of ranks named in a sentence
_DUMP_NAME = re.compile(r"g(\d{1,9})-flight-(\d{1,9})(\.json)?")
_NODE_NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)
_THREAD = re.compile(r"^(?:Current )?[Tt]hread .*$", re.MULTILINE)
# A frame as faulthandler and py-spy write it: `File "x.py", line 3 in main` or `main (x.py:3)`
# The user's code may have written the line, so the pattern must match in linear time: no ` (` is in `file2`.
_FRAME = re.compile(
    r'^\s+File "(?P<file>.+)", line (?P<line>\d{1,9}) in |^\s+\S.* \((?P<file2>(?:(?! \().)+):(?P<line2>\d{1,9})\)$'
)
_MAX_PATH_CHARS = 200  # of a file in a report, the end is shown
_LIBRARY = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "<string>",
    "/dalsegno/runs/",
    "/dalsegno/train/",
)
_LOADER = "torch/utils/data/"


class HangSuspect(Enum):
    CODE = "code"
    NODE = "node"
    NETWORK = "network"  # the network between the nodes, or a GPU of one of them
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class RankStack:
    """The position of a rank's main thread."""

    where: str  # the innermost line of the script, such as `train.py:20`; "" if there is none
    loads_data: bool = False  # whether the rank waits for a DataLoader


@dataclass(frozen=True)
class HangReport:
    """The cause of a hang in a generation.

    `ranks` contains the suspected ranks: those that did not arrive, called another collective, are stopped, or are at
    another line of the script than most. `nodes` contains the nodes of these ranks. If all ranks arrived, `ranks` is
    empty, and `nodes` contains the nodes whose checks have failed.
    """

    generation: int
    sentence: str
    suspect: HangSuspect
    reason: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    collective: str = ""
    where: str = ""  # the current line of the first rank in `ranks`

    def describe(self) -> str:
        suspects = {
            HangSuspect.CODE: "the code is suspected",
            HangSuspect.NODE: f"{compress(self.nodes)} is suspected" if self.nodes else "a node is suspected",
            HangSuspect.NETWORK: "the network or a GPU is suspected",
            HangSuspect.UNKNOWN: "the evidence points neither to the code nor to a node",
        }
        return f"{self.sentence}; {suspects[self.suspect]}: {self.reason}"


def judge_hang(
    generation: int,
    dumps: Sequence[FlightDump],
    stacks: Mapping[int, RankStack],
    places: Mapping[int, str],
    faulty_nodes: Collection[str] = (),
    returned: Collection[int] = (),
    timed_out: Collection[int] = (),
) -> HangReport | None:
    """Return why a generation hangs; None if there is no evidence.

    `faulty_nodes` failed a check or were drained. In the ranks in `returned`, the script ended without an error. The
    ranks in `timed_out` ended because they waited too long in a collective.
    """
    dumps = [with_timeout(dump) if dump.rank in timed_out else dump for dump in dumps]
    stall = find_stall(dumps, len(places), timed_out)
    if stall is None:
        return _outside_collectives(generation, dumps, stacks, places)
    states = {dump.rank: dump.state for dump in dumps}
    if stall.kind is StallKind.MISMATCH:
        return _mismatch(generation, stall, places)
    if stall.kind is StallKind.INCOMPLETE:
        return _incomplete(generation, stall, places, faulty_nodes)
    nodes = _nodes(stall.missing, places)
    suspect, reason = _suspect_of_missing(stall, stacks, states, places, faulty_nodes)
    if set(stall.missing) & set(returned):
        suspect, reason = HangSuspect.CODE, "its script has ended, while others still wait for it"
    first = stall.missing[0]
    where = stacks[first].where if first in stacks else ""
    name = "it" if len(stall.missing) == 1 else f"rank {first}"
    did = f"did not arrive: {name} is at {where}" if where else "did not arrive"
    sentence = (
        f"{_ranks(stall.missing, places)} {did}; {_count(stall.calls)} in collective {stall.sequence}"
        f" of process group {stall.group or 'default'}, {stall.call.describe()}"
    )
    return HangReport(generation, sentence, suspect, reason, stall.missing, nodes, stall.call.operation, where)


def _count(calls: Mapping[int, object]) -> str:
    return f"{len(calls)} rank{'s wait' if len(calls) > 1 else ' waits'}"


def _suspect_of_missing(
    stall: Stall,
    stacks: Mapping[int, RankStack],
    states: Mapping[int, ProcessState],
    places: Mapping[int, str],
    faulty_nodes: Collection[str],
) -> tuple[HangSuspect, str]:
    nodes = _nodes(stall.missing, places)
    faulty = [node for node in nodes if node in faulty_nodes]
    seen = [states.get(rank, ProcessState.SILENT) for rank in stall.missing]
    if faulty:
        return HangSuspect.NODE, f"checks of {compress(faulty)} have failed"
    if ProcessState.STOPPED in seen:
        return HangSuspect.NODE, "a signal from outside has stopped the process"
    if ProcessState.BLOCKED in seen:
        return HangSuspect.NODE, "the process waits inside the kernel, for a disk, a network file system or a driver"
    known = [stacks[rank] for rank in stall.missing if rank in stacks]
    if known and known[0].loads_data:
        return HangSuspect.CODE, "the rank waits for its DataLoader"
    if known and known[0].where:
        return HangSuspect.CODE, "the rank runs, but elsewhere in the script"
    if nodes and all(state is not ProcessState.ANSWERED for state in seen):
        waiting = {places.get(rank, "") for rank in stall.calls}
        if not waiting & set(nodes):
            return HangSuspect.NODE, f"no rank on {compress(nodes)} has answered"
    return HangSuspect.UNKNOWN, "nothing is known about the rank"


def _mismatch(generation: int, stall: Stall, places: Mapping[int, str]) -> HangReport:
    """Report that ranks have called different collectives, and name the ranks that differ from most others."""
    kinds: dict[tuple[str, object], list[int]] = {}
    for rank, call in stall.calls.items():
        kinds.setdefault((call.operation, call.sizes), []).append(rank)
    most = max(kinds.values(), key=len)
    odd = tuple(sorted(rank for ranks in kinds.values() if ranks is not most for rank in ranks))
    sentence = (
        f"the ranks disagree about collective {stall.sequence} of process group {stall.group or 'default'}:"
        f" {_ranks(odd, places)} called {stall.calls[odd[0]].describe()},"
        f" {_ranks(most, places)} called {stall.calls[most[0]].describe()}"
    )
    reason = "all ranks must call the same collectives, with the same sizes, in the same order"
    return HangReport(
        generation, sentence, HangSuspect.CODE, reason, odd, _nodes(odd, places), stall.calls[odd[0]].operation
    )


def _incomplete(generation: int, stall: Stall, places: Mapping[int, str], faulty_nodes: Collection[str]) -> HangReport:
    """Report a collective that all ranks have called.

    The suspect is then a faulty node or, if there is none, the network or a GPU.
    """
    sentence = (
        f"all {len(stall.calls)} ranks have called collective {stall.sequence} of process group"
        f" {stall.group or 'default'}, {stall.call.describe()}, but it does not end"
    )
    faulty = tuple(node for node in _nodes(tuple(stall.calls), places) if node in faulty_nodes)
    if faulty:
        return HangReport(
            generation, sentence, HangSuspect.NODE, f"checks of {compress(faulty)} have failed", (), faulty
        )
    return HangReport(
        generation, sentence, HangSuspect.NETWORK, "the data does not arrive", collective=stall.call.operation
    )


def _outside_collectives(
    generation: int, dumps: Sequence[FlightDump], stacks: Mapping[int, RankStack], places: Mapping[int, str]
) -> HangReport | None:
    """Report a hang in which no rank waits in a collective.

    Suspect the ranks that are stopped or blocked in the kernel. If there are none, compare the ranks' lines in the
    script, and suspect those at the line with the fewest ranks. Return None if no line is known.
    """
    stopped = tuple(dump.rank for dump in dumps if dump.state in (ProcessState.STOPPED, ProcessState.BLOCKED))
    if stopped:
        verb, reason = "does", "the process is stopped, or waits inside the kernel"
        if len(stopped) > 1:
            verb, reason = "do", "the processes are stopped, or wait inside the kernel"
        sentence = f"{_ranks(stopped, places)} {verb} nothing, and no rank waits in a collective"
        return HangReport(generation, sentence, HangSuspect.NODE, reason, stopped, _nodes(stopped, places))
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        if stack.where:
            groups.setdefault(stack.where, []).append(rank)
    if not groups:
        return None
    fewest = min(groups, key=lambda where: len(groups[where]))  # the line of the ranks that differ from most others
    odd = tuple(groups[fewest])
    groups_text = [
        f"{_ranks(ranks, places)} at {where}" for where, ranks in sorted(groups.items(), key=lambda item: item[1])
    ]
    sentence = f"no rank waits in a collective: {'; '.join(groups_text[:_SHOWN])}"
    loads = stacks[odd[0]].loads_data
    reason = "the rank waits for its DataLoader" if loads else "the script itself makes no progress"
    return HangReport(generation, sentence, HangSuspect.CODE, reason, odd, _nodes(odd, places), where=fewest)


def _nodes(ranks: Iterable[int], places: Mapping[int, str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(places[rank] for rank in ranks if rank in places))


def _ranks(ranks: Sequence[int], places: Mapping[int, str]) -> str:
    names = [f"{rank} on {places[rank]}" if rank in places else str(rank) for rank in ranks[:_SHOWN]]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}{more}"


def parse_stacks(text: str) -> RankStack:
    """Return the script's position in the last stacks of a file.

    The last thread with frames of the script counts as the main thread.
    """
    threads = _THREAD.split(text)[1:]
    for thread in reversed(threads):
        frames = [(found["file"] or found["file2"], found["line"] or found["line2"]) for found in _frames(thread)]
        own = [(file, line) for file, line in frames if not any(part in file for part in _LIBRARY)]
        if own:
            where = one_line(f"{own[0][0][-_MAX_PATH_CHARS:]}:{own[0][1]}")
            return RankStack(where, any(_LOADER in file for file, _ in frames))
    return RankStack("")


def _frames(thread: str) -> list[re.Match[str]]:
    return [found for line in thread.splitlines() if (found := _FRAME.match(line))]


# Reading the evidence of a run


def read_hang(
    run: RunFolder, generation: int, entries: Sequence[Entry], faulty_nodes: Collection[str] = ()
) -> HangReport | None:
    """Return why this generation of a run hangs or hung; None if it left no evidence."""
    places = ranks_of_generation(entries, generation)
    dumps = read_dumps(run, generation)
    stacks = _read_stacks(run, generation, sorted(places))
    returned, timed_out = _returned(entries, generation, places), _timed_out(entries, generation)
    return judge_hang(generation, dumps, stacks, places, faulty_nodes, returned, timed_out)


def _timed_out(entries: Sequence[Entry], generation: int) -> list[int]:
    """Return the ranks of a generation that have ended because a collective timed out."""
    failed = (entry for entry in entries if entry.get("event") == RunEvent.FAILED and entry.get("timed_out"))
    return [
        entry["rank"] for entry in failed if entry.get("generation") == generation and type(entry.get("rank")) is int
    ]


def _returned(entries: Sequence[Entry], generation: int, places: Mapping[int, str]) -> list[int]:
    """Return the ranks that had returned when the others were reported idle."""
    for entry in reversed(entries):
        if entry.get("event") == RunEvent.IDLE and entry.get("generation") == generation:
            idle = entry.get("ranks")
            return [rank for rank in places if str(rank) not in idle] if isinstance(idle, dict) and idle else []
    return []


def ranks_of_generation(entries: Sequence[Entry], generation: int) -> dict[int, str]:
    """Return the node of each rank; empty if the journal has no valid entry for the generation."""
    for entry in entries:
        if entry.get("event") == RunEvent.GENERATION and entry.get("generation") == generation:
            each, nodes = entry.get("nproc_per_node", 1), entry.get("nodes")
            if not isinstance(each, int) or not isinstance(nodes, list) or not 0 < each * len(nodes) <= _MAX_RANKS:
                return {}
            if not all(isinstance(node, str) and _NODE_NAME.fullmatch(node) for node in nodes):
                return {}
            return {index * each + local: node for index, node in enumerate(nodes) for local in range(each)}
    return {}


def read_dumps(run: RunFolder, generation: int) -> list[FlightDump]:
    """Return the flight recorder dumps of a generation, one for each rank.

    A dump that torch wrote itself is preferred, because it contains stacks.
    """
    found: dict[int, FlightDump] = {}
    left = MAX_ALL_CALLS
    for name in sorted(names_in(run, run.all_stacks), key=lambda name: not name.endswith(".json")):
        named = _DUMP_NAME.fullmatch(name)
        if named and int(named[1]) == generation:
            dump = _read_dump(run, name, int(named[2]))
            left -= len(dump.calls) if dump else 0
            if left < 0:
                break
            if dump is not None and (dump.calls or int(named[2]) not in found):
                found[int(named[2])] = dump
    return [found[rank] for rank in sorted(found)]


def _read_dump(run: RunFolder, name: str, rank: int) -> FlightDump | None:
    try:
        data = read_beneath(run.root, os.path.join(run.all_stacks.name, name), MAX_DUMP_BYTES)
        return read_dump(data, rank) if data else None
    except (BadDump, DalsegnoError, OSError):
        return None


def _read_stacks(run: RunFolder, generation: int, ranks: Iterable[int]) -> dict[int, RankStack]:
    found = {}
    for rank in ranks:
        path = run.stacks(generation, rank)
        try:
            data = read_beneath(run.root, os.path.join(run.all_stacks.name, path.name), _MAX_STACKS_BYTES)
        except (DalsegnoError, OSError):
            continue
        if data:
            found[rank] = parse_stacks(data.decode(errors="replace"))
    return found
