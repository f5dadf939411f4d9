"""Read the dumps of PyTorch's flight recorder, and find the collective in which ranks wait for each other. No I/O.

Each rank records its collectives. A dump is a pickle, which PyTorch writes when NCCL times out, or lines of JSON, which
a worker writes when its agent asks (`runs/agent/flight_dump.py`). Only plain containers, numbers and text are accepted,
because another user may have written the file.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

from dalsegno.printable import one_line

MAX_DUMP_BYTES = 64 << 20
MAX_CALLS = 2000  # number of calls read from one dump; older calls are ignored
MAX_ALL_CALLS = 2_000_000  # limit on the calls in all dumps of a run
_MAX_RANKS = 1 << 20  # limit on the ranks in all groups of a dump
_MAX_TEXT = 200  # maximum length of a name, because another user may have chosen it
_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "<frozen")


class ProcessState(Enum):
    """The state of a rank's process, as its agent observed it."""

    ANSWERED = "answered"  # the process wrote its dump
    STOPPED = "stopped"  # a signal has stopped the process
    BLOCKED = "blocked"  # the process waits inside the kernel for a disk, a network file system or a driver
    SILENT = "silent"  # the process runs, but wrote no dump
    GONE = "gone"

    @classmethod
    def _missing_(cls, value: object) -> ProcessState:
        return cls.SILENT


@dataclass(frozen=True)
class CollectiveCall:
    """One collective that a rank has called. `group` and `sequence` identify it across ranks."""

    group: str
    sequence: int
    operation: str  # name of the operation, such as `all_reduce`
    done: bool
    sizes: tuple[tuple[int, ...], ...] = ()
    where: str = ""  # the line of the script, such as `train.py:21`; "" if the dump has no stacks
    point_to_point: bool = False

    def describe(self) -> str:
        sizes = ", ".join("x".join(map(str, size)) or "scalar" for size in self.sizes[:2])
        return self.operation + (f" ({sizes})" if sizes else "") + (f" at {self.where}" if self.where else "")


@dataclass(frozen=True)
class FlightDump:
    """The collectives that one rank recorded.

    `groups` maps each process group to its ranks, if the dump contains them.
    """

    rank: int
    calls: tuple[CollectiveCall, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    state: ProcessState = ProcessState.ANSWERED

    def pending(self) -> list[CollectiveCall]:
        return [call for call in self.calls if not call.done and not call.point_to_point]


class BadDump(ValueError):
    """A file that is not a dump of the flight recorder."""


# Pickles are read with an unpickler that knows only the operations for plain containers


_PLAIN = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2,
    pickle.TUPLE3, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.MEMOIZE,
)  # fmt: skip


def _set_item(unpickler: Any) -> None:
    value, key = unpickler.stack.pop(), unpickler.stack.pop()
    _set_items_of(unpickler.stack[-1], [key, value])


def _set_items(unpickler: Any) -> None:
    items = unpickler.pop_mark()
    _set_items_of(unpickler.stack[-1], items)


def _set_items_of(target: Any, items: Sequence[Any]) -> None:
    """Add items to a dict.

    Only text and numbers are accepted as keys, because hashing a deeply nested tuple could take too long.
    """
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, int)):
            raise pickle.UnpicklingError("a key that is neither text nor a number")
        target[key] = value


