"""Log each cause of refusals at most once a minute, with a count, so that a flood of them cannot fill the disk."""

from __future__ import annotations

import time
from collections.abc import Callable

AGAIN_S = 60.0
MAX_CAUSES = 256  # maximum number of remembered causes


class RefusalLog:
    """The log of refusals. `clock` is monotonic."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._logged: dict[str, tuple[float, int]] = {}  # cause -> when it was logged, and its count since then

    def log(self, cause: str, detail: str = "") -> None:
        """Log a refusal, unless the same cause, or too many other causes, were logged within the last minute."""
        now = self._clock()
        logged_at, more = self._logged.get(cause, (float("-inf"), 0))
        if now - logged_at < AGAIN_S:
            self._logged[cause] = (logged_at, more + 1)
            return
        if cause not in self._logged and not self._has_room(now):
            return
        self._logged[cause] = (now, 0)
        since = f" ({more} more since the last report)" if more else ""
        self._write(f"refused: {cause}{f': {detail}' if detail else ''}{since}")

    def _has_room(self, now: float) -> bool:
        """Return whether a new cause fits. Old causes are dropped; if all are recent, new ones are not logged."""
        if len(self._logged) >= MAX_CAUSES:
            self._logged = {cause: one for cause, one in self._logged.items() if now - one[0] < AGAIN_S}
        return len(self._logged) < MAX_CAUSES
