"""Live updates of a page as server-sent events: only the parts that have changed."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence

from dalsegno.web.live import LivePicture
from dalsegno.web.snapshot import ClusterPicture
from dalsegno.web.view import PagePart, changes

PING_S = 5.0  # also how soon a peer that has left is noticed
MAX_STREAMS, MAX_PER_USER = 80, 24

Render = Callable[[ClusterPicture], Sequence[PagePart] | None]  # None: the page is gone, or the session has ended


class StreamSlots:
    """Counts the open streams: each takes a thread and a connection of the server. One user cannot take them all."""

    def __init__(self, most: int = MAX_STREAMS, most_per_user: int = MAX_PER_USER) -> None:
        self._most, self._most_per_user, self._lock = most, most_per_user, threading.Lock()
        self._taken: Counter[int] = Counter()

    def free(self, uid: int) -> bool:
        """Return whether this user may open one more."""
        with self._lock:
            return self._free(uid)

    @contextlib.contextmanager
    def taken(self, uid: int) -> Iterator[bool]:
        """Take a slot for as long as the block runs; yield whether there was one."""
        with self._lock:
            free = self._free(uid)
            self._taken[uid] += free
        try:
            yield free
        finally:
            with self._lock:
                self._taken[uid] -= free

    def _free(self, uid: int) -> bool:
        return self._taken.total() < self._most and self._taken[uid] < self._most_per_user


def message(event: str, data: object) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def follow(live: LivePicture, render: Render, known: int, slots: StreamSlots, uid: int) -> Iterator[bytes]:
    """Yield the changes of a page. `known` is the number of the picture that the browser shows already.

    The slot is taken when the first bytes are asked for: a generator that is closed before runs no code of ours.
    """
    with slots.taken(uid) as free:
        if not free:
            yield message("busy", {})
            return
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
    """Wait for the next picture; send a ping now and then, so that a peer that has left is noticed."""
    while True:
        after = live.wait(snapshot.number, PING_S)
        if after.number != snapshot.number or live.closed:
            return after
        yield message("ping", {"n": snapshot.number, "at": after.at})
