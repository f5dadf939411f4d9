"""Run folders for tests, as `run` and a coordinator write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus, write_status
from dalsegno.runs.submit.plan import plan_run
from dalsegno.runs.submit.prepare import first_status, prepare_run
from tests.submit.runs import FOREIGN, HEAD, asked

BASE = RunStatus("train-k3f9x", "train", "ada", RunPhase.RUNNING, 100.0, 100.0)


def members(*names: str) -> tuple[RunNodeStatus, ...]:
    return tuple(RunNodeStatus(name, NodeRole.MEMBER, rank) for rank, name in enumerate(names))


def status(**fields: Any) -> RunStatus:
    return replace(BASE, **fields)


def make_run(
    home: Path,
    run: str = "train-k3f9x",
    *,
    on_head: bool = False,
    ranks: int = 1,
    created: float = 100.0,
    cluster: str = "",
) -> RunFolder:
    facts = replace(HEAD if on_head else FOREIGN, runs_folder=str(home), id=cluster)
    plan = plan_run(asked(nodes=ranks), facts, run)
    gone = {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(home / "no-such-cluster" / "slurm.conf")}
    return prepare_run(plan, gone, first_status(plan, "ada", created), home)


def tell(run: RunFolder, **fields: Any) -> None:
    """Write a status, as a coordinator does."""
    write_status(run.status, status(run=run.run, **fields))


def end(run: RunFolder, code: int = 0, **fields: Any) -> None:
    tell(run, **{"phase": RunPhase.ENDED, "exit_code": code, "started": 100.0, "ended": 160.0, **fields})


def say(run: RunFolder, generation: int, rank: int, text: str) -> None:
    path = run.log(generation, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)
