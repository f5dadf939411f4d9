"""Wait for a condition, never for a fixed time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Factor on time limits, for a machine that is much slower than a short measurement shows, such as an emulated one.
PATIENCE = float(os.environ.get("DALSEGNO_PATIENCE") or 1)
# An action that is instant on an idle machine may take a hundred times as long on an overloaded one.
PATIENCE_S = 60.0 * PATIENCE


def eventually(true: Callable[[], T], timeout_s: float = PATIENCE_S, every_s: float = 0.05) -> T:
    """Call until the result is true, and return it.

    The longer a call takes and the longer the wait lasts, the less often the call is made, so that waiting tests do not
    take CPU time from others. A missing file, a missing key or a partly written line counts as not true yet. A failed
    assertion in the callable ends the wait, because it states a condition that can no longer become true.
    """
    start = time.monotonic()
    while True:
        began = time.monotonic()
        try:
            if seen := true():
                return seen
            last = repr(seen)
        except (LookupError, OSError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        took_s, waited_s = ended - began, ended - start
        assert waited_s < timeout_s, f"did not happen in {timeout_s:g} s; it was last {last}"
        time.sleep(max(every_s, min(1.0, max(2 * took_s, min(8 * took_s, waited_s / 8)))))
