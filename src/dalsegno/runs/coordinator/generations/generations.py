"""The state machine of a run: events in, orders out. It does no I/O, so every sequence of events can be tested.

A generation is formed, opens its store, runs, and ends as a whole. It ends when all its workers succeed, when one of
them fails or hangs, or when the run loses, leaves or gains nodes. The next generation is formed only after every
surviving agent has reported that all workers of the old one have ended. Two generations therefore never run at the same
time. Messages about any other generation than the current one are late and are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dalsegno.runs.coordinator.generations.causes import (
    CauseKind,
    Failure,
    back_off_s,
    first_cause,
    is_bug,
    read_failure,
    suspected_node,
)
from dalsegno.runs.coordinator.generations.events import (
    AgentGone,
    AgentJoined,
    Cancelled,
    Event,
    Exclude,
    Finish,
    GenerationStopped,
    Hung,
    NodesOutOfService,
    NodesReclaimed,
    NodesTaken,
    OpenStore,
    Order,
    PauseOver,
    ReleaseNodes,
    RunMoved,
    SaveGeneration,
    SaveOverdue,
    Start,
    StopGeneration,
    StoreOpened,
    Wait,
    WorkerEnded,
)
from dalsegno.runs.coordinator.generations.group import Members, Shape, form_group
from dalsegno.runs.status import RunCause
from dalsegno.train.contract import DONE, SAVED, STOP, TERMINATED

QUICK_S = 10.0  # repeated failures within this time after a start cause a pause
FORGIVEN_S = 600.0  # a generation that ran at least this long resets the count of restarts


class GenerationPhase(Enum):
    GATHERING = "gathering"  # no generation runs: too few agents are ready, or the run pauses or moves
    OPENING = "opening"  # the store is being opened
    RUNNING = "running"
    STOPPING = "stopping"  # waiting until all workers of this generation have ended
    ENDED = "ended"


@dataclass(frozen=True)
class Run:
    """The complete state of a run between two events."""

    shape: Shape
    max_restarts: int = 3
    literal: bool = False  # apply torchrun's rules: only exit code 0 is success, and every failure uses up a restart
    phase: GenerationPhase = GenerationPhase.GATHERING
    generation: int = 0
    ready: tuple[str, ...] = ()  # agents, in order of arrival
    doubted: frozenset[str] = frozenset()  # nodes that are out of service in Slurm
    group: Members | None = None  # members of the current generation, or of the previous one
    done: frozenset[int] = frozenset()  # ranks that ended successfully
    saved: bool = False  # whether a rank in `done` has saved its state and must be resumed later
    waiting_for: frozenset[str] = frozenset()  # agents that have not confirmed that they stopped
    restarts: int = 0  # restarts after worker failures; lost nodes are not counted
    spent: int = 0  # number of restarts counted against max_restarts
    quick: int = 0  # number of immediate failures in a row
    failures: tuple[Failure, ...] = ()  # failures in the current generation, in order of arrival
    age_s: float = 0.0  # age of the generation when it failed
    # Whether the current generation has lost a node. The errors of other ranks are then most likely consequences.
    lost_member: bool = False
    last: Failure | None = None  # why the previous generation failed
    pausing: bool = False  # whether the run pauses after a quick failure
    leaving: bool = False  # whether the run is losing all its nodes
    taken: Mapping[str, str] = field(default_factory=dict)  # nodes to leave once all workers have saved -> why
    exit_code: int | None = None  # if set, the run ends with this code
    why: str = ""  # why the run ends
    cancelled: bool = False  # whether the user cancelled the run
    smaller: bool = False  # whether a generation may start with fewer than max_nodes


Step = tuple[Run, list[Order]]


def advance(run: Run, event: Event) -> Step:
    """Return the next state of the run and the orders to execute."""
    if run.phase is GenerationPhase.ENDED:
        return run, []
    if isinstance(event, AgentJoined):
        return _joined(run, event.agent)
    if isinstance(event, AgentGone):
        return _left(run, event.agent)
    if isinstance(event, StoreOpened):
        return _store_opened(run, event)
    if isinstance(event, WorkerEnded):
        return _worker_ended(run, event)
    if isinstance(event, GenerationStopped):
        return confirm_stops(run, [event])
    if isinstance(event, Hung):
        return _hung(run, event)
    if isinstance(event, PauseOver):
        return _try_to_form(replace(run, pausing=False))
    return _external_event(run, event)


def _external_event(run: Run, event: Event) -> Step:
    if isinstance(event, Cancelled):
        ends = run.exit_code is not None  # a run that is already ending keeps its exit code
        return (run, []) if ends else _stop_all(replace(run, exit_code=TERMINATED, why="cancelled", cancelled=True))
    if isinstance(event, NodesReclaimed):
        return _leaving(run, event.save_s)
    if isinstance(event, NodesTaken):
        return _leave_nodes(run, event)
    if isinstance(event, SaveOverdue):
        saving = run.phase is GenerationPhase.RUNNING and event.generation == run.generation
        return _stop_all(run) if saving and (run.taken or run.leaving) else (run, [])
    if isinstance(event, NodesOutOfService):
        return (run, []) if event.nodes == run.doubted else (replace(run, doubted=event.nodes), [])
    if isinstance(event, RunMoved):
        return _try_to_form(replace(run, leaving=False))
    return _try_to_form(replace(run, smaller=True))


def _joined(run: Run, agent: str) -> Step:
    """Add an agent. It completes the group, lets a smaller group grow, or becomes a spare."""
    if agent in run.ready:
        return run, []
    run = replace(run, ready=(*run.ready, agent))
    grows = (
        run.phase in (GenerationPhase.OPENING, GenerationPhase.RUNNING)
        and run.group
        and len(run.group.places) < run.shape.max_nodes
    )
    return _stop_all(run) if grows and not run.leaving else _try_to_form(run)


def _left(run: Run, agent: str) -> Step:
    """Remove an agent. A run that has lost all agents waits for all its nodes again instead of starting with fewer."""
    if agent not in run.ready:
        return run, []
    ready = tuple(one for one in run.ready if one != agent)
    member = run.group is not None and agent in run.group.agents
    run = replace(run, ready=ready, smaller=run.smaller and bool(ready))
    if run.phase is GenerationPhase.STOPPING:
        lost = run.lost_member or member
        return _when_all_stopped(replace(run, waiting_for=run.waiting_for - {agent}, lost_member=lost))
    if not member or run.phase not in (GenerationPhase.OPENING, GenerationPhase.RUNNING):
        return run, []
    return _stop_all(replace(run, lost_member=True))


def _store_opened(run: Run, event: StoreOpened) -> Step:
    if run.phase is not GenerationPhase.OPENING or run.group is None or event.generation != run.generation:
        return run, []
    orders: list[Order] = [Start(agent, run.group, event.port, run.restarts) for agent in run.group.agents]
    return replace(run, phase=GenerationPhase.RUNNING), orders


def _worker_ended(run: Run, event: WorkerEnded) -> Step:
    if run.group is None or event.generation != run.generation:
        return run, []
    if event.code == DONE or (event.code == SAVED and not run.literal) or (_saves(run) and event.code != STOP):
        return _ended_well(run, event)
    failure = event.failure or read_failure(event.rank, event.agent, event.code)
    if run.phase is GenerationPhase.STOPPING:
        if not run.failures and failure.noise:
            return run, []  # nothing failed before the stop, so this error is caused by the stopped peers
        return replace(run, failures=(*run.failures, failure)), []
    if run.phase is not GenerationPhase.RUNNING:
        return run, []
    return _stop_all(replace(run, failures=(failure,), age_s=event.age_s))


def _ended_well(run: Run, event: WorkerEnded) -> Step:
    """Record the successful end of a worker.

    While the run leaves nodes, every exit code except STOP counts as success, because workers resume from their last
    save.
    """
    if run.phase is not GenerationPhase.RUNNING or run.group is None:
        return run, []
    all_ranks = run.group.ranks
    run = replace(run, done=run.done | {event.rank}, saved=run.saved or event.code != DONE)
    if run.done != all_ranks:
        return run, []
    if _saves(run) and run.saved:
        return _stop_all(run)
    return _stop_all(replace(run, exit_code=SAVED if run.saved else DONE))


def _hung(run: Run, event: Hung) -> Step:
    if run.phase is not GenerationPhase.RUNNING or run.group is None or event.generation != run.generation:
        return run, []
    failure = Failure(0, run.group.store_agent, -9, CauseKind.KILLED, why=event.why)
    return _stop_all(replace(run, failures=(failure,), age_s=event.age_s))


def _saves(run: Run) -> bool:
    """Return whether the workers have been ordered to save and exit."""
    return run.leaving or bool(run.taken)


def _leaving(run: Run, save_s: float) -> Step:
    """Leave all nodes. Running workers may save; a generation that is still forming is not started."""
    if run.leaving:
        return run, []
    already_leaving = bool(run.taken)
    run = replace(run, leaving=True, taken={})
    if run.phase is GenerationPhase.OPENING:
        return _stop_all(run)
    if run.phase is GenerationPhase.GATHERING:
        return _when_all_stopped(run)
    return run, [] if already_leaving or not save_s else save_orders(run, save_s)


def _leave_nodes(run: Run, event: NodesTaken) -> Step:
    """Leave some nodes. If workers run there, all workers save first, so that no step is lost."""
    nodes = {node: why for node, why in event.nodes.items() if node in run.ready and node not in run.taken}
    if not nodes or run.leaving or run.exit_code is not None:
        return run, []
    already_leaving, members = bool(run.taken), set(run.group.agents if run.group else ())
    run = replace(run, taken={**run.taken, **nodes})
    if run.phase is GenerationPhase.GATHERING or members.isdisjoint(nodes):
        run, orders = _drop(run, nodes)
        run, more = _try_to_form(run)
        return run, [*orders, *more]
    if run.phase is GenerationPhase.OPENING:
        return _stop_all(run)
    return run, [] if already_leaving or run.phase is GenerationPhase.STOPPING else save_orders(run, event.save_s)


def save_orders(run: Run, save_s: float) -> list[Order]:
    return [SaveGeneration(run.group.agents, run.generation, save_s)] if run.group else []


def _drop(run: Run, nodes: Iterable[str]) -> Step:
    """Remove the nodes that the run leaves. They are used again when they return."""
    gone = {node: run.taken[node] for node in nodes}
    left = {node: why for node, why in run.taken.items() if node not in gone}
    orders: list[Order] = [Exclude(node, why, until_repaired=True) for node, why in gone.items() if node in run.ready]
    return replace(run, taken=left, ready=tuple(each for each in run.ready if each not in gone)), orders


def _stop_all(run: Run) -> Step:
    """Stop the current generation on all nodes. The next action is decided when all agents have confirmed the stop."""
    if run.phase in (GenerationPhase.GATHERING, GenerationPhase.STOPPING) or run.group is None:
        return _when_all_stopped(run)
    ready = set(run.ready)
    members = [agent for agent in run.group.agents if agent in ready]
    stopping = replace(run, phase=GenerationPhase.STOPPING, waiting_for=frozenset(members))
    run, orders = _when_all_stopped(stopping)
    return run, [*(StopGeneration(agent, stopping.generation) for agent in members), *orders]


def confirm_stops(run: Run, stops: Iterable[GenerationStopped]) -> Step:
    """Record that agents have stopped their workers. Pass many stops in one call, because each call copies a set."""
    valid = [stop for stop in stops if stop.generation == run.generation]
    if run.phase is not GenerationPhase.STOPPING or not valid:
        return run, []
    more = [failure for stop in valid for failure in stop.failures]
    failures = (*run.failures, *more) if run.failures else ()
    waiting_for = run.waiting_for - {stop.agent for stop in valid}
    return _when_all_stopped(replace(run, waiting_for=waiting_for, failures=failures))


def _when_all_stopped(run: Run) -> Step:
    if run.waiting_for:
        return run, []
    if run.exit_code is not None:
        return replace(run, phase=GenerationPhase.ENDED), [Finish(run.exit_code, why=run.why, about=_about(run))]
    run = replace(run, phase=GenerationPhase.GATHERING)
    cause = first_cause(run.failures)
    if run.leaving and (cause is None or cause.code != STOP):
        return replace(run, failures=(), lost_member=False), [ReleaseNodes()]
    run, left = _drop(run, tuple(run.taken))
    if cause is None or (run.lost_member and cause.noise):
        run, orders = _try_to_form(replace(run, failures=(), lost_member=False))
    else:
        run, orders = _after_failure(run, cause)
    return run, [*left, *orders]


def _about(run: Run) -> RunCause:
    return RunCause.CANCELLED if run.cancelled else RunCause.OTHER


def _after_failure(run: Run, cause: Failure) -> Step:
    """Restart the run after a failure, or end it if a restart would not help or is not allowed."""
    spent = 0 if run.age_s >= FORGIVEN_S and not run.literal else run.spent
    why = _reason_to_end(run, cause, spent)
    if why:
        code = cause.exit_code
        return replace(run, phase=GenerationPhase.ENDED, exit_code=code, why=why), [Finish(code, cause, why)]
    quick = run.quick + 1 if run.age_s < QUICK_S else 0
    # Only the script's own failures cause a pause. A killed worker does not make another failure more likely.
    pause_s = back_off_s(quick) if cause.code > 0 and not run.literal else 0.0
    suspect = "" if run.literal else suspected_node(cause, run.last)
    run = replace(run, restarts=run.restarts + 1, spent=spent + 1, quick=quick, pausing=pause_s > 0)
    run = replace(run, last=cause, failures=(), lost_member=False, ready=tuple(a for a in run.ready if a != suspect))
    first: list[Order] = [_exclude(suspect, cause)] if suspect else []
    first += [Wait(pause_s)] if pause_s else []
    run, orders = _try_to_form(run)
    return run, [*first, *orders]


def _exclude(agent: str, cause: Failure) -> Exclude:
    if cause.healthy:
        return Exclude(agent)
    return Exclude(agent, "is down or drained, and a worker failed on it", until_repaired=True)


def _reason_to_end(run: Run, cause: Failure, spent: int) -> str:
    if cause.code == STOP and not run.literal:
        return "the script asked not to be restarted"
    if cause.hopeless and not run.literal:
        return f"{cause.sentence()}; restarting would not help"
    if spent >= run.max_restarts:
        plural = "s" * (run.max_restarts > 1)
        times = f"after {run.max_restarts} restart{plural}" if run.max_restarts else "and no restart was requested"
        return f"{cause.sentence()}, {times}"
    if is_bug(cause, run.last) and not run.literal:
        return f"{cause.sentence()}, the same failure as before; restarting would not help"
    return ""


def _try_to_form(run: Run) -> Step:
    if run.phase is not GenerationPhase.GATHERING or run.pausing or run.leaving:
        return run, []
    shape = run.shape if run.smaller else replace(run.shape, min_nodes=run.shape.max_nodes)
    before = run.group.agents if run.group else ()
    group = form_group(run.generation + 1, shape, run.ready, before, run.doubted)
    if group is None:
        return run, []
    run = replace(
        run,
        phase=GenerationPhase.OPENING,
        generation=group.generation,
        group=group,
        done=frozenset(),
        saved=False,
        smaller=True,
    )
    return run, [OpenStore(group.store_agent, group.generation)]
