"""The library's errors. Each error says what went wrong and, if possible, how to fix it."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or read, or the library was used incorrectly."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what} ({hint})" if hint else what)
        self.what, self.hint = what, hint


class NotEnoughMemory(CheckpointError):
    """The snapshot does not fit into this machine's shared memory, or the shared-memory folder cannot be used."""
