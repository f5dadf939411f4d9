"""To the buddy: what only a rank of this node has, the newest first.

{"offer": GENERATION, "header": HEX}      one of these is the answer:
    {"go": true}        the bytes may come; then {"kept": true}, or {"damaged": true}
    {"have": true}      it is there already
    {"later": true}     no slot is free before a newer step is safe
    {"refused": WHY}
"""

from __future__ import annotations

import time
from enum import Enum

from dalsegno.train.errors import CheckpointError
from dalsegno.train.frames import BadFrame, Message
from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.holdings import Held
from dalsegno.train.keeper.orders import Keep, KeeperAddress
from dalsegno.train.keeper.pace import Pace
from dalsegno.train.keeper.plan import Sent, key_of, to_send
from dalsegno.train.keeper.wire import Channel, Stranger, dial
from dalsegno.train.memory.record import Sums, parse_sums
from dalsegno.train.memory.snapshot import held_snapshot, outgoing, read_header

_MOST_S = 0.5  # between two calls to a buddy that does not answer
_SKIPPED_S = 1.0  # so long nothing new was to be sent: then what was skipped may help others


class Outcome(Enum):
    SENT = "the buddy has it"
    GONE = "it was overwritten, or is damaged"
    LATER = "no slot was free there"
    REFUSED = "refused, or damaged on its way"
    BROKEN = "no connection"


# How long others come first. A slot becomes free within a step or so.
_REST_S = {Outcome.LATER: 0.05, Outcome.REFUSED: 0.5, Outcome.GONE: 0.5}


class Sending:
    """One connection to one buddy at a time, kept while it is good."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._channel: Channel | None = None
        self._buddy: KeeperAddress | None = None
        self._pace = Pace(1.0)
        self._moved = time.monotonic()
        self._broken = 0  # times in a row
        self._aside: dict[Sent, float] = {}  # until when others come first

    def send_for_ever(self) -> None:
        while True:
            keep, buddy, one = self._next()
            outcome = self._send(keep, buddy, one)
            self._broken = self._broken + 1 if outcome is Outcome.BROKEN else 0
            if outcome is Outcome.SENT:
                self._moved = time.monotonic()
                self._books.note_sent(one, buddy)
            elif outcome is Outcome.BROKEN:
                self._rest(min(_MOST_S, 0.01 * 2 ** min(self._broken, 10)))
            else:
                self._aside[key_of(one)] = time.monotonic() + _REST_S[outcome]

    def turn_to(self, buddy: KeeperAddress | None) -> None:
        """Another thread says: whoever else is being sent to may be dead, and need not be waited for."""
        channel = self._channel
        if channel is not None and self._buddy != buddy:
            channel.hang_up()

    def _next(self) -> tuple[Keep, KeeperAddress, Held]:
        with self._books.changed:
            while True:
                keep = self._books.keep
                one = self._choose(keep) if keep else None
                if keep and keep.buddy and one:
                    return keep, keep.buddy, one
                self._books.changed.wait(_REST_S[Outcome.LATER] if self._aside else _SKIPPED_S)

    def _choose(self, keep: Keep) -> Held | None:
        now = time.monotonic()
        self._aside = {key: until for key, until in self._aside.items() if until > now}
        held, sent = self._books.held(), self._books.sent() | self._aside.keys()
        return to_send(held, keep, sent, self._books.safe(), skipped=now - self._moved > _SKIPPED_S)

    def _rest(self, seconds: float) -> None:
        """A new order or a newer snapshot is reason to try again at once."""
        with self._books.changed:
            self._books.changed.wait(seconds)

    def _send(self, keep: Keep, buddy: KeeperAddress, one: Held) -> Outcome:
        path = self._books.path_of(one)
        with held_snapshot(path) as snapshot:
            if snapshot is None or key_of(one) != (snapshot.record.rank, snapshot.record.seq):
                return Outcome.GONE
            header, _ = outgoing(snapshot, _sums(read_header(path), snapshot.record.seq))
            try:
                channel = self._connect(keep, buddy)
                channel.send({"offer": keep.generation, "header": header.hex()})
                said = channel.answer()
                if said.get("go"):
                    channel.send_part(path, snapshot.record.own, 0, self._pace)
                    said = channel.answer()
            except (OSError, BadFrame, Stranger, CheckpointError):
                self._close()
                return Outcome.BROKEN
        return self._outcome(said)

    def _outcome(self, said: Message) -> Outcome:
        if said.get("kept") or said.get("have"):
            return Outcome.SENT
        if said.get("later"):
            return Outcome.LATER
        self._books.complain(str(said.get("refused") or "a copy was damaged on its way"))
        return Outcome.REFUSED

    def _connect(self, keep: Keep, buddy: KeeperAddress) -> Channel:
        if self._channel is None or self._buddy != buddy:
            self._close()
            self._channel, self._buddy = dial(buddy, keep.run, keep.secret), buddy
        if self._pace.rate != keep.rate:
            self._pace = Pace(keep.rate)
        return self._channel

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _sums(header: bytes, seq: int) -> Sums | None:
    sums = parse_sums(header)
    return sums if sums and sums.seq == seq else None
