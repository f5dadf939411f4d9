"""Fetch the parts that a rank needs from their holders, and send copies to the buddy."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.keeper.holdings import StoredSnapshot
from dalsegno.train.keeper.plan import (
    OWN,
    SHARED,
    Fetch,
    KeeperAddress,
    KeepOrder,
    Sent,
    choose_to_send,
    find_own,
    find_shared,
    key_of,
)
from dalsegno.train.keeper.server import check_copy_fits
from dalsegno.train.keeper.state import ByteRate, KeeperState
from dalsegno.train.keeper.wire import Channel, dial
from dalsegno.train.memory.record import ABSENT, SnapshotRecord, SnapshotSums, parse_record, parse_sums
from dalsegno.train.memory.snapshot import Incoming, hold_snapshot, pack_part, read_header
from dalsegno.wire.frames import BadFrame, Message


@dataclass(frozen=True)
class WantedPart:
    """A part to fetch."""

    rank: int
    generation: int
    step: int
    shared: bool  # whether this is the shared part, which may come from any rank

    def is_met_by(self, record: SnapshotRecord | None) -> bool:
        if record is None or (record.generation, record.step) != (self.generation, self.step):
            return False
        return record.own == ABSENT if self.shared else record.shared == ABSENT and record.rank == self.rank

    def to_request(self) -> list[object]:
        return [self.rank, self.generation, self.step, "shared" if self.shared else "own"]


class IncomingPart:
    """A part that is being received, if necessary from several holders in turn.

    It is written to a new file, because an earlier file may still be in use.
    """

    def __init__(self, path: Path, wanted: WantedPart) -> None:
        self._path, self._wanted = path, wanted
        self._coming: Incoming | None = None
        self._header, self._at = "", 0

    def take_from(self, channel: Channel) -> None:
        """Receive the missing bytes from this holder. If the holder dies, the bytes that have arrived remain."""
        channel.send({"fetch": self._wanted.to_request(), "header": self._header, "at": self._at})
        answer = channel.answer()
        if answer.get("gone"):
            raise CheckpointError("the holder no longer has it")
        with channel.at_work():
            coming = self._expect(str(answer["header"]), int(answer["at"]))
        channel.send({"go": True})
        self._at = channel.fill(coming.buffer, self._at)
        if self._at < len(coming.buffer):
            if channel.forged:
                raise CheckpointError("its bytes were changed in transit")
            raise ConnectionError(f"the connection broke after {self._at} of {len(coming.buffer)} bytes")
        self._finish(coming)

    def abandon(self) -> None:
        """Remove the partial file."""
        if self._coming is not None:
            self._coming.abandon()
            self._coming, self._header, self._at = None, "", 0
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()

    def _expect(self, header: str, at: int) -> Incoming:
        if self._coming is not None and (header, at) == (self._header, self._at):
            return self._coming
        record = parse_record(bytes.fromhex(header))
        if record is None or at != 0 or not self._wanted.is_met_by(record):
            raise CheckpointError("the holder sent another part than requested")
        self.abandon()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        check_copy_fits(self._path, record)
        self._coming, self._header = Incoming(self._path, bytes.fromhex(header)), header
        return self._coming

    def _finish(self, coming: Incoming) -> None:
        if not coming.is_whole():
            self.abandon()
            raise CheckpointError("its checksum does not match")
        coming.commit()
        self._coming = None


# Fetches from other nodes

_ROUNDS = 2  # attempts per holder, because a holder whose connection broke may return
_SLOW_S = 40.0  # how long to retry a slow holder, whose keeper may still be importing torch


class SnapshotFetcher:
    """Runs several fetches at a time. A part that several ranks need is fetched once."""

    def __init__(self, state: KeeperState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._turns: dict[WantedPart, threading.Lock] = {}

    def start(self, fetch: Fetch) -> None:
        threading.Thread(target=self.fetch, args=(fetch,), daemon=True, name=f"fetch {fetch.number}").start()

    def fetch(self, fetch: Fetch) -> None:
        """Fetch both parts and report the result to the agent."""
        own, shared, why = "", "", ""
        try:
            own = str(self._part(WantedPart(fetch.rank, fetch.generation, fetch.step, False), fetch.own))
            shared = str(self._part(WantedPart(fetch.rank, fetch.generation, fetch.step, True), fetch.shared))
        except CheckpointError as error:
            why = str(error)
        self._state.refresh()
        self._state.report({"fetched": fetch.number, "ok": not why, "why": why, "own": own, "shared": shared})

    def _part(self, wanted: WantedPart, holders: Sequence[KeeperAddress]) -> Path:
        with self._turn(wanted):
            return self._here(wanted) or self._fetched(wanted, holders)

    def _here(self, wanted: WantedPart) -> Path | None:
        held = self._state.held()
        if wanted.shared:
            one = find_shared(held, wanted.generation, wanted.step)
        else:
            one = find_own(held, wanted.rank, wanted.generation, wanted.step)
        return self._state.path_of(one) if one else None

    def _fetched(self, wanted: WantedPart, holders: Sequence[KeeperAddress]) -> Path:
        keep = self._state.keep
        if keep is None:
            raise CheckpointError("the keeper has no orders yet")
        path = self._state.path(wanted.rank, SHARED if wanted.shared else OWN)
        arriving, why = IncomingPart(path, wanted), [] if holders else ["no node is known to have it"]
        turns = HolderOrder(holders, time.monotonic())
        while turns.waiting:
            holder = turns.next()
            try:
                _take(arriving, holder, keep)
                return path
            except _FAILURES as error:
                why.append(f"{holder.node} ({holder.host}:{holder.port}): {error or type(error).__name__}")
                turns.failed(holder, isinstance(error, socket.timeout), time.monotonic())
        arriving.abandon()
        raise CheckpointError(f"{_describe(wanted)} could not be fetched: {'; '.join(why)}")

    def _turn(self, wanted: WantedPart) -> threading.Lock:
        key = WantedPart(0, wanted.generation, wanted.step, True) if wanted.shared else wanted
        with self._lock:
            return self._turns.setdefault(key, threading.Lock())


class HolderOrder:
    """The holders from which a part is still to be requested, in order, and the number of tries for each."""

    def __init__(self, holders: Sequence[KeeperAddress], began: float) -> None:
        self.waiting, self._began = list(holders), began
        self._tries = dict.fromkeys(holders, 0)

    def next(self) -> KeeperAddress:
        return self.waiting.pop(0)

    def failed(self, holder: KeeperAddress, slow: bool, now: float) -> None:
        self._tries[holder] += 1
        if self._tries[holder] < _ROUNDS or (slow and now - self._began < _SLOW_S):
            self.waiting.append(holder)


_FAILURES = (OSError, BadFrame, CheckpointError, KeyError, ValueError)


def _take(arriving: IncomingPart, holder: KeeperAddress, keep: KeepOrder) -> None:
    with dial(holder, keep.run, keep.secret) as channel:
        arriving.take_from(channel)


def _describe(wanted: WantedPart) -> str:
    part = "the shared part" if wanted.shared else f"rank {wanted.rank}'s own part"
    return f"{part} of step {wanted.step}"


# Copies to the buddy

_MAX_RETRY_S = 0.5  # longest pause between two tries to reach a buddy
_SKIPPED_S = 1.0  # idle time after which skipped snapshots are sent


class TransferOutcome(Enum):
    SENT = "the buddy has it"
    GONE = "it was overwritten, or is damaged"
    LATER = "the buddy had no free slot"
    REFUSED = "refused, or damaged in transit"
    BROKEN = "no connection"


# How long a snapshot is set aside before it is tried again. A slot becomes free within about one step.
_REST_S = {TransferOutcome.LATER: 0.05, TransferOutcome.REFUSED: 0.5, TransferOutcome.GONE: 0.5}


class SnapshotSender:
    """Sends each rank's own part to the buddy, newest first, over one connection."""

    def __init__(self, state: KeeperState) -> None:
        self._state = state
        self._channel: Channel | None = None
        self._buddy: KeeperAddress | None = None
        self._pace = ByteRate(1.0)
        self._moved = time.monotonic()
        self._broken = 0  # number of consecutive failures
        self._aside: dict[Sent, float] = {}  # snapshots to skip, and until when

    def send_loop(self) -> None:
        while True:
            keep, buddy, one = self._next()
            outcome = self._send(keep, buddy, one)
            self._broken = self._broken + 1 if outcome is TransferOutcome.BROKEN else 0
            if outcome is TransferOutcome.SENT:
                self._moved = time.monotonic()
                self._state.note_sent(one, buddy)
            elif outcome is TransferOutcome.BROKEN:
                self._rest(min(_MAX_RETRY_S, 0.01 * 2 ** min(self._broken, 10)))
            else:
                self._aside[key_of(one)] = time.monotonic() + _REST_S[outcome]

    def turn_to(self, buddy: KeeperAddress | None) -> None:
        """Disconnect from the current buddy unless it is `buddy`, because a send to a dead buddy would block.

        Unlike `send_loop`, this runs in the thread that receives the agent's orders.
        """
        channel = self._channel
        if channel is not None and self._buddy != buddy:
            channel.hang_up()

    def _next(self) -> tuple[KeepOrder, KeeperAddress, StoredSnapshot]:
        with self._state.changed:
            while True:
                keep = self._state.keep
                one = self._choose(keep) if keep else None
                if keep and keep.buddy and one:
                    return keep, keep.buddy, one
                self._state.changed.wait(_REST_S[TransferOutcome.LATER] if self._aside else _SKIPPED_S)

    def _choose(self, keep: KeepOrder) -> StoredSnapshot | None:
        now = time.monotonic()
        self._aside = {key: until for key, until in self._aside.items() if until > now}
        held, sent = self._state.held(), self._state.sent() | self._aside.keys()
        return choose_to_send(held, keep, sent, self._state.safe(), skipped=now - self._moved > _SKIPPED_S)

    def _rest(self, seconds: float) -> None:
        """Wait for this time, or until a new order or a newer snapshot arrives."""
        with self._state.changed:
            self._state.changed.wait(seconds)

    def _send(self, keep: KeepOrder, buddy: KeeperAddress, one: StoredSnapshot) -> TransferOutcome:
        path = self._state.path_of(one)
        with hold_snapshot(path) as snapshot:
            if snapshot is None or key_of(one) != (snapshot.record.rank, snapshot.record.seq):
                return TransferOutcome.GONE
            header, _ = pack_part(snapshot, _sums(read_header(path), snapshot.record.seq))
            try:
                channel = self._connect(keep, buddy)
                channel.send({"offer": keep.generation, "header": header.hex()})
                answer = channel.answer()
                if answer.get("go"):
                    channel.send_part(path, snapshot.record.own, 0, self._pace)
                    answer = channel.answer()
            except (OSError, BadFrame, CheckpointError):
                self._close()
                return TransferOutcome.BROKEN
        return self._outcome(answer)

    def _outcome(self, answer: Message) -> TransferOutcome:
        if answer.get("kept") or answer.get("have"):
            return TransferOutcome.SENT
        if answer.get("later"):
            return TransferOutcome.LATER
        self._state.report_trouble(str(answer.get("refused") or "a copy was damaged in transit"))
        return TransferOutcome.REFUSED

    def _connect(self, keep: KeepOrder, buddy: KeeperAddress) -> Channel:
        if self._channel is None or self._buddy != buddy:
            self._close()
            self._channel, self._buddy = dial(buddy, keep.run, keep.secret), buddy
        if self._pace.rate != keep.rate:
            self._pace = ByteRate(keep.rate)
        return self._channel

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _sums(header: bytes, seq: int) -> SnapshotSums | None:
    sums = parse_sums(header)
    return sums if sums and sums.seq == seq else None
