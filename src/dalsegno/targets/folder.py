"""The state folder of a cluster: the part that is the same for every target."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import Cluster, facts_from_json, facts_to_json
from dalsegno.system.files import damaged, make_folder, read_json, read_text, write_atomic
from dalsegno.users.checks import People, check_people

IDENTITY = "cluster-id"  # file beside slurm.conf, because a run knows only the path of slurm.conf
OLDEST_TARGET = "local"  # the target of a state file that does not name its target
LOGS = "/var/log/dalsegno"  # folder for our daemons' logs on real machines
FIRST_UID = 10001
T = TypeVar("T")


class ClusterRole(Enum):
    """The machine that this state folder is on: the one where `up` is run, or the head where the cluster is used."""

    OPERATOR = "operator"
    HEAD = "head"


@dataclass(frozen=True)
class ClusterFolder:
    """The paths in a cluster's state folder. `root` is the folder itself, HOME/clusters/NAME."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def id(self) -> str:
        """A short id derived from the folder's path. It is a part of the names of links and cgroups."""
        return hashlib.blake2b(str(self.root).encode(), digest_size=4).hexdigest()

    @property
    def state(self) -> Path:
        """The state file. The target writes it before it creates anything, so that `down` can find everything."""
        return self.root / "state.json"

    @property
    def applied(self) -> Path:
        """The resolved cluster file of the last complete `up`."""
        return self.root / "cluster.json"

    @property
    def etc(self) -> Path:
        return self.root / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def identity(self) -> Path:
        """The file with the cluster's random id. The id distinguishes clusters of the same name, because job ids start
        at 1 in every new cluster."""
        return self.slurm_conf.with_name(IDENTITY)

    @property
    def unpacked(self) -> Path:
        """The folder of unpacked images, with a subfolder for each user. It is needed where the kernel does not let
        users mount images."""
        return self.root / "unpacked"

    @property
    def secret(self) -> Path:
        """A folder of mode 0700 for files that only the owner may read."""
        return self.root / "secret"

    @property
    def munge_key(self) -> Path:
        return self.secret / "munge.key"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def controller_socket(self) -> Path:
        return self.run / "controller.sock"

    @property
    def runs(self) -> Path:
        """The folder with a file for each run that the controller supervises.

        Each file contains the PID and start time of the run's coordinator.
        """
        return self.root / "controller" / "runs"

    @property
    def ended_runs(self) -> Path:
        """The folder with the records of runs that are over."""
        return self.root / "controller" / "ended"

    @property
    def journal(self) -> Path:
        """The controller's journal."""
        return self.root / "controller" / "recovery.sqlite"

    @property
    def evidence(self) -> Path:
        """The folder with evidence of nodes that were repaired."""
        return self.root / "controller" / "evidence"

    @property
    def drills(self) -> Path:
        """The folder with the reports of drills."""
        return self.root / "drills"

    @property
    def uids(self) -> Path:
        """The file with the uid of each user, including removed users. Only clusters on ParallelCluster and HyperPod
        have it."""
        return self.root / "uids.json"

    @property
    def monitor_switch(self) -> Path:
        """The file that remembers the last `dalsegno monitor up` or `down`."""
        return self.root / "monitor.json"

    @property
    def lock(self) -> Path:
        """The lock that `up` and `down` hold. It is outside the folder, because it outlives the cluster."""
        return self.root.parents[1] / "locks" / f"{self.name}.lock"

    @property
    def node_lock(self) -> Path:
        """The lock that a daemon of the target holds while it works on a node."""
        return self.lock.with_suffix(".room")


def read_applied(folder: ClusterFolder) -> Cluster | None:
    return read_facts(Cluster, folder.applied)


def write_applied(folder: ClusterFolder, cluster: Cluster) -> None:
    write_atomic(folder.applied, json.dumps(facts_to_json(cluster), indent=1))


def read_facts(kind: type[T], path: Path) -> T | None:
    """Read a value of type `kind` from a JSON file; return None if the file does not exist.

    Raise an error if the file is damaged. Otherwise a damaged cluster would be treated as a missing one.
    """
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object")
    try:
        return facts_from_json(kind, value)
    except (DalsegnoError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise damaged(path, str(error)) from error


def read_target(folder: ClusterFolder) -> str:
    """Return the name of the target that created the cluster, even if the cluster is incomplete or damaged."""
    return read_recorded_target(folder) or OLDEST_TARGET


def read_recorded_target(folder: ClusterFolder) -> str | None:
    """Return the target that the state folder names; None if it names none or cannot be read."""
    for path in (folder.state, folder.applied):
        try:
            value = read_json(path)
        except (DalsegnoError, OSError, ValueError):
            continue
        if isinstance(value, dict) and isinstance(value.get("target"), str):
            return str(value["target"])
    return None


def read_role(folder: ClusterFolder) -> ClusterRole | None:
    """Return the role in the state file; None if the file names none or cannot be read."""
    try:
        value = read_json(folder.state)
    except (DalsegnoError, OSError, ValueError):
        return None
    found = value.get("role") if isinstance(value, dict) else None
    return next((role for role in ClusterRole if role.value == found), None)


def read_identity(slurm_conf: Path) -> str:
    """Return the id of the cluster that this slurm.conf belongs to; "" if Dal Segno did not create the cluster."""
    return (read_text(slurm_conf.with_name(IDENTITY)) or "").strip()


def with_uids(cluster: Cluster, folder: ClusterFolder) -> Cluster:
    """Return the cluster with a uid for each user. Users keep their uid. Nobody gets the uid of a removed user, because
    files of that user may still exist."""
    before = _read_uids(folder)
    check_people(cluster.users, People("", ""), before, cluster.groups)
    taken = {*before.values(), *(user.uid for user in cluster.users if user.uid is not None)}
    free = (number for number in range(FIRST_UID, 60000) if number not in taken)
    users = []
    for user in cluster.users:
        uid = user.uid if user.uid is not None else before.get(user.name)
        users.append(replace(user, uid=next(free) if uid is None else uid))
    return replace(cluster, users=tuple(users))


def write_uids(folder: ClusterFolder, cluster: Cluster) -> None:
    """Record the uids of all users. The uids of removed users stay recorded."""
    own = {user.name: user.uid for user in cluster.users}
    make_folder(folder.root)
    write_atomic(folder.uids, json.dumps({**_read_uids(folder), **own}, indent=1))


def _read_uids(folder: ClusterFolder) -> dict[str, int]:
    value = read_json(folder.uids)
    if value is None:
        return {}
    found = {name: uid for name, uid in value.items() if isinstance(uid, int)} if isinstance(value, dict) else None
    if found != value:
        raise damaged(folder.uids, "not a JSON object of numbers")
    return found or {}


def has_prometheus(cluster: Cluster, folder: ClusterFolder) -> bool:
    """Return whether Prometheus should run.

    The last `dalsegno monitor up` or `down` decides. If `prometheus` in the cluster file has changed since, the file
    decides.
    """
    wanted = cluster.monitoring.prometheus
    found = read_json(folder.monitor_switch)
    if not isinstance(found, dict) or found.get("file") is not wanted:
        return wanted
    return found.get("prometheus") is True


def write_monitor_switch(cluster: Cluster, folder: ClusterFolder, on: bool) -> None:
    """Record that Prometheus is switched on or off, which overrides the present setting in the cluster file."""
    value = {"prometheus": on, "file": cluster.monitoring.prometheus}
    write_atomic(folder.monitor_switch, json.dumps(value))
