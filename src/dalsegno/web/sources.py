"""The sources of the pages' data: the controller's socket, Slurm's commands, and the files of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError
from dalsegno.health.result import Verdict
from dalsegno.overview.facts import read_node
from dalsegno.overview.gather import ask_failing_scrapes, read_gpus
from dalsegno.recovery.client import ask
from dalsegno.recovery.decisions.reason import slurm_users_of
from dalsegno.recovery.journal.event import Event, read_event
from dalsegno.recovery.runs.run_records import RunRecord, RunRecords
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles
from dalsegno.targets.base import CanSeeDaemons, Target
from dalsegno.targets.folder import ClusterFolder
from dalsegno.web.run_files import read_run
from dalsegno.web.snapshot import (
    AgentReport,
    Automation,
    ControllerPart,
    HostPart,
    NodeRecoveryDetail,
    RunPicture,
    SlurmPart,
)
from dalsegno.wire.frames import Message
from dalsegno.wire.liveness import Presence

ANSWER_S = 2.0
MAX_EVENTS = 300  # maximum number of events that are kept for the page of events
_SILENT = frozenset({SlurmTrouble.NO_CONTROLLER, SlurmTrouble.DISCONNECTED, SlurmTrouble.NO_CONNECTION})
ENDED_KEPT_S = 10.0  # the files of ended runs are read again after this time
MAX_RUNS = 200  # maximum number of runs that are shown: active runs first, then the newest


class SourceSilent(DalsegnoError):
    """The error that a source does not answer at all."""


class PictureSources(Protocol):
    """The sources of the live snapshot. Each method raises DalsegnoError if its source cannot be read, and SourceSilent
    if it does not answer at all."""

    def slurm(self) -> SlurmPart: ...

    def controller(self) -> ControllerPart: ...

    def hosts(self) -> HostPart: ...

    def runs(self) -> tuple[RunPicture, ...]: ...


class ControllerReader:
    """Reads the data of a controller, or of `dalsegno adopt watch`, which has no agents."""

    def __init__(self, socket: Path, *, agents: bool = True) -> None:
        self.socket, self._agents = socket, agents
        self._events: tuple[Event, ...] = ()

    def read(self) -> ControllerPart:
        answer = self._ask({"nodes": True})
        agents = self._ask({"agents": True})["agents"] if self._agents else ()
        automation = self._ask({"automation": "status"})
        self._events = self._with_new_events()
        return ControllerPart(
            {str(each["node"]): parse_recovery(each) for each in answer["nodes"]},
            {str(each["node"]): parse_agent(each) for each in agents},
            parse_automation(automation),
            self._events,
            slurm_users_of(answer),
        )

    def _with_new_events(self) -> tuple[Event, ...]:
        """Return the known events and those that were added since. Return () if the journal no longer contains the last
        known event."""
        last = self._events[-1].id if self._events else 0
        found = [read_event(each) for each in self._ask({"events": last - 1 if last else -MAX_EVENTS})["events"]]
        if not last or (found and found[0] == self._events[-1]):
            return (*self._events, *(found[1:] if last else found))[-MAX_EVENTS:]
        return ()

    def _ask(self, request: Message) -> Message:
        try:
            answer = ask(self.socket, request, ANSWER_S)
        except DalsegnoError:
            raise SourceSilent("the controller does not answer", hint="it is restarted automatically") from None
        if "error" in answer:
            raise DalsegnoError(f"the controller refused: {answer['error']}", hint=str(answer.get("hint", "")))
        return answer


def read_slurm(client: SlurmClient) -> SlurmPart:
    """Return the nodes and jobs of Slurm."""
    try:
        return SlurmPart(tuple(client.nodes()), tuple(client.jobs()))
    except CommandFailed as fault:
        silent = isinstance(fault, CommandTimedOut) or not _SILENT.isdisjoint(parse_troubles(fault.stderr))
        hint = "`dalsegno status` shows the daemons, `dalsegno up` starts what is missing"
        raise (SourceSilent("slurmctld does not answer", hint=hint) if silent else fault) from None


class ClusterReader:
    """The sources of a real cluster, found in its state folder."""

    def __init__(self, folder: ClusterFolder, client: SlurmClient, target: Callable[[], Target]) -> None:
        self._folder, self._client, self._target = folder, client, target
        self._controller = ControllerReader(folder.controller_socket)
        self._ended: dict[RunRecord, RunPicture | None] = {}
        self._ended_until = 0.0

    def slurm(self) -> SlurmPart:
        return read_slurm(self._client)

    def controller(self) -> ControllerPart:
        return self._controller.read()

    def hosts(self) -> HostPart:
        target = self._target()
        dead = tuple(target.dead_daemons()) if isinstance(target, CanSeeDaemons) else ()
        return HostPart(dead, ask_failing_scrapes(target))

    def runs(self) -> tuple[RunPicture, ...]:
        kept, _ = RunRecords(self._folder.runs).read()
        found = [view for each in kept.values() if (view := read_run(each, kept=True))]
        names = {view.run for view in found}
        found += [view for view in self._ended_runs() if view.run not in names]
        return newest_runs(found)

    def _ended_runs(self) -> list[RunPicture]:
        """Return the runs that have ended. There may be hundreds, and their files rarely change, so the files are read
        again only after ENDED_KEPT_S seconds."""
        records, _ = RunRecords(self._folder.ended_runs).read()
        if time.monotonic() >= self._ended_until:
            self._ended, self._ended_until = {}, time.monotonic() + ENDED_KEPT_S
        self._ended = {each: self._ended.get(each) or read_run(each, kept=False) for each in records.values()}
        return [view for view in self._ended.values() if view]


def newest_runs(runs: Iterable[RunPicture]) -> tuple[RunPicture, ...]:
    """Return the MAX_RUNS runs that are shown: active runs first, then the newest."""
    return tuple(sorted(runs, key=lambda view: (view.status.over, -view.status.created))[:MAX_RUNS])


def parse_recovery(message: Mapping[str, Any]) -> NodeRecoveryDetail:
    """Parse the controller's record of a node."""
    return NodeRecoveryDetail(**vars(read_node(message)), validated_at=message.get("validated_at"))


