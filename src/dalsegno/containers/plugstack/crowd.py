"""Many hosts at once, but not all: a bound, a word for each that is through, and an end when somebody asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.system.processes import Completed, Runner

AT_ONCE = 16
One = TypeVar("One")
Result = TypeVar("Result")
Tell = Callable[[int, int], None]  # how many are through, of how many


@dataclass(frozen=True)
class Stoppable:
    """A runner that begins nothing more once it was stopped. What has begun ends by itself."""

    runner: Runner
    stopped: Event = field(default_factory=Event)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        if self.stopped.is_set():
            raise DalsegnoError("interrupted", hint="again: what is done stays done")
        return self.runner.run(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)


def each_of(
    runner: Runner, work: Callable[[Runner, One], Result], items: Sequence[One], tell: Tell = lambda *_: None
) -> list[Result]:
    """What came of each, in their order. After Ctrl-C nothing more is begun on any host."""
    stoppable = Stoppable(runner)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        begun = [pool.submit(work, stoppable, item) for item in items]
        for count, _ in enumerate(as_completed(begun), 1):
            tell(count, len(items))
        return [each.result() for each in begun]
    finally:
        stoppable.stopped.set()
        pool.shutdown(cancel_futures=True)
