"""Find a cluster, or the Slurm that commands use, by name, environment or folder, and open it."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.system.files import locked, owner_name, read_text, user_of
from dalsegno.targets import registry
from dalsegno.targets.folder import ClusterFolder, read_applied, read_identity, read_recorded_target

if TYPE_CHECKING:
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.spec.facts import Cluster
    from dalsegno.targets.base import Target

ROOT_HOME = Path("/var/lib/dalsegno")
ANSWER_S = 30.0  # how long to wait for an answer from Slurm
NODE_LOCK_S = 30.0  # how long to wait for the node lock, which a target's daemon holds for a shorter time


def home(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for new clusters: $DALSEGNO_HOME, or the default for root or for a user."""
    if env.get("DALSEGNO_HOME"):
        return Path(env["DALSEGNO_HOME"]).resolve()  # resolved, because processes are found by this path
    if getattr(os, "geteuid", lambda: 1)() == 0:  # Windows has no geteuid
        return ROOT_HOME
    state = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "dalsegno"


def homes(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders that are searched for clusters. Every user also finds the clusters that root created."""
    return list(dict.fromkeys([home(env)] if env.get("DALSEGNO_HOME") else [home(env), ROOT_HOME]))


@dataclass(frozen=True)
class ClusterPlace:
    """A cluster's name and the home that holds its folder."""

    name: str
    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "clusters" / self.name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold two locks: one keeps other commands from changing the cluster, the other keeps the target's daemons from
        working on its nodes. A daemon that works on a node finishes that work first."""
        folder = ClusterFolder(self.folder)
        with (
            locked(folder.lock, f"cluster {self.name}"),
            locked(folder.node_lock, f"a node of {self.name}", wait_s=NODE_LOCK_S),
        ):
            yield


def places(env: Mapping[str, str] = os.environ) -> list[ClusterPlace]:
    """Return every cluster, complete or not. If two have the same name, omit the one that is not in `home`."""
    found: dict[str, ClusterPlace] = {}
    for base in homes(env):
        for folder in sorted((base / "clusters").glob("*/state.json")):
            found.setdefault(folder.parent.name, ClusterPlace(folder.parent.name, base))
    return list(found.values())


def find_place(name: str | None = None, env: Mapping[str, str] = os.environ) -> ClusterPlace:
    """Return the cluster with this name. Without a name, return the one that $DALSEGNO_CLUSTER names, or the only
    one."""
    wanted = name or env.get("DALSEGNO_CLUSTER") or ""
    known = {place.name: place for place in places(env)}
    if wanted in known:
        return known[wanted]
    if wanted:
        close = get_close_matches(wanted, known, 1)
        raise NotThere(
            f"there is no cluster `{wanted}`", hint=f"did you mean `{close[0]}`?" if close else _ls_hint(known)
        )
    if not known:
        raise NotThere(
            "there is no cluster yet", hint="`dalsegno init` writes a cluster file, `dalsegno up` creates the cluster"
        )
    if len(known) > 1:
        raise UsageError(f"there are {len(known)} clusters: {', '.join(known)}", hint="name one with --cluster NAME")
    return next(iter(known.values()))


def place_named(name: str, env: Mapping[str, str] = os.environ) -> ClusterPlace:
    """Return the place of the cluster with this name, or where it would be created."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UsageError(f"invalid cluster name `{name}`", hint="`dalsegno ls` shows their names")
    return {place.name: place for place in places(env)}.get(name) or ClusterPlace(name, home(env))


def _ls_hint(known: Mapping[str, ClusterPlace]) -> str:
    return f"`dalsegno ls` shows: {', '.join(known)}" if known else "there are none yet; `dalsegno up` creates one"


def open_cluster(place: ClusterPlace) -> Target:
    """Open an existing cluster, complete or not."""
    _refuse_inside_a_host()
    return registry.open_existing(place.folder)


def open_target(target: str, place: ClusterPlace) -> Target:
    """Open the target that creates a cluster of this kind. Refuse it if the cluster exists on another target."""
    _refuse_inside_a_host()
    opened = registry.open_target(target, place.folder)
    folder = ClusterFolder(place.folder)
    existing = read_recorded_target(folder) if os.path.exists(folder.state) else None
    if existing not in (None, target):
        raise UsageError(
            f"cluster {place.name} is on target {existing}, and the file says {target}",
            hint=f"choose another `name` in the file, or remove the cluster with `dalsegno down {place.name}`, "
            "which ends its jobs",
        )
    return opened


def _refuse_inside_a_host() -> None:
    if inside_a_host():
        raise UsageError(
            "this shell runs inside a host of a cluster, where `dalsegno` cannot see the cluster",
            hint="Slurm's own commands work here; for `dalsegno`, leave with `exit`",
        )


def inside_a_host() -> bool:
    """Return whether this process runs inside a host of a cluster, where PIDs differ from those of the machine."""
    from dalsegno.system.hosts import runs_inside_host

    return runs_inside_host()


def owner_of(place: ClusterPlace) -> int | None:
    """Return the uid of the user who created the cluster; None if it cannot be read."""
    return registry.open_existing(place.folder).owner()


def may_change(place: ClusterPlace) -> None:
    """Raise an error if this user may not change the cluster."""
    if place.folder.exists() and not os.access(place.folder, os.W_OK):
        owner = owner_of(place)
        name = user_of(owner) if owner is not None else owner_name(place.folder)
        raise DalsegnoError(f"cluster {place.name} belongs to {name}", hint="use sudo")


@dataclass(frozen=True)
class SlurmHere:
    """A Slurm cluster, created by Dal Segno or not. `env` is the environment that Slurm's commands need."""

    env: Mapping[str, str]
    controller: Path | None = None  # the socket of Dal Segno's controller, if the cluster may have one
    watcher: Path | None = None  # the socket of `dalsegno adopt watch`, which reports on nodes but starts no runs

    @property
    def client(self) -> SlurmClient:
        return self.client_within(ANSWER_S)

    def client_within(self, timeout_s: float) -> SlurmClient:
        """Return a client that waits at most `timeout_s` for each answer from Slurm."""
        from dalsegno.slurm.client import SlurmClient
        from dalsegno.system.processes import LocalRunner

        return SlurmClient(LocalRunner(), self.env, timeout_s=timeout_s)


def find_slurm(name: str | None = None, env: Mapping[str, str] = os.environ) -> SlurmHere:
    """Return the Slurm of the named cluster. Without a name, return the Slurm of this shell ($SLURM_CONF), else that of
    $DALSEGNO_CLUSTER or of the only cluster. If there is no cluster, return the machine's own Slurm."""
    if not name and env.get("SLURM_CONF"):
        return _ambient(env)
    if not (name or env.get("DALSEGNO_CLUSTER") or places(env)) and shutil.which("sinfo", path=env.get("PATH")):
        return _ambient(env)
    target = open_cluster(find_place(name, env))
    return SlurmHere({**env, **target.user_env(env)}, target.controller_socket)


def foreign_slurm(name: str | None = None, env: Mapping[str, str] = os.environ) -> SlurmHere | None:
    """Return the Slurm that commands would use; None if Dal Segno created it, or if there is none."""
    if env.get("SLURM_CONF"):
        made_here = bool(name or env.get("DALSEGNO_CONTROLLER"))
    else:
        made_here = bool(name or env.get("DALSEGNO_CLUSTER") or places(env))
    if made_here or platform.system() == "Windows":
        return None
    return _ambient(env) if shutil.which("srun", path=env.get("PATH")) else None


def _ambient(env: Mapping[str, str]) -> SlurmHere:
    socket = env.get("DALSEGNO_CONTROLLER")
    return SlurmHere(env, Path(socket)) if socket else SlurmHere(env, watcher=_find_watcher(env))


def watcher_folder(name: str, env: Mapping[str, str] = os.environ) -> Path:
    """Return the state folder of `dalsegno adopt watch` for a cluster that Dal Segno did not create."""
    return home(env) / "adopted" / name


def _find_watcher(env: Mapping[str, str]) -> Path | None:
    """Return the socket of the watcher that uses the same slurm.conf as this shell."""
    from dalsegno.recovery.client import WATCHER_CONF, WATCHER_SOCKET

    for file in (path for base in homes(env) for path in sorted(base.glob(f"adopted/*/{WATCHER_CONF}"))):
        if read_text(file) == env.get("SLURM_CONF", ""):
            return file.parent / WATCHER_SOCKET
    return None


def slurm_of(saved: Mapping[str, str], env: Mapping[str, str] = os.environ) -> SlurmHere:
    """Return the Slurm of a run, from the environment that was saved with the run. The cluster of the present shell
    does not matter."""
    kept = {key: value for key, value in env.items() if key not in _CLUSTER_VARIABLES}
    return _ambient({**kept, **{key: saved[key] for key in _CLUSTER_VARIABLES if key in saved}})


def cluster_id(env: Mapping[str, str]) -> str:
    """Return the id of the cluster that a shell with this environment uses; "" if Dal Segno did not create it."""
    conf = env.get("SLURM_CONF")
    return read_identity(Path(conf)) if conf else ""


def folder_of(env: Mapping[str, str]) -> ClusterFolder | None:
    """Return the state folder of this environment's cluster; None if Dal Segno did not create the cluster."""
    return ClusterFolder(Path(env["SLURM_CONF"]).parents[1]) if cluster_id(env) else None


def applied_cluster(slurm: SlurmHere, env: Mapping[str, str] = os.environ) -> Cluster | None:
    """Return the cluster of the last `up`; None if Dal Segno did not create it, or if it cannot be identified.

    A login node of a cloud has only the facts of the cluster file, because the state folder is on the head. The
    platform set up Slurm there, so SLURM_CONF does not identify the cluster.
    """
    folder = folder_of(slurm.env)
    if folder is not None:
        return read_applied(folder)
    if places(env) or inside_a_host():
        return None
    described = [ClusterFolder(each.parent) for base in homes(env) for each in base.glob("clusters/*/cluster.json")]
    return read_applied(described[0]) if len(described) == 1 else None


def silence(slurm: SlurmHere) -> DalsegnoError | None:
    """Return an error if SLURM_CONF names no file, or if Dal Segno created the cluster and slurmctld does not run.

    Slurm's commands are not used for this: they wait half a minute for a slurmctld that does not run.
    """
    conf = slurm.env.get("SLURM_CONF")
    if conf and not os.path.exists(conf):
        return UsageError(
            f"SLURM_CONF names {conf}, which does not exist", hint="unset it, or name Slurm's own slurm.conf"
        )
    folder = folder_of(slurm.env)
    if folder is None or inside_a_host():
        return None
    return None if registry.open_existing(folder.root).slurm_runs() else no_answer(folder.name)


def way_into(slurm: SlurmHere) -> Callable[[str, Sequence[str]], tuple[list[str], dict[str, str]]] | None:
    """Return a function that wraps a command so that it runs on a node, without using Slurm.

    Return None for a cluster that Dal Segno did not create.
    """
    target = target_of(slurm)
    if target is None:
        return None

    def enter(node: str, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        entry = target.on_node(node, argv, slurm.env, "/")
        return entry.argv, entry.env

    return enter


def target_of(slurm: SlurmHere) -> Target | None:
    """Return the target of a cluster that Dal Segno created; None for other clusters, and inside a cluster's host."""
    folder = folder_of(slurm.env)
    return None if folder is None or inside_a_host() else registry.open_existing(folder.root)


def has_virtual_nodes(slurm: SlurmHere) -> bool:
    """Return whether the nodes are virtual hosts of this machine, or this process runs inside one of them."""
    from dalsegno.targets.base import HasVirtualNodes

    return inside_a_host() or isinstance(target_of(slurm), HasVirtualNodes)


def has_fabric(slurm: SlurmHere) -> bool:
    """Return whether the nodes may have the network of their instance type. Virtual hosts do not have it."""
    return not has_virtual_nodes(slurm)


def no_answer(cluster: str = "") -> DalsegnoError:
    hint = "`dalsegno status` shows the daemons, `dalsegno up` starts what is missing"
    return DalsegnoError(f"slurmctld{f' of {cluster}' if cluster else ''} does not answer", hint=hint)


def is_gone(saved: Mapping[str, str], cluster: str) -> bool:
    """Return whether the cluster with this id was removed, even if a new cluster has its name.

    Return False for a cluster that Dal Segno did not create: its slurm.conf may only have moved.
    """
    return bool(cluster) and cluster_id(saved) != cluster


_CLUSTER_VARIABLES = ("SLURM_CONF", "PATH", "DALSEGNO_CONTROLLER")


def images_home(env: Mapping[str, str] = os.environ) -> Path:
    """Return the image folder: $DALSEGNO_IMAGES, else the folder of this shell's cluster, else `images` in the home."""
    if env.get("DALSEGNO_IMAGES"):
        return Path(env["DALSEGNO_IMAGES"]).absolute()
    return Path(_cluster_images(env) or home(env) / "images")


def unpacked_homes(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders with this user's unpacked images: those of the clusters in the home, of this shell's cluster,
    and of this host."""
    here = folder_of(env)
    clusters = [ClusterFolder(each) for each in sorted((home(env) / "clusters").glob("*/"))]
    kept = [each.unpacked for each in [*clusters, *([here] if here else [])]]
    kept.append(Path("/var/lib/dalsegno/containers/unpacked"))
    return [own for own in dict.fromkeys(path / str(os.geteuid()) for path in kept) if own.is_dir()]


def _cluster_images(env: Mapping[str, str]) -> str:
    """Return the image folder of the cluster this shell uses, else of the only cluster; "" if there is none."""
    here = folder_of(env)
    if env.get("SLURM_CONF") and here is None:
        return ""
    try:
        return registry.open_existing(here.root if here else find_place(env=env).folder).job_images()
    except (DalsegnoError, OSError):
        return ""


def runs_home(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's runs: $DALSEGNO_RUNS, else `runs` in the home if the user may write there.

    Otherwise return a folder below ~/.local/state.
    """
    if env.get("DALSEGNO_RUNS"):
        return Path(env["DALSEGNO_RUNS"]).absolute()
    beside = home(env) / "runs"
    return beside if _may_write(beside) else Path("~/.local/state/dalsegno/runs").expanduser()


def _may_write(folder: Path) -> bool:
    """Return whether the folder can be written or created, without creating it."""
    return os.access(next(each for each in (folder, *folder.parents) if each.exists()), os.W_OK)
