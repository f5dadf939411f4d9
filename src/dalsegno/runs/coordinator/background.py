"""Background tasks of a coordinator. If one fails, the coordinator fails and is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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

        If a loop fails, raise its error, because a restart is safer than running without that loop.
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


class Batch(Generic[T]):
    """Collects the values of one turn of the event loop, so that thousands of them are handled together."""

    def __init__(self, handle: Callable[[list[T]], None]) -> None:
        self._handle, self._values = handle, list[T]()

    def add(self, value: T) -> None:
        if not self._values:
            asyncio.get_running_loop().call_soon(self.flush)
        self._values.append(value)

    def flush(self) -> None:
        """Handle the collected values now, if there are any."""
        if self._values:
            values, self._values = self._values, []
            self._handle(values)


SHARE = 0.05  # maximum fraction of the coordinator's time that a paced action uses
CHEAP_S = 0.005


class PacedAction:
    """An action whose cost grows with the number of nodes, such as writing the state of all nodes.

    The action runs soon after a request. Requests that arrive in the meantime share one execution, so that the action
    takes only a small part of the coordinator's time.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._pending: asyncio.Handle | None = None
        self._not_before = 0.0
        self._is_cheap = True  # whether the last execution took so little time that it delays nothing

    def serve(self, at_once: bool, later: bool) -> None:
        """Run the action now, or request it; what happens depends on its cost and on the two flags.

        A cheap action runs now if `at_once` is set, and is requested otherwise. A costly action is requested unless
        `later` is set. With `later`, the caller has more urgent work and will call again.
        """
        if self._is_cheap and at_once:
            self.run()
        elif self._is_cheap or not later:
            self.request()

    def request(self) -> None:
        if self._pending is None:
            loop, wait_s = asyncio.get_running_loop(), self._not_before - time.monotonic()
            self._pending = loop.call_later(wait_s, self.run) if wait_s > 0 else loop.call_soon(self.run)

    def run(self) -> None:
        """Run the action now. This also serves a pending request."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        # CPU time is used, because a slow disk or a busy machine should not delay the next execution.
        began_s = time.thread_time()
        self._action()
        took_s = time.thread_time() - began_s
        self._not_before, self._is_cheap = time.monotonic() + took_s / SHARE, took_s < CHEAP_S