class PlainUnpickler(pickle._Unpickler):
    """Builds numbers, text, lists, tuples and dicts. It knows no operation that imports, calls or builds objects.

    The pure Python unpickler is used, because a single operation can make the C version reserve 64 GiB.
    """

    dispatch: ClassVar = {
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN},
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def read_dump(data: bytes, rank: int) -> FlightDump:
    """Parse a dump. If it has several lines of JSON, use the last valid one. Raise BadDump if it is not a dump.

    `rank` comes from the file name, because dumps do not contain their rank.
    """
    if len(data) > MAX_DUMP_BYTES:
        raise BadDump(f"longer than {MAX_DUMP_BYTES >> 20} MiB")
    content = _from_json(data) if data[:1] == b"{" else _from_pickle(data)
    if not isinstance(content, Mapping):
        raise BadDump("not a dump of the flight recorder")
    if "process" in content:
        return FlightDump(rank, state=ProcessState(content["process"]))
    entries = content.get("entries", ())
    if not isinstance(entries, (list, tuple)) or not {"entries", "version", "pg_config"} & content.keys():
        raise BadDump("not a dump of the flight recorder")
    calls = tuple(call for entry in entries[-MAX_CALLS:] if (call := _read_call(entry)) is not None)
    return FlightDump(rank, calls, dict(_read_groups(content.get("pg_config"))))


def _from_json(data: bytes) -> Any:
    for line in reversed(data.splitlines()[-100:]):
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            continue  # the process was killed while it wrote this line
    raise BadDump("not JSON")


def _from_pickle(data: bytes) -> Any:
    try:
        return PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a file from another user can make the unpickler raise any exception
        raise BadDump(f"not a plain pickle: {type(error).__name__}") from error


def _read_call(entry: Any) -> CollectiveCall | None:
    if not isinstance(entry, Mapping):
        return None
    name = entry.get("profiling_name")
    names = entry.get("process_group")
    sequence = entry.get("collective_seq_id")
    if not isinstance(name, str) or not isinstance(sequence, int):
        return None
    backend, _, operation = name[:_MAX_TEXT].rpartition(":")
    completed = entry.get("state") == "completed"
    return CollectiveCall(
        group=_read_name(names[0]) if isinstance(names, (list, tuple)) and names else "",
        sequence=sequence,
        operation=one_line(operation),
        # gloo retires only completed collectives. With NCCL, a collective that is retired but not completed has timed
        # out.
        done=completed or (backend == "gloo" and entry.get("retired") is True),
        sizes=tuple(_read_sizes(entry.get("input_sizes"))),
        where=_read_place(entry.get("frames")),
        point_to_point=entry.get("is_p2p") is True,
    )


def _read_name(value: Any) -> str:
    """Return the name of a group.

    A list is not accepted, because the text of nested lists can be enormous.
    """
    return one_line(str(value)[:_MAX_TEXT]) if isinstance(value, (str, int)) else ""


def _read_sizes(sizes: Any) -> Iterator[tuple[int, ...]]:
    for size in sizes[:8] if isinstance(sizes, (list, tuple)) else ():
        if isinstance(size, (list, tuple)):
            yield tuple(each for each in size[:8] if isinstance(each, int))


def _read_place(frames: Any) -> str:
    """Return the innermost line of the stack that is not in a library."""
    for frame in frames[:200] if isinstance(frames, (list, tuple)) else ():
        file, line = (frame.get("filename"), frame.get("line")) if isinstance(frame, Mapping) else (None, None)
        file = file[-4 * _MAX_TEXT :] if isinstance(file, str) else None
        if file is not None and isinstance(line, int) and not any(part in file for part in _LIBRARY):
            return one_line(f"{file[-_MAX_TEXT:]}:{line}")
    return ""


