"""Waiting for what a scene needs to have happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dalsegno.errors import TargetError

T = TypeVar("T")


def until(answer: Callable[[], T], timeout_s: float, what: str) -> T:
    """The first answer that is not empty."""
    end = time.monotonic() + timeout_s
    while not (value := answer()):
        if time.monotonic() > end:
            raise TargetError(
                f"waited {timeout_s:.0f} s in vain for: {what}",
                hint="is the machine very busy? `dalsegno demo --keep` leaves the cluster up to look at",
            )
        time.sleep(0.1)
    return value
