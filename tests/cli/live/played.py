"""A cluster for the view: `python -m tests.cli.live.played [fail|hang]` shows it live, as `dalsegno top` would."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import GpuReading
from dalsegno.overview.facts import FailingScrape, ObservedRun, Overview, RecoveryView
from dalsegno.recovery.journal.event import Event
from dalsegno.targets.base import ClusterStatus
from tests.overview.clusters import healthy, replacing, run, with_runs


class PlayedSources:
    """Sources that answer from an overview, except those whose switch (`slurm`, `controller_answers`) is False."""

    controller: Path | None = Path("/controller.sock")
    sees_all_runs = True

    def __init__(self, overview: Overview) -> None:
        self.overview, self.slurm, self.controller_answers = overview, True, True

    def status(self) -> ClusterStatus:
        return self.overview.status if self.slurm else replace(self.overview.status, jobs=None, nodes=())

    def recovery_view(self) -> RecoveryView | None:
        if not self.controller_answers:
            raise DalsegnoError("the cluster's controller does not answer")
        return self.overview.controller

    def events(self, since: int) -> Sequence[Event]:
        return [event for event in self.overview.events if event.id > since]

    def runs(self, *, progress: bool = False, ended: bool = False) -> Sequence[ObservedRun]:
        return self.overview.runs

    def failing_scrapes(self) -> tuple[FailingScrape, ...]:
        return self.overview.failing_scrapes

    def gpus(self) -> Mapping[str, tuple[GpuReading, ...]]:
        return self.overview.gpus


class FailingSources(PlayedSources):
    """Sources that raise an error at the first query, like those of a damaged cluster."""

    def __init__(self, overview: Overview, error: Exception | None = None) -> None:
        super().__init__(overview)
        self.error = error or DalsegnoError("the cluster is damaged")

    def status(self) -> ClusterStatus:
        raise self.error


class HangingSources(PlayedSources):
    """Sources that never answer, like a Slurm whose network is down."""

    def status(self) -> ClusterStatus:
        threading.Event().wait()
        return super().status()


def main() -> None:
    from dalsegno.cli.cluster.top import watch
    from dalsegno.cli.live.readings import LiveReadings

    overview = with_runs(replacing(healthy()), run("gpt-k3f9x"))
    kind = {"fail": FailingSources, "hang": HangingSources}.get(sys.argv[-1], PlayedSources)
    watch(LiveReadings(kind(overview)), 0.2)


if __name__ == "__main__":
    main()
