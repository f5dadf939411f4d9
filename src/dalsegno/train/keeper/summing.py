"""Checksums of what the ranks of this node commit, made when the training has gone on."""

from __future__ import annotations

from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.plan import to_sum
from dalsegno.train.memory.checksum import checksum


def sum_for_ever(books: Books) -> None:
    """The newest first. One that is overwritten meanwhile is not there any more at the next look."""
    while True:
        with books.changed:
            one = to_sum(books.held())
            while one is None:
                books.changed.wait()
                one = to_sum(books.held())
        if checksum(books.path_of(one)) is not None:
            books.look()
