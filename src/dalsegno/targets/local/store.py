"""What a local cluster remembers of itself between commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import Cluster, facts_from_json, facts_to_json
from dalsegno.system.files import damaged, read_json, write_atomic
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import Placement


class ApplyStage(Enum):
    """How far the last command came."""

    MAKING = "making"
    UP = "up"
    REMOVING = "removing"


@dataclass(frozen=True)
class State:
    """`phase` says how far the last command came; `registered`, whether slurmdbd knows the cluster; `owner` is the uid
    of the person whose it is: who made it, with sudo or without."""

    phase: ApplyStage
    placement: Placement
    slurm_version: str
    registered: bool = False
    owner: int = 0


T = TypeVar("T")


def _read(kind: type[T], path: Path) -> T | None:
    """None only where there is no file: one that cannot be understood must not pass for a cluster that is not there."""
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object")
    try:
        return facts_from_json(kind, value)
    except (DalsegnoError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise damaged(path, str(error)) from error


def read_state(folder: Folder) -> State | None:
    return _read(State, folder.state)


def read_state_leniently(folder: Folder) -> State | None:
    """For taking a cluster down: a state file that cannot be read must not stand in the way."""
    try:
        return read_state(folder)
    except DalsegnoError:
        return None


def write_state(folder: Folder, state: State) -> None:
    write_atomic(folder.state, json.dumps(facts_to_json(state), indent=1))


def read_applied(folder: Folder) -> Cluster | None:
    return _read(Cluster, folder.applied)


def write_applied(folder: Folder, cluster: Cluster) -> None:
    write_atomic(folder.applied, json.dumps(facts_to_json(cluster), indent=1))
