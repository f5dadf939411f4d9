"""Things that are begun and not waited for. One that fails is not forgotten: it ends whoever lives by them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


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

    async def until(self, over: asyncio.Event, *loops: Awaitable[None]) -> None:
        """Live until it is over. What fails meanwhile is our own failure: better to crash, and be started again, than
        to go on half blind."""
        work = (over.wait(), self._failure(), *loops)
        every: set[asyncio.Future[Any]] = {asyncio.ensure_future(each) for each in work}
        done, others = await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        for task in done:
            task.result()

    async def _failure(self) -> None:
        """Raises the first one, once there is one."""
        await self._failed.wait()
        raise self._failures[0]
