"""Things that are begun and not waited for. One that fails is not forgotten: who waits for `failure` hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


class Errands:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()
        self._failures: list[BaseException] = []
        self._failed = asyncio.Event()

    def soon(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failures.append(error)
            self._failed.set()

    async def failure(self) -> None:
        """Raises the first one, once there is one."""
        await self._failed.wait()
        raise self._failures[0]
