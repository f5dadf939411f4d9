"""Calls into libraries that may hang, waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from dalsegno.system.apart import Late

_T = TypeVar("_T")


class Patient(Generic[_T]):
    """Calls one function in a thread. One that hangs is left, and until it has come back nobody is sent after it."""

    def __init__(self, what: str, call: Callable[[], _T]) -> None:
        self._what, self._call = what, call
        self._thread: threading.Thread | None = None

    def within(self, timeout_s: float) -> _T:
        """Its value or its exception; Late if it takes longer."""
        if self._thread is not None and self._thread.is_alive():
            raise Late(f"{self._what} still hangs from before")
        came: list[_T] = []
        failed: list[Exception] = []

        def go() -> None:
            try:
                came.append(self._call())
            except Exception as error:  # it is the caller's, and is raised there
                failed.append(error)

        self._thread = threading.Thread(target=go, daemon=True, name=self._what)
        self._thread.start()
        self._thread.join(timeout_s)
        if failed:
            raise failed[0]
        if not came:
            raise Late(f"{self._what} gave no answer within {timeout_s:g} s")
        return came[0]
