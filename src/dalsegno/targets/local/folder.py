"""The state folder of a local cluster. `Folder` and its base class name every path in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.spec.facts import facts_to_json
from dalsegno.system.files import write_atomic
from dalsegno.targets.folder import ClusterFolder, read_facts
from dalsegno.targets.local.placement import Placement

UNUSABLE = ',#%"\\:=[]'  # a path with one of these characters breaks munge, MariaDB, slurmd's spool folder or gres.conf
SOCKET_PATH_MAX = 107  # maximum length of a unix socket's path in bytes, without the final zero


@dataclass(frozen=True)
class Folder(ClusterFolder):
    """The paths of a local cluster; all its files are below `root`."""

    @property
    def native(self) -> Path:
        """The folder of Slurm's container plugin, with a build for each Slurm version that the cluster has used."""
        return self.root / "native"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge.sock"

    @property
    def database(self) -> Path:
        return self.secret / "db"

    @property
    def database_socket(self) -> Path:
        return self.secret / "db.sock"

    @property
    def slurmctld_state(self) -> Path:
        return self.root / "slurmctld"

    @property
    def pids(self) -> Path:
        """The folder of pid files. Each head host mounts its own folder here.

        With a shared folder, the backup slurmctld would kill the primary slurmctld.
        """
        return self.root / "pid"

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def devices(self) -> Path:
        """The folder of simulated GPUs' device files. It is outside the state folder if the state folder's path
        contains a blank, because Slurm accepts no blank in the path of a device file."""
        if not any(letter.isspace() for letter in str(self.root)):
            return self.root / "dev"
        uid = os.geteuid()
        return Path("/run" if uid == 0 else f"/run/user/{uid}") / f"dalsegno-{self.id}-dev"

    @property
    def homes(self) -> Path:
        return self.root / "home"

    @property
    def storage(self) -> Path:
        """The folder for storage without a `source` in the cluster file. It is removed with the cluster."""
        return self.root / "storage"

    def scratch(self, node: str) -> Path:
        """The scratch disk of a node. A replaced machine gets an empty one."""
        return self.host(node) / "scratch"

    @property
    def mount_points(self) -> Path:
        """The list of mount points that `up` created outside the state folder."""
        return self.root / "mount-points.json"

    def host(self, name: str) -> Path:
        return self.root / "hosts" / name

    def spool(self, node: str) -> Path:
        """The spool folder of a node's slurmd. On a virtual host, the folder is empty after each boot."""
        return self.host(node) / "spool"

    def telemetry(self, node: str) -> Path:
        """The file with the state of a node's simulated hardware."""
        return self.host(node) / "telemetry.json"

    def node_metrics(self, node: str) -> Path:
        """The folder in which the node's agent writes a file of metrics for node_exporter."""
        return self.host(node) / "metrics"

    def boot_id(self, node: str) -> Path:
        """The file with the node's boot id, which changes at every boot."""
        return self.host(node) / "boot-id"

    def agent_secret(self, node: str) -> Path:
        """The file with the secret of the node's agent. A replaced machine gets a new secret."""
        return self.secret / "agents" / node

    @property
    def metrics_token(self) -> Path:
        """The file with the token that readers of the observer's /metrics must send."""
        return self.secret / "metrics-token"

    @property
    def monitor(self) -> Path:
        """A folder of mode 0700 with the settings and data of Prometheus and Alertmanager."""
        return self.root / "monitor"

    @property
    def monitor_password(self) -> Path:
        """The file with the password of Prometheus and Alertmanager."""
        return self.monitor / "password"

    @property
    def monitor_web_config(self) -> Path:
        """The file with the users that may log in to Prometheus and Alertmanager."""
        return self.monitor / "web.yml"

    @property
    def exporter_password(self) -> Path:
        """The file with the password of node_exporters, which Prometheus sends to every node."""
        return self.monitor / "exporter-password"

    @property
    def exporter_web_config(self) -> Path:
        """The file with the users that may log in to node_exporters."""
        return self.monitor / "exporter-web.yml"

    @property
    def ldap(self) -> Path:
        """A folder with the settings and data of slapd. Only slapd and root can enter it."""
        return self.root / "ldap"

    @property
    def ldap_password(self) -> Path:
        """The file with the password of the directory's administrator."""
        return self.secret / "ldap-password"

    @property
    def ldap_ca(self) -> Path:
        """The certificate of the CA that signed the directory's certificate. Every user may read it."""
        return self.etc / "ldap-ca.pem"

    @property
    def room_socket(self) -> Path:
        """The socket of the machine room."""
        return self.secret / "room.sock"

    def machine(self, node: str) -> Path:
        """The file with the id of the node's present machine. A replacement gets a new id."""
        return self.host(node) / "machine"

    def faults(self, node: str) -> Path:
        """The folder with the records of the node's lasting injected faults."""
        return self.host(node) / "faults"

    def log(self, host: str, service: str) -> Path:
        return self.host(host) / f"{service}.log"

    def check(self, nodes: Sequence[str] = ()) -> None:
        """Raise an error if Slurm, munge or MariaDB cannot use the folder's path, or if a socket's path is too long.

        Call this before anything is created.
        """
        if unusable := sorted({letter for letter in str(self.root) if letter in UNUSABLE or not letter.isprintable()}):
            raise TargetError(
                f"Slurm and MariaDB cannot use the folder {str(self.root)!r}: its path contains {unusable[0]!r}",
                hint="set DALSEGNO_HOME to another folder",
            )
        # The path of slurmstepd's socket consists of the spool folder, the node, the job and the step.
        steps = [str(self.spool(node) / f"{node}_{2**32}.{2**32}") for node in nodes]
        longest = max(map(str, [self.munge_socket, self.controller_socket, self.room_socket, *steps]), key=len)
        if len(longest) > SOCKET_PATH_MAX:
            raise TargetError(
                f"the state folder's path is too long for a socket ({len(longest)} > {SOCKET_PATH_MAX}): {longest}",
                hint="set DALSEGNO_HOME to a shorter folder",
            )
        if not self.devices.is_relative_to(self.root) and not self.devices.parent.is_dir():
            raise TargetError(
                f"Slurm cannot read GPU devices below a folder with a blank in its name: {self.root}",
                hint="set DALSEGNO_HOME to another folder",
            )


