"""Live updates of a page as server-sent events: only the parts that have changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from dalsegno.web.live import LivePicture
from dalsegno.web.snapshot import ClusterPicture
from dalsegno.web.view import PagePart, changes

PING_S = 5.0  # also how soon a peer that has left is noticed
MAX_STREAMS = 80

Render = Callable[[ClusterPicture], Sequence[PagePart] | None]  # None: the page is gone, or the session has ended


class StreamSlots:
    """Counts the open streams: each takes a thread and a connection of the server."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._free = threading.Semaphore(most)

    def take(self) -> bool:
        return self._free.acquire(blocking=False)

    def give_back(self) -> None:
        self._free.release()


def message(event: str, data: object) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def follow(live: LivePicture, render: Render, known: int, slots: StreamSlots) -> Iterator[bytes]:
    """Yield the changes of a page. `known` is the number of the picture that the browser shows already.

    The generator gives its slot back when it ends, and when the server closes it.
    """
    try:
        with live.watching():
            yield message("ping", {"n": known})
            yield from _changes(live, render, known)
    finally:
        slots.give_back()


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
