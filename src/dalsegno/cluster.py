"""Wiring: find a cluster or a Slurm by name, environment or folder, and open it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.system.files import locked, owner_name, user_of
from dalsegno.targets import registry
from dalsegno.targets.folder import ClusterFolder, read_identity

if TYPE_CHECKING:
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.targets.base import Target

ROOT_HOME = Path("/var/lib/dalsegno")
ANSWER_S = 30.0  # of Slurm
NODE_S = 30.0  # longer than a daemon of the target works on one node


def home(env: Mapping[str, str] = os.environ) -> Path:
    """Return where new clusters are kept: $DALSEGNO_HOME, or the default for root or for a user."""
    if env.get("DALSEGNO_HOME"):
        return Path(env["DALSEGNO_HOME"]).resolve()  # one folder, one name: processes are found by it
    if getattr(os, "geteuid", lambda: 1)() == 0:  # Windows has none
        return ROOT_HOME
    state = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "dalsegno"


def homes(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where clusters are looked for: everyone also finds those that were made with sudo."""
    return list(dict.fromkeys([home(env)] if env.get("DALSEGNO_HOME") else [home(env), ROOT_HOME]))


@dataclass(frozen=True)
class ClusterPlace:
    """A cluster's name and the home it is kept in."""

    name: str
    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "clusters" / self.name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep others from changing the cluster. Daemons of its target start nothing on nodes, and are waited for."""
        folder = ClusterFolder(self.folder)
        with (
            locked(folder.lock, f"cluster {self.name}"),
            locked(folder.node_lock, f"a node of {self.name}", wait_s=NODE_S),
        ):
            yield


def places(env: Mapping[str, str] = os.environ) -> list[ClusterPlace]:
    """Return every cluster, whole or half-made, one of each name."""
    found: dict[str, ClusterPlace] = {}
    for base in homes(env):
        for folder in sorted((base / "clusters").glob("*/state.json")):
            found.setdefault(folder.parent.name, ClusterPlace(folder.parent.name, base))
    return list(found.values())


def find_place(name: str | None = None, env: Mapping[str, str] = os.environ) -> ClusterPlace:
    """Return the cluster of this name, of $DALSEGNO_CLUSTER, or the only one."""
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
    """Return where a cluster of this name is, or would be made."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UsageError(f"invalid cluster name `{name}`", hint="`dalsegno ls` shows their names")
    return {place.name: place for place in places(env)}.get(name) or ClusterPlace(name, home(env))


def _ls_hint(known: Mapping[str, ClusterPlace]) -> str:
    return f"`dalsegno ls` shows: {', '.join(known)}" if known else "there are none yet; `dalsegno up` makes one"


def open_cluster(place: ClusterPlace) -> Target:
    """Open a cluster that is there, whole or half-made."""
    _refuse_inside_a_host()
    return registry.open_existing(place.folder)


def open_target(target: str, place: ClusterPlace) -> Target:
    """Open the target that makes a cluster of this kind."""
    _refuse_inside_a_host()
    return registry.open_target(target, place.folder)


def _refuse_inside_a_host() -> None:
    if inside_a_host():
        raise UsageError(
            "this shell runs inside a host of a cluster, where `dalsegno` cannot see the cluster",
            hint="Slurm's own commands work here; for `dalsegno`, leave with `exit`",
        )


def inside_a_host() -> bool:
    """Return whether we run inside a host of a cluster, where PIDs differ from those of the machine."""
    try:
        return Path("/proc/1/comm").read_text(errors="replace").startswith("ds:")
    except OSError:
        return False


def owner_of(place: ClusterPlace) -> int | None:
    """Return the uid of the person who made the cluster; None if that cannot be read."""
    return registry.open_existing(place.folder).owner()


def may_change(place: ClusterPlace) -> None:
    """Refuse early what only the owner may do."""
    if place.folder.exists() and not os.access(place.folder, os.W_OK):
        owner = owner_of(place)
        name = user_of(owner) if owner is not None else owner_name(place.folder)
        raise DalsegnoError(f"cluster {place.name} belongs to {name}", hint="use sudo")


@dataclass(frozen=True)
class SlurmHere:
    """A Slurm cluster, ours or not: the environment that its commands need."""

    env: Mapping[str, str]
    controller: Path | None = None  # the socket of our own controller, where there may be one

    @property
    def client(self) -> SlurmClient:
        return self.client_within(ANSWER_S)

    def client_within(self, timeout_s: float) -> SlurmClient:
        """Return a client that waits at most `timeout_s` for each answer of Slurm."""
        from dalsegno.slurm.client import SlurmClient
        from dalsegno.system.processes import LocalRunner

        return SlurmClient(LocalRunner(), self.env, timeout_s=timeout_s)


def find_slurm(name: str | None = None, env: Mapping[str, str] = os.environ) -> SlurmHere:
    """Return the cluster of this name, else the one this shell uses, else our only one, else the machine's own."""
    if not name and env.get("SLURM_CONF"):
        return _ambient(env)
    if not (name or env.get("DALSEGNO_CLUSTER") or places(env)) and shutil.which("sinfo", path=env.get("PATH")):
        return _ambient(env)
    target = open_cluster(find_place(name, env))
    return SlurmHere({**env, **target.user_env(env)}, target.controller_socket)


