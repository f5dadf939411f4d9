"""Background tasks of a coordinator. If one fails, the coordinator fails and is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any


class BackgroundTasks:
    """The background tasks of one coordinator, and their failures."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()
        self._failures: list[BaseException] = []
        self._failed = asyncio.Event()

    def run_in_background(self, work: Awaitable[None]) -> None:
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
        """Run the loops until `over` is set.

        If a loop fails, raise its error, because a restart is safer than running without it.
        """
        work = (over.wait(), self._failure(), *loops)
        every: set[asyncio.Future[Any]] = {asyncio.ensure_future(each) for each in work}
        done, others = await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        for task in done:
            task.result()

    async def _failure(self) -> None:
        """Wait for the first failure and raise it."""
        await self._failed.wait()
        raise self._failures[0]


SHARE = 0.05  # maximum share of the coordinator's time that a paced action uses


class PacedAction:
    """An action whose cost grows with the number of nodes, such as writing the state of all nodes.

    It runs soon after each request. Requests that arrive in the meantime share one execution, so that the action never
    takes more than a small share of the coordinator's time.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._pending: asyncio.Handle | None = None
        self._not_before = 0.0

    def request(self) -> None:
        if self._pending is None:
            loop, wait_s = asyncio.get_running_loop(), self._not_before - time.monotonic()
            self._pending = loop.call_later(wait_s, self.run) if wait_s > 0 else loop.call_soon(self.run)

    def run(self) -> None:
        """Run the action now. This also serves a pending request."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        # CPU time, so that a slow disk or a busy machine does not delay the next execution.
        began_s = time.thread_time()
        self._action()
        self._not_before = time.monotonic() + (time.thread_time() - began_s) / SHARE
