"""The state that a coordinator saves for the next one: the state of the run, its jobs and its steps."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.generations.causes import CauseKind, Failure, first_cause
from dalsegno.runs.coordinator.generations.events import Finish, Order, ReleaseNodes
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, save_orders
from dalsegno.runs.coordinator.generations.group import GroupPlace, Members
from dalsegno.runs.coordinator.nodes.departure import SAVE_S
from dalsegno.runs.coordinator.site import RunTerms
from dalsegno.runs.folder import repair_hint
from dalsegno.system.children import Process
from dalsegno.system.files import damaged, read_json, write_atomic
from dalsegno.train.contract import TRUSTED, VERIFIED


@dataclass(frozen=True)
class SavedStep:
    """An srun process on the coordinator's host, and the nodes on which it started agents."""

    process: Process
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class SavedJob:
    """A job of the run. `asking` is the salloc process that waits for the job."""

    role: JobRole
    job: int | None
    number: int
    asking: Process | None = None
    steps: tuple[SavedStep, ...] = ()


@dataclass(frozen=True)
class SavedTrust:
    """The record of which checkpoints may be committed, and which saved states may be loaded."""

    granted: int = 0  # generations before this one must not commit any more
    verified: int = 0  # the last step at which all ranks computed the same gradients
    distrusted: tuple[int, int] | None = None  # generation and step as in TRUSTED; None if all saved states are trusted

    @property
    def env(self) -> dict[str, str]:
        """The variables for workers that load a state."""
        verified = {VERIFIED: str(self.verified)} if self.verified else {}
        return {**verified, **({TRUSTED: "{}:{}".format(*self.distrusted)} if self.distrusted else {})}


@dataclass(frozen=True)
class SavedRun:
    run: Run
    jobs: tuple[SavedJob, ...] = ()
    excluded: tuple[str, ...] = ()
    lost_since: Mapping[str, float] = field(default_factory=dict)  # lost node -> time of the loss
    lost_nodes: int = 0
    started: float | None = None
    trust: SavedTrust = SavedTrust()
    used: tuple[str, ...] = ()  # nodes whose memory may hold data of the run


def write_saved(path: Path, saved: SavedRun, durable: bool = False) -> None:
    data = {
        "run": _run_to_json(saved.run),
        "jobs": [_job_to_json(job) for job in saved.jobs],
        "excluded": saved.excluded,
        "silent": dict(saved.lost_since),
        "lost_nodes": saved.lost_nodes,
        "started": saved.started,
        "granted": saved.trust.granted,
        "verified": saved.trust.verified,
        "distrusted": saved.trust.distrusted,
        "used": saved.used,
    }
    write_atomic(path, json.dumps(data), mode=0o600, durable=durable)


def read_saved(path: Path, fresh: Run) -> SavedRun | None:
    """Return the saved state with the shape and limits of `fresh`; None if there is none. Raise if it is unreadable."""
    raw: Any = read_json(path, repair_hint(path))
    try:
        return None if raw is None else _from_json(raw, fresh)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"{type(error).__name__} {error}", repair_hint(path)) from error


def _from_json(raw: Any, fresh: Run) -> SavedRun:
    return SavedRun(
        run=_run_from_json(raw["run"], fresh),
        jobs=tuple(_job_from_json(job) for job in raw["jobs"]),
        excluded=tuple(raw["excluded"]),
        lost_since={str(node): float(at) for node, at in raw["silent"].items()},
        lost_nodes=int(raw["lost_nodes"]),
        started=raw["started"],
        trust=_trust(raw),
        used=tuple(raw.get("used", ())),
    )


def _trust(raw: Mapping[str, Any]) -> SavedTrust:
    generation, step = raw.get("distrusted") or (0, 0)
    distrusted = (int(generation), int(step)) if generation else None
    return SavedTrust(int(raw.get("granted", 0)), int(raw.get("verified", 0)), distrusted)


