"""The state folders of a HyperPod cluster: one on the operator's machine, and one on the controller instance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from dalsegno.spec.facts import facts_to_json
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.targets.folder import ClusterFolder, ClusterRole, read_facts


@dataclass(frozen=True)
class HyperPodFolder(ClusterFolder):
    """The paths of a HyperPod cluster."""

    @property
    def ssh_config(self) -> Path:
        """The ssh configuration for all instances, for `ssh -F`."""
        return self.root / "ssh-config"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known-hosts"

    @property
    def operation_logs(self) -> Path:
        """The events and logs of operations that failed."""
        return self.root / "operations"

    @property
    def scripts(self) -> Path:
        """A copy of the uploaded lifecycle scripts."""
        return self.root / "lifecycle"


class HyperPodStage(Enum):
    """The stage that the last `up` or `down` reached."""

    MAKING = "making"
    CHANGING = "changing"
    UP = "up"
    REMOVING = "removing"


@dataclass(frozen=True)
class HyperPodState:
    """The content of the state file. It is written before anything is created, so that `down` finds everything."""

    phase: HyperPodStage
    region: str
    bucket: str
    prefix: str
    arn: str = ""
    created_bucket: bool = False
    created_storage: Mapping[str, str] = field(default_factory=dict)  # name -> id of each file system that `up` created
    uploaded: Mapping[str, str] = field(default_factory=dict)  # file -> digest of its content
    stale: bool = False  # whether running instances must still run the uploaded scripts, over ssh
    monitored: bool = False  # whether `monitor up` has switched the exporters on
    workspace: str = ""  # the address of the workspace that `monitor up` created
    grafana: bool = False  # whether `dashboards deploy` may have created a stack
    controller_group: str = "controller"
    login_group: str = "login"
    role: ClusterRole = ClusterRole.OPERATOR
    target: str = "hyperpod"


def read_hyperpod_state(folder: ClusterFolder) -> HyperPodState | None:
    return read_facts(HyperPodState, folder.state)


def write_hyperpod_state(folder: ClusterFolder, state: HyperPodState) -> None:
    make_folder(folder.root)
    write_atomic(folder.state, json.dumps(facts_to_json(state), indent=1))