def foreign_slurm(name: str | None = None, env: Mapping[str, str] = os.environ) -> SlurmHere | None:
    """Return the Slurm that commands would use, if it is not ours; None if it is."""
    if env.get("SLURM_CONF"):
        ours = bool(name or env.get("DALSEGNO_CONTROLLER"))
    else:
        ours = bool(name or env.get("DALSEGNO_CLUSTER") or places(env))
    if ours:
        return None
    return _ambient(env) if shutil.which("srun", path=env.get("PATH")) else None


def _ambient(env: Mapping[str, str]) -> SlurmHere:
    socket = env.get("DALSEGNO_CONTROLLER")
    return SlurmHere(env, Path(socket) if socket else None)


def slurm_of(saved: Mapping[str, str], env: Mapping[str, str] = os.environ) -> SlurmHere:
    """Return the Slurm of a run, from the environment that was saved with it, whatever this shell uses."""
    kept = {key: value for key, value in env.items() if key not in _SAYS_WHICH}
    return _ambient({**kept, **{key: saved[key] for key in _SAYS_WHICH if key in saved}})


def cluster_id(env: Mapping[str, str]) -> str:
    """Return the identity of the cluster that a shell with this environment uses; "" if Dal Segno did not make it."""
    conf = env.get("SLURM_CONF")
    return read_identity(Path(conf)) if conf else ""


def folder_of(env: Mapping[str, str]) -> ClusterFolder | None:
    """Return the state folder of the cluster that a shell with this environment uses; None if it is not one of ours."""
    return ClusterFolder(Path(env["SLURM_CONF"]).parents[1]) if cluster_id(env) else None


def silence(slurm: SlurmHere) -> DalsegnoError | None:
    """Return an error if our cluster's slurmctld does not run.

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
    return None if registry.open_existing(folder.root).slurm_runs() else no_answer(f" of {folder.name}")


def way_into(slurm: SlurmHere) -> Callable[[str, Sequence[str]], tuple[list[str], dict[str, str]]] | None:
    """Return a function that makes a command run on a node of our cluster, without Slurm; None for other clusters."""
    target = target_of(slurm)
    if target is None:
        return None

    def enter(node: str, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        entry = target.on_node(node, words, slurm.env, "/")
        return entry.argv, entry.env

    return enter


def target_of(slurm: SlurmHere) -> Target | None:
    """Return the target of this cluster; None if it is not ours, or if this process is inside one of its hosts."""
    folder = folder_of(slurm.env)
    return None if folder is None or inside_a_host() else registry.open_existing(folder.root)


def no_answer(of: str = "") -> DalsegnoError:
    hint = "`dalsegno status` shows the daemons, `dalsegno up` starts what is missing"
    return DalsegnoError(f"slurmctld{of} does not answer", hint=hint)


def is_gone(saved: Mapping[str, str], cluster: str) -> bool:
    """Return whether the cluster with this id was removed, even if a new cluster has its name.

    False for a cluster that is not ours: its slurm.conf may only have moved.
    """
    return bool(cluster) and cluster_id(saved) != cluster


_SAYS_WHICH = ("SLURM_CONF", "PATH", "DALSEGNO_CONTROLLER")


def images_home(env: Mapping[str, str] = os.environ) -> Path:
    """Return where images are kept: $DALSEGNO_IMAGES, else where jobs of this shell's cluster look, else our home."""
    if env.get("DALSEGNO_IMAGES"):
        return Path(env["DALSEGNO_IMAGES"]).absolute()
    return Path(_images_at_hand(env) or home(env) / "images")


def unpacked_homes(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where jobs of this user may have unpacked images: on clusters of ours, and on this host of another."""
    here = folder_of(env)
    clusters = [ClusterFolder(each) for each in sorted((home(env) / "clusters").glob("*/"))]
    kept = [each.unpacked for each in [*clusters, *([here] if here else [])]]
    kept.append(Path("/var/lib/dalsegno/containers/unpacked"))
    return [own for own in dict.fromkeys(path / str(os.geteuid()) for path in kept) if own.is_dir()]


def _images_at_hand(env: Mapping[str, str]) -> str:
    """Return the image folder of the cluster this shell uses, else of the only one; "" if its file names none, or there
    is no such cluster."""
    here = folder_of(env)
    if env.get("SLURM_CONF") and here is None:
        return ""
    try:
        return registry.open_existing(here.root if here else find_place(env=env).folder).job_images()
    except (DalsegnoError, OSError):
        return ""


def runs_home(env: Mapping[str, str] = os.environ) -> Path:
    """Return where this user's runs are: $DALSEGNO_RUNS, or beside the clusters, or in the user's own folder."""
    if env.get("DALSEGNO_RUNS"):
        return Path(env["DALSEGNO_RUNS"]).absolute()
    beside = home(env) / "runs"
    return beside if _may_write(beside) else Path("~/.local/state/dalsegno/runs").expanduser()


def _may_write(folder: Path) -> bool:
    """Return whether the folder can be written or made; asking makes nothing."""
    return os.access(next(each for each in (folder, *folder.parents) if each.exists()), os.W_OK)