def _read_groups(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the ranks of each named group.

    A dump contains the ranks as text, such as `[0, 1]`. gloo does not name its groups.
    """
    left = _MAX_RANKS
    for name, about in list(config.items())[:10_000] if isinstance(config, Mapping) else ():
        ranks = about.get("ranks") if isinstance(about, Mapping) else None
        numbers = ranks[: 8 * left].strip("[]").replace(" ", "").split(",") if isinstance(ranks, str) else []
        left -= len(numbers)
        if left < 0:
            return
        if name and numbers and all(number.isdecimal() and len(number) < 10 for number in numbers):
            yield _read_name(name), tuple(int(number) for number in numbers)


# Stalls: which ranks wait for which other ranks


class StallKind(Enum):
    MISSING = "missing"  # some ranks have called the collective, others have not
    MISMATCH = "mismatch"  # the ranks have called different collectives
    INCOMPLETE = "incomplete"  # all ranks have called the collective, but it does not end


@dataclass(frozen=True)
class Stall:
    """A collective in which ranks wait.

    `calls` contains the calls of the waiting ranks, `missing` the ranks that have not called the collective.
    """

    kind: StallKind
    group: str
    sequence: int
    calls: Mapping[int, CollectiveCall]
    missing: tuple[int, ...] = ()

    @property
    def call(self) -> CollectiveCall:
        return next(iter(self.calls.values()))


def with_timeout(dump: FlightDump) -> FlightDump:
    """Return the dump of a rank in which a collective timed out, with its newest call marked as not done.

    gloo marks a failed call like one that is done. With several groups, the newest call is unknown, so nothing changes.
    """
    if not dump.calls or dump.pending() or len({call.group for call in dump.calls}) > 1:
        return dump
    newest = max(dump.calls, key=lambda call: call.sequence)
    calls = tuple(replace(call, done=False) if call is newest else call for call in dump.calls)
    return replace(dump, calls=calls)


def find_stall(dumps: Sequence[FlightDump], world_size: int = 0, waited: Collection[int] = ()) -> Stall | None:
    """Return the collective that blocks the run; None if no rank waits in a collective.

    A rank that is missing in one group may itself wait in another group. A stall is preferred if its missing ranks
    wait in no collective, because these ranks block the others. `waited` contains ranks without a dump that are known
    to have waited in the collective.
    """
    found = (_stall_of(group, dumps, world_size, waited) for group in _groups_of(dumps))
    stalls = [stall for stall in found if stall is not None]
    waiting = {dump.rank for dump in dumps if dump.pending()}
    return min(stalls, key=lambda stall: (bool(waiting & set(stall.missing)), -len(stall.calls)), default=None)


def _groups_of(dumps: Sequence[FlightDump]) -> list[str]:
    return list(dict.fromkeys(call.group for dump in dumps for call in dump.pending()))


def _stall_of(group: str, dumps: Sequence[FlightDump], world_size: int, waited: Collection[int] = ()) -> Stall | None:
    own = {dump.rank: [call for call in dump.calls if _is_of(call, group)] for dump in dumps}
    first = min(call.sequence for calls in own.values() for call in calls if not call.done)
    calls = {rank: call for rank in sorted(own) for call in own[rank] if call.sequence == first}
    members = _members(group, dumps, own, world_size)
    # A rank that has made later calls has also made this one, even if its dump no longer contains it.
    later = {rank for rank, theirs in own.items() if any(call.sequence > first for call in theirs)}
    absent = [rank for rank in members if rank not in calls and rank not in later]
    missing = tuple(rank for rank in absent if rank not in waited)
    if len({(call.operation, call.sizes if _equal_sizes(call) else ()) for call in calls.values()}) > 1:
        return Stall(StallKind.MISMATCH, group, first, calls, missing)
    return Stall(StallKind.MISSING if missing else StallKind.INCOMPLETE, group, first, calls, missing)


def _is_of(call: CollectiveCall, group: str) -> bool:
    return call.group == group and not call.point_to_point


def _members(
    group: str, dumps: Sequence[FlightDump], own: Mapping[int, Sequence[CollectiveCall]], world_size: int
) -> list[int]:
    """Return the ranks of a group.

    If no dump lists them, the default group has all ranks, and any other group has the ranks that used it.
    """
    named = [dump.groups[group] for dump in dumps if group in dump.groups]
    if named:
        return sorted(set(named[0]))
    return list(range(world_size)) if group in ("", "0") and world_size else [rank for rank in sorted(own) if own[rank]]


def _equal_sizes(call: CollectiveCall) -> bool:
    """Return whether the operation requires the same sizes on all ranks."""
    return call.operation in ("all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "barrier")
