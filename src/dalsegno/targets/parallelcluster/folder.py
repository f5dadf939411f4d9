"""The state folders of a cluster on ParallelCluster: one on the operator's machine, and one on the head node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dalsegno.spec.facts import facts_to_json
from dalsegno.system.files import damaged, make_folder, read_json, write_atomic
from dalsegno.targets.folder import ClusterFolder, ClusterRole, read_facts


@dataclass(frozen=True)
class PclusterFolder(ClusterFolder):
    """The paths of a cluster on ParallelCluster."""

    @property
    def config(self) -> Path:
        """The ParallelCluster configuration that `pcluster` got last."""
        return self.root / "pcluster.yaml"

    @property
    def template(self) -> Path:
        """The CloudFormation template that was sent last."""
        return self.root / "prerequisites.json"

    @property
    def logs(self) -> Path:
        """The events and logs of operations that failed."""
        return self.root / "logs"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    def key(self, name: str) -> Path:
        """The private key of a key pair that `up` created."""
        return self.secret / f"{name}.pem"


class PclusterStage(Enum):
    """The stage that the last `up` or `down` reached."""

    PREPARING = "preparing"  # the stack of prerequisites is being created
    MAKING = "making"
    UP = "up"
    CHANGING = "changing"
    REMOVING = "removing"


@dataclass(frozen=True)
class PclusterState:
    """The content of the state file. `scripts` is a digest of the bootstrap scripts that were uploaded last."""

    phase: PclusterStage
    cluster_id: str
    region: str
    version: str
    stack: str = ""  # name of our own stack; "" on the head node
    bucket: str = ""
    login_user: str = "ubuntu"
    key: str = ""  # file of the private key; "" if connections use SSM
    scripts: str = ""
    file_systems: Mapping[str, str] = field(default_factory=dict)  # name in the stack -> id, for `down` to delete
    kept: Mapping[str, str] = field(default_factory=dict)  # file systems that left the stack: id -> id to mount
    role: ClusterRole = ClusterRole.OPERATOR
    target: str = "parallelcluster"


def read_state(folder: ClusterFolder) -> PclusterState | None:
    return read_facts(PclusterState, folder.state)


def write_state(folder: ClusterFolder, state: PclusterState) -> None:
    make_folder(folder.root)
    write_atomic(folder.state, state_text(state))


def state_text(state: PclusterState) -> str:
    return json.dumps(facts_to_json(state), indent=1)


def read_sent_template(folder: PclusterFolder) -> dict[str, Any]:
    """Return the template that was sent last; {} if none was sent."""
    value = read_json(folder.template)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise damaged(folder.template, "not a JSON object")
    return value


def read_sent_config(folder: PclusterFolder) -> dict[str, Any]:
    """Return the config that was sent last; {} if none was sent."""
    import yaml

    try:
        value = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        raise damaged(folder.config, str(error)) from error
    return value if isinstance(value, dict) else {}