class ApplyStage(Enum):
    """The stage that the last `up` or `down` reached."""

    MAKING = "making"
    UP = "up"
    REMOVING = "removing"


@dataclass(frozen=True)
class ClusterState:
    """The content of the state file. `phase` says how far the last `up` or `down` got.

    `registered` says whether slurmdbd knows the cluster. `owner` is the uid of the person who created the cluster, with
    or without sudo.
    """

    phase: ApplyStage
    placement: Placement
    slurm_version: str
    registered: bool = False
    owner: int = 0
    target: str = "local"


def read_state(folder: Folder) -> ClusterState | None:
    return read_facts(ClusterState, folder.state)


def read_state_leniently(folder: Folder) -> ClusterState | None:
    """Return the state; None if the state file is missing or damaged, because `down` must work even then."""
    try:
        return read_state(folder)
    except DalsegnoError:
        return None


def ids_of_others(folder: Folder) -> frozenset[int]:
    """Return the uids and gids that the other clusters in the same parent folder use."""
    found = [Folder(path.parent) for path in folder.root.parent.glob("*/state.json") if path.parent != folder.root]
    places = [state.placement for each in found if (state := read_state_leniently(each))]
    return frozenset(number for place in places for number in (*place.uids.values(), *place.gids.values()))


def write_state(folder: Folder, state: ClusterState) -> None:
    write_atomic(folder.state, json.dumps(facts_to_json(state), indent=1))
