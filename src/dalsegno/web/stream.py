"""Live updates of a page as server-sent events: only the parts that have changed."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence

from dalsegno.web.live import LivePicture
from dalsegno.web.sessions import Visitor, WebRole
from dalsegno.web.snapshot import ClusterPicture
from dalsegno.web.view import PagePart, changes

PING_S = 5.0  # interval between pings, which reveal that a browser has disconnected
MAX_STREAMS = 80
MAX_PER_VISITOR = 16  # maximum number of streams of one user, or of all read-only links that one user created
FOR_OPERATORS = 16  # number of streams that are reserved for operators

Render = Callable[[ClusterPicture], Sequence[PagePart] | None]  # returns None if the page or session has ended


class StreamSlots:
    """The limit on the number of open streams, because each needs a thread and a connection. One user cannot take all
    of them."""

    def __init__(self, most: int = MAX_STREAMS, most_per_visitor: int = MAX_PER_VISITOR) -> None:
        self._most, self._most_per_visitor = most, most_per_visitor
        self._lock = threading.Lock()
        self._taken: Counter[tuple[WebRole, int]] = Counter()

    def take(self, visitor: Visitor) -> bool:
        """Take a slot for a visitor; return False if none is left. Only operators may take the last slots."""
        owner = visitor.role, visitor.uid
        with self._lock:
            total = self._taken.total()
            if total >= self._most:
                return False
            if not visitor.operates and (
                self._taken[owner] >= self._most_per_visitor or total >= self._most - FOR_OPERATORS
            ):
                return False
            self._taken[owner] += 1
            return True

    def give_back(self, visitor: Visitor) -> None:
        with self._lock:
            self._taken[visitor.role, visitor.uid] -= 1


class SlotStream(Iterator[bytes]):
    """A stream that gives its slot back when the server closes it, even if it never sent anything."""

    def __init__(self, chunks: Generator[bytes, None, None], slots: StreamSlots, visitor: Visitor) -> None:
        self._chunks, self._slots, self._visitor, self._closed = chunks, slots, visitor, False

    def __next__(self) -> bytes:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()
        if not self._closed:
            self._closed = True
            self._slots.give_back(self._visitor)


def message(event: str, data: object) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def follow(live: LivePicture, render: Render, known: int) -> Generator[bytes, None, None]:
    """Yield the changes of a page. `known` is the number of the snapshot that the browser already shows."""
    with live.watching():
        yield message("ping", {"n": known})
        yield from _changes(live, render, known)


def _changes(live: LivePicture, render: Render, known: int) -> Iterator[bytes]:
    snapshot = live.current()
    shown: Sequence[PagePart] = ()
    while (parts := render(snapshot)) is not None:
        if shown:
            changed = changes(shown, parts)
            if changed is None:
                yield message("reload", {})
                return
        else:
            changed = {} if snapshot.number == known else {part.id: part.html for part in parts}
        if changed:
            yield message("update", {"n": snapshot.number, "at": snapshot.at, "parts": changed})
        shown = parts
        snapshot = yield from _next(live, snapshot)
    yield message("reload", {})


def _next(live: LivePicture, snapshot: ClusterPicture) -> Generator[bytes, None, ClusterPicture]:
    """Wait for the next snapshot. Send pings in the meantime, to detect that the browser has disconnected."""
    while True:
        after = live.wait(snapshot.number, PING_S)
        if after.number != snapshot.number or live.closed:
            return after
        yield message("ping", {"n": snapshot.number, "at": after.at})