def _run_to_json(run: Run) -> dict[str, Any]:
    plain = {each.name: getattr(run, each.name) for each in fields(run)}
    return {
        **plain,
        "taken": dict(run.taken),
        "shape": None,
        "phase": run.phase.value,
        "done": sorted(run.done),
        "waiting_for": sorted(run.waiting_for),
        "doubted": sorted(run.doubted),
        "group": run.group and [run.group.generation, list(run.group.agents), run.group.nproc_per_node],
        "failures": [_failure_to_json(each) for each in run.failures],
        "last": run.last and _failure_to_json(run.last),
    }


def _run_from_json(data: Mapping[str, Any], fresh: Run) -> Run:
    known = {each.name for each in fields(Run)} - {"shape", "max_restarts"}
    plain = {name: value for name, value in data.items() if name in known}
    return replace(
        fresh,
        **{
            **plain,
            "phase": GenerationPhase(data["phase"]),
            "ready": tuple(data["ready"]),
            "done": frozenset(data["done"]),
            "waiting_for": frozenset(data["waiting_for"]),
            "doubted": frozenset(data.get("doubted", ())),
            "group": _group(*data["group"]) if data["group"] else None,
            "failures": tuple(_failure(each) for each in data["failures"]),
            "last": _failure(data["last"]) if data["last"] else None,
        },
    )


def _group(generation: int, agents: list[str], nproc: int) -> Members:
    return Members(generation, tuple(GroupPlace(agent, rank, rank * nproc) for rank, agent in enumerate(agents)), nproc)


def _failure_to_json(failure: Failure) -> dict[str, Any]:
    return {**vars(failure), "kind": failure.kind.value}


def _failure(data: Mapping[str, Any]) -> Failure:
    return Failure(**{**data, "kind": CauseKind(data["kind"])})


def _job_to_json(job: SavedJob) -> dict[str, Any]:
    steps = [[step.process.pid, step.process.start, list(step.nodes)] for step in job.steps]
    asking = job.asking and [job.asking.pid, job.asking.start]
    return {"role": job.role.value, "job": job.job, "number": job.number, "asking": asking, "steps": steps}


def _job_from_json(data: Mapping[str, Any]) -> SavedJob:
    steps = tuple(SavedStep(Process(pid, start), tuple(nodes)) for pid, start, nodes in data["steps"])
    asking = Process(*data["asking"]) if data["asking"] else None
    return SavedJob(JobRole(data["role"]), data["job"], data["number"], asking, steps)


# Taking over after a coordinator's death


async def find_saved(
    site: RunTerms, release: Callable[[], Awaitable[None]], note: Callable[[str], None]
) -> SavedRun | None:
    """Return the previous coordinator's state; None if there is none.

    If the state is unreadable, the run starts over. Its old jobs are released, so that it does not hold nodes twice. On
    the head node, the connection file is removed, so that agents in the old jobs do not reconnect. In a batch step, the
    agents in the coordinator's own job reconnect and start over.
    """
    try:
        return read_saved(site.folder.state, Run(site.shape, site.max_restarts))
    except DalsegnoError as error:
        by_hand = f"`scancel --name={site.folder.run}`"
        note(f"{error.what}; the run starts over and its jobs are cancelled, as with {by_hand}")
    if site.own_job is None:
        site.folder.connect.unlink(missing_ok=True)
    await release()
    return None


def unfinished(run: Run) -> list[Order]:
    """Return orders that the previous coordinator may not have completed: to end the run, save, or leave nodes."""
    if run.phase is GenerationPhase.ENDED:
        return [Finish(run.exit_code or 0, first_cause(run.failures), run.why)]
    if run.taken and run.phase is GenerationPhase.RUNNING:
        return save_orders(run, SAVE_S)
    return [ReleaseNodes()] if run.leaving and run.phase is GenerationPhase.GATHERING else []