def parse_agent(message: Mapping[str, Any]) -> AgentReport:
    """Parse the controller's view of a node's agent. Unknown values become Presence.NEVER or Verdict.UNKNOWN."""
    return AgentReport(
        str(message["node"]),
        _presence(message.get("presence")),
        float(message.get("heard") or 0.0),
        int(message.get("checks") or 0),
        tuple((str(check), _verdict(verdict), str(text)) for check, verdict, text in message.get("findings") or ()),
        read_gpus(message),
    )


def _presence(word: object) -> Presence:
    return next((each for each in Presence if each.value == word), Presence.NEVER)


def _verdict(word: object) -> Verdict:
    return next((each for each in Verdict if each.value == word), Verdict.UNKNOWN)


def parse_automation(message: Mapping[str, Any]) -> Automation:
    return Automation(
        message.get("automation") == "paused",
        str(message.get("mode", "")),
        int(message.get("per_hour", 0)),
        {str(name): int(count) for name, count in dict(message.get("taken") or {}).items()},
    )


@dataclass
class PlayedSources:
    """Sources for tests and benchmarks. Each method returns the part that the caller has set, or raises it if it is an
    error."""

    slurm_part: SlurmPart | DalsegnoError
    controller_part: ControllerPart | DalsegnoError
    run_views: Sequence[RunPicture] = ()
    host_part: HostPart = field(default_factory=HostPart)

    def hosts(self) -> HostPart:
        return self.host_part

    def slurm(self) -> SlurmPart:
        if isinstance(self.slurm_part, DalsegnoError):
            raise self.slurm_part
        return self.slurm_part

    def controller(self) -> ControllerPart:
        if isinstance(self.controller_part, DalsegnoError):
            raise self.controller_part
        return self.controller_part

    def runs(self) -> tuple[RunPicture, ...]:
        return tuple(self.run_views)


def record_of(view: RunPicture) -> RunRecord:
    return RunRecord(view.folder, view.uid)
