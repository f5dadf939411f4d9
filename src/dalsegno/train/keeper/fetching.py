"""What a rank that comes to live here needs, from whoever holds it. A holder that dies is followed by the next."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.frames import BadFrame
from dalsegno.train.keeper.arriving import Arriving, Wanted
from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.orders import Fetch, Keep, KeeperAddress
from dalsegno.train.keeper.plan import OWN, SHARED, find_own, find_shared
from dalsegno.train.keeper.wire import Stranger, dial

_ROUNDS = 2  # a holder whose connection broke may be there again
_SLOW_S = 40.0  # one that does not answer may be about to: its keeper is forked when torch has been imported


class Fetching:
    """Several at a time; what several ranks need is fetched once."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._lock = threading.Lock()
        self._turns: dict[Wanted, threading.Lock] = {}

    def start(self, fetch: Fetch) -> None:
        threading.Thread(target=self.fetch, args=(fetch,), daemon=True, name=f"fetch {fetch.number}").start()

    def fetch(self, fetch: Fetch) -> None:
        """Do it, and tell the agent what came of it."""
        own, shared, why = "", "", ""
        try:
            own = str(self._part(Wanted(fetch.rank, fetch.generation, fetch.step, False), fetch.own))
            shared = str(self._part(Wanted(fetch.rank, fetch.generation, fetch.step, True), fetch.shared))
        except CheckpointError as error:
            why = str(error)
        self._books.look()
        self._books.tell({"fetched": fetch.number, "ok": not why, "why": why, "own": own, "shared": shared})

    def _part(self, wanted: Wanted, holders: Sequence[KeeperAddress]) -> Path:
        with self._turn(wanted):
            return self._here(wanted) or self._fetched(wanted, holders)

    def _here(self, wanted: Wanted) -> Path | None:
        held = self._books.held()
        if wanted.shared:
            one = find_shared(held, wanted.generation, wanted.step)
        else:
            one = find_own(held, wanted.rank, wanted.generation, wanted.step)
        return self._books.path_of(one) if one else None

    def _fetched(self, wanted: Wanted, holders: Sequence[KeeperAddress]) -> Path:
        keep = self._books.keep
        if keep is None:
            raise CheckpointError("nobody has said whose snapshots these are")
        path = self._books.path(wanted.rank, SHARED if wanted.shared else OWN)
        arriving, why = Arriving(path, wanted), [] if holders else ["nobody is known to hold it"]
        turns = Turns(holders, time.monotonic())
        while turns.waiting:
            holder = turns.next()
            try:
                _take(arriving, holder, keep)
                return path
            except _FAILURES as error:
                why.append(f"{holder.node} ({holder.host}:{holder.port}): {error or type(error).__name__}")
                turns.failed(holder, isinstance(error, socket.timeout), time.monotonic())
        arriving.give_up()
        raise CheckpointError(f"{_words(wanted)} could not be fetched: {'; '.join(why)}")

    def _turn(self, wanted: Wanted) -> threading.Lock:
        key = Wanted(0, wanted.generation, wanted.step, True) if wanted.shared else wanted
        with self._lock:
            return self._turns.setdefault(key, threading.Lock())


class Turns:
    """Whom to ask next, and whom not again."""

    def __init__(self, holders: Sequence[KeeperAddress], began: float) -> None:
        self.waiting, self._began = list(holders), began
        self._tries = dict.fromkeys(holders, 0)

    def next(self) -> KeeperAddress:
        return self.waiting.pop(0)

    def failed(self, holder: KeeperAddress, slow: bool, now: float) -> None:
        self._tries[holder] += 1
        if self._tries[holder] < _ROUNDS or (slow and now - self._began < _SLOW_S):
            self.waiting.append(holder)


_FAILURES = (OSError, BadFrame, Stranger, CheckpointError, KeyError, ValueError)


def _take(arriving: Arriving, holder: KeeperAddress, keep: Keep) -> None:
    with dial(holder, keep.run, keep.secret) as channel:
        arriving.take_from(channel)


def _words(wanted: Wanted) -> str:
    part = "what all ranks have" if wanted.shared else f"what only rank {wanted.rank} has"
    return f"{part} of step {wanted.step}"
