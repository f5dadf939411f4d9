"""The life of a run as a state machine: events in, orders out. Pure, so that every order of events can be tried.

A generation is formed, opens its store, runs, and ends as a whole: by success of all its workers, by the death of one
of them, or by the loss of a node. The next one is formed when every surviving agent has said that nothing of the old
one runs any more, so two generations never run at the same time. Words about another generation than the present one
come late and are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dalsegno.launch.events import (
    Cancelled,
    Event,
    Finish,
    Joined,
    Left,
    OpenStore,
    Order,
    Start,
    Stop,
    Stopped,
    StoreOpened,
    WorkerEnded,
)
from dalsegno.launch.group import Group, Shape, form_group

CANCELLED_CODE = 143


class Phase(Enum):
    GATHERING = "gathering"  # too few agents are ready
    OPENING = "opening"  # the store is being opened
    RUNNING = "running"
    STOPPING = "stopping"  # waiting until nothing of this generation runs
    ENDED = "ended"


@dataclass(frozen=True)
class Run:
    """All there is to know of a run between two events."""

    shape: Shape
    max_restarts: int = 3
    phase: Phase = Phase.GATHERING
    generation: int = 0
    ready: tuple[str, ...] = ()  # agents, in the order in which they came
    group: Group | None = None  # of the present generation, or of the last one
    done: frozenset[int] = frozenset()  # ranks that ended well
    waiting_for: frozenset[str] = frozenset()  # agents that still have to stop
    restarts: int = 0  # after failures of workers; a lost node costs none
    exit_code: int | None = None  # set: stop for good with this
    smaller: bool = False  # may start with fewer than max_nodes


Step = tuple[Run, list[Order]]


def advance(run: Run, event: Event) -> Step:
    """What becomes of the run, and what is to be done about it."""
    if run.phase is Phase.ENDED:
        return run, []
    if isinstance(event, Joined):
        return _joined(run, event.agent)
    if isinstance(event, Left):
        return _left(run, event.agent)
    if isinstance(event, StoreOpened):
        return _store_opened(run, event)
    if isinstance(event, WorkerEnded):
        return _worker_ended(run, event)
    if isinstance(event, Stopped):
        return _stopped(run, event)
    if isinstance(event, Cancelled):
        return _stop_all(replace(run, exit_code=CANCELLED_CODE))
    return _try_to_form(replace(run, smaller=True))


def _joined(run: Run, agent: str) -> Step:
    """A new agent fills the group that waits for it, lets a smaller one grow, or is a spare."""
    if agent in run.ready:
        return run, []
    run = replace(run, ready=(*run.ready, agent))
    grows = run.phase in (Phase.OPENING, Phase.RUNNING) and run.group and len(run.group.places) < run.shape.max_nodes
    return _stop_all(run) if grows else _try_to_form(run)


def _left(run: Run, agent: str) -> Step:
    if agent not in run.ready:
        return run, []
    run = replace(run, ready=tuple(one for one in run.ready if one != agent))
    if run.phase is Phase.STOPPING:
        return _when_all_stopped(replace(run, waiting_for=run.waiting_for - {agent}))
    member = run.group is not None and agent in run.group.agents
    return _stop_all(run) if member and run.phase in (Phase.OPENING, Phase.RUNNING) else (run, [])


def _store_opened(run: Run, event: StoreOpened) -> Step:
    if run.phase is not Phase.OPENING or run.group is None or event.generation != run.generation:
        return run, []
    orders: list[Order] = [Start(agent, run.group, event.port, run.restarts) for agent in run.group.agents]
    return replace(run, phase=Phase.RUNNING), orders


def _worker_ended(run: Run, event: WorkerEnded) -> Step:
    if run.phase is not Phase.RUNNING or run.group is None or event.generation != run.generation:
        return run, []
    if event.code == 0:
        done = run.done | {event.rank}
        all_done = done == run.group.ranks
        run = replace(run, done=done)
        return _stop_all(replace(run, exit_code=0)) if all_done else (run, [])
    if run.restarts >= run.max_restarts:
        return _stop_all(replace(run, exit_code=_exit_code(event.code)))
    return _stop_all(replace(run, restarts=run.restarts + 1))


def _exit_code(code: int) -> int:
    """As a shell tells it: a signal's number is added to 128."""
    return 128 - code if code < 0 else code


def _stop_all(run: Run) -> Step:
    """End the present generation everywhere; what comes then is decided when it is gone."""
    if run.phase in (Phase.GATHERING, Phase.STOPPING) or run.group is None:
        return _when_all_stopped(run)
    members = [agent for agent in run.group.agents if agent in run.ready]
    stopping = replace(run, phase=Phase.STOPPING, waiting_for=frozenset(members))
    run, orders = _when_all_stopped(stopping)
    return run, [*(Stop(agent, stopping.generation) for agent in members), *orders]


def _stopped(run: Run, event: Stopped) -> Step:
    if run.phase is not Phase.STOPPING or event.generation != run.generation:
        return run, []
    return _when_all_stopped(replace(run, waiting_for=run.waiting_for - {event.agent}))


def _when_all_stopped(run: Run) -> Step:
    if run.waiting_for:
        return run, []
    if run.exit_code is not None:
        return replace(run, phase=Phase.ENDED), [Finish(run.exit_code)]
    return _try_to_form(replace(run, phase=Phase.GATHERING))


def _try_to_form(run: Run) -> Step:
    if run.phase is not Phase.GATHERING:
        return run, []
    shape = run.shape if run.smaller or run.generation else replace(run.shape, min_nodes=run.shape.max_nodes)
    before = run.group.agents if run.group else ()
    group = form_group(run.generation + 1, shape, run.ready, before)
    if group is None:
        return run, []
    run = replace(run, phase=Phase.OPENING, generation=group.generation, group=group, done=frozenset())
    return run, [OpenStore(group.store_agent, group.generation)]
