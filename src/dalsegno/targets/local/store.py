"""What a local cluster remembers of itself between commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import Cluster
from dalsegno.spec.facts_json import facts_from_json, facts_to_json
from dalsegno.system.files import read_json, write_atomic
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import Placement

MAKING, UP, REMOVING = "making", "up", "removing"


@dataclass(frozen=True)
class State:
    """`phase` says how far the last command came; `registered`, whether slurmdbd knows the cluster."""

    phase: str
    placement: Placement
    slurm_version: str
    owner_uid: int
    registered: bool = False


def read_state(folder: Folder) -> State | None:
    value = read_json(folder.state)
    return facts_from_json(State, value) if isinstance(value, dict) else None


def read_state_leniently(folder: Folder) -> State | None:
    """For taking a cluster down: a state file that cannot be read must not stand in the way."""
    try:
        return read_state(folder)
    except (DalsegnoError, TypeError, KeyError, ValueError):
        return None


def write_state(folder: Folder, state: State) -> None:
    write_atomic(folder.state, json.dumps(asdict(state), indent=1))


def read_applied(folder: Folder) -> Cluster | None:
    value = read_json(folder.applied)
    return facts_from_json(Cluster, value) if isinstance(value, dict) else None


def write_applied(folder: Folder, cluster: Cluster) -> None:
    write_atomic(folder.applied, json.dumps(facts_to_json(cluster), indent=1))
