"""Looking at a step's nodes and its job, after its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.launch.again.choice import SETTLE_S, Choice, Leave, Seen, choose
from dalsegno.launch.again.failures import failures, unsettled
from dalsegno.launch.again.notes import Step
from dalsegno.launch.reaching import unreachable
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo

EVERY_S = 1.0
GIVE_UP_S = 2 * SETTLE_S  # Slurm has not answered once since it ought to have settled


def wait_for_choice(
    look: Callable[[float], Seen], pause: Callable[[float], bool], clock: Callable[[], float]
) -> Choice:
    """`look` is told how long it has been. Being asked to end, in a pause, is a choice too."""
    began = clock()
    while True:
        for_s = clock() - began
        with contextlib.suppress(DalsegnoError):  # slurmctld may be away for a moment
            if (choice := choose(look(for_s))) is not None:
                return choice
        if for_s >= GIVE_UP_S:
            return Leave("Slurm does not answer, so the step ends here")
        if pause(EVERY_S):
            return Leave()


class Watch:
    """Looks until it is known what is to become of the step."""

    def __init__(self, slurm: SlurmClient, pause: Callable[[float], bool], restarts: int, hung_up: bool) -> None:
        self._slurm = slurm
        self._pause = pause
        self._restarts = restarts
        self._hung_up = hung_up

    def until_known(self, step: Step, times: int) -> tuple[Choice, dict[str, str]]:
        """The choice, and the step's nodes that have failed."""
        failed = dict[str, str]()
        choice = wait_for_choice(lambda for_s: self._look(step, failed, for_s, times), self._pause, time.monotonic)
        return choice, failed

    def _look(self, step: Step, failed: dict[str, str], for_s: float, times: int) -> Seen:
        job = self._job(step.job)
        running = job.nodes if job and job.state is JobState.RUNNING else ()
        nodes = self._slurm.nodes(sorted({*step.nodes, *running}))
        bad = failures(nodes, self._silent(nodes))
        taken = [name for name in step.nodes if running and name not in running]
        for name in step.nodes:
            if name in bad or name in taken:
                failed.setdefault(name, bad.get(name, "Slurm has taken it from the job"))
        waiting = tuple(unsettled([node for node in nodes if node.name not in taken], bad))
        return Seen(step.nodes, job, dict(failed), bad, waiting, for_s, times, self._restarts, self._hung_up)

    def _job(self, id: int) -> JobInfo | None:
        try:
            return self._slurm.job(id)
        except NotThere:
            return None

    def _silent(self, nodes: list[NodeInfo]) -> list[str]:
        async def usual_port() -> int:
            return int(self._slurm.config().get("SlurmdPort", "0") or 0)

        return asyncio.run(unreachable(nodes, usual_port))
