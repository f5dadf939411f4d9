"""To a keeper that asks for a part of a snapshot: its header, then its bytes.

{"fetch": [RANK, GENERATION, STEP, "own" | "shared"], "header": HEX, "at": N}     what it has of it already
    {"header": HEX, "at": N}      the bytes follow, from there; from 0 if they are of another snapshot
    {"gone": true}
"""

from __future__ import annotations

from dalsegno.train.frames import Message
from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.holdings import Held
from dalsegno.train.keeper.pace import unlimited
from dalsegno.train.keeper.plan import find_own, find_shared
from dalsegno.train.keeper.wire import Channel
from dalsegno.train.memory.record import parse_sums
from dalsegno.train.memory.snapshot import held_snapshot, outgoing, read_header


def give(channel: Channel, message: Message, books: Books) -> None:
    rank, generation, step, part = message["fetch"]
    shared = part == "shared"
    held = books.held()
    one = find_shared(held, generation, step) if shared else find_own(held, rank, generation, step)
    if one is None or not _give(channel, message, books, one, shared):
        channel.send({"gone": True})


def _give(channel: Channel, message: Message, books: Books, one: Held, shared: bool) -> bool:
    path = books.path_of(one)
    with held_snapshot(path) as snapshot:
        if snapshot is None or snapshot.record != one.record:
            return False
        sums = parse_sums(read_header(path)) if one.summed else None
        with channel.at_work():
            header, part = outgoing(snapshot, sums, shared)
        same = message.get("header") == header.hex()
        start = min(max(0, int(message.get("at", 0))), len(part)) if same else 0
        channel.send({"header": header.hex(), "at": start})
        channel.answer()
        channel.send_part(path, one.record.shared if shared else one.record.own, start, unlimited())
        return True
