"""Where the ranks of a run agree: on the step to stop at, on when to save, on what to load.

Ranks reach the same step at different times, and hear of things (a signal, the clock) at different times. Whoever
knows something writes on the board from which step on it counts; the others read the board now and then, so what is
written there lies a little in the future.
"""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import Any, Protocol

PATIENCE = timedelta(hours=1)  # whoever launched the ranks ends them long before if one has died


class Board(Protocol):
    def read(self) -> dict[str, Any]:
        """All that stands on it."""
        ...

    def write(self, word: str, value: Any, replace: bool = True) -> None:
        """Without `replace`, the first to write a word wins."""
        ...

    def gather(self, subject: str, value: Any) -> list[Any]:
        """What every rank has to say to a subject, by rank. Each subject once."""
        ...


class OwnBoard:
    """Of a run with one rank."""

    def __init__(self) -> None:
        self._words: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        return dict(self._words)

    def write(self, word: str, value: Any, replace: bool = True) -> None:
        if replace or word not in self._words:
            self._words[word] = value

    def gather(self, subject: str, value: Any) -> list[Any]:
        return [value]


class StoreBoard:
    """In the store through which the ranks found each other: it is there already, and no GPU waits for it."""

    def __init__(self, store: Any, rank: int, world: int, number: int = 0) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._name = f"dalsegno/{number}"
        self._store.compare_set(f"{self._name}/board", "", "{}")

    def read(self) -> dict[str, Any]:
        words: dict[str, Any] = json.loads(self._store.get(f"{self._name}/board"))
        return words

    def write(self, word: str, value: Any, replace: bool = True) -> None:
        found = self._store.get(f"{self._name}/board").decode()
        while True:
            words = json.loads(found)
            if word in words and not replace:
                return
            wanted = json.dumps({**words, word: value})
            now = self._store.compare_set(f"{self._name}/board", found, wanted).decode()
            if now == wanted:
                return
            found = now

    def gather(self, subject: str, value: Any) -> list[Any]:
        """Each writes, the first rank reads them all and writes the whole: N messages, not N times N."""
        place = f"{self._name}/{subject}"
        self._store.set(f"{place}/{self._rank}", json.dumps(value))
        if self._rank == 0:
            every = [json.loads(self._awaited(f"{place}/{rank}")) for rank in range(self._world)]
            self._store.set(place, json.dumps(every))
        told: list[Any] = json.loads(self._awaited(place))
        return told

    def _awaited(self, key: str) -> bytes:
        """A store gives up after the timeout that the script chose for its collectives; a disk may take longer."""
        self._store.wait([key], PATIENCE)
        value: bytes = self._store.get(key)
        return value


_boards = itertools.count()


def open_board(rank: int, world: int) -> Board:
    """Of this process's group, a new one each time: ranks open their first together, then their second."""
    if world == 1:
        return OwnBoard()
    from torch.distributed.distributed_c10d import _get_default_store

    return StoreBoard(_get_default_store(), rank, world, next(_boards))
