"""Call functions as another user of the machine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def as_user(uid: int, act: Callable[[], Found]) -> Found:
    """Call the function in a process of that user, and return its result."""
    read, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            answer: tuple[bool, object] = (True, act())
        except BaseException as error:  # any error is shown by the test
            answer = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(written, "wb") as file:
            pickle.dump(answer, file)
        os._exit(0)
    os.close(written)
    with os.fdopen(read, "rb") as file:
        fine, found = pickle.load(file)
    os.waitpid(pid, 0)
    assert fine, found
    return found  # type: ignore[no-any-return]
