"""Checksums of what the ranks of this node commit, made when the training has gone on."""

from __future__ import annotations

from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.plan import Sent, key_of, to_sum
from dalsegno.train.memory.snapshot import checksum


def sum_for_ever(books: Books) -> None:
    """The newest first. What cannot be read, because it is damaged or was overwritten, is not tried again."""
    failed: set[Sent] = set()
    while True:
        with books.changed:
            one = to_sum(books.held(), failed)
            while one is None:
                books.changed.wait()
                one = to_sum(books.held(), failed)
        if checksum(books.path_of(one)) is None:
            failed.add(key_of(one))
        else:
            books.look()
