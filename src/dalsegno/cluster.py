"""Wiring: where clusters are kept, and how one is opened."""

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

from dalsegno.errors import DalsegnoError, NotThere, TargetError, UsageError
from dalsegno.spec.unbuilt import UNBUILT_TARGETS
from dalsegno.system.files import locked, owner_name, read_text, user_of

if TYPE_CHECKING:
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.targets.local import LocalTarget

ROOT_HOME = Path("/var/lib/dalsegno")
ANSWER_S = 30.0  # of Slurm
ROOM_S = 30.0  # a node is booted in one or two


def home(env: Mapping[str, str] = os.environ) -> Path:
    """Where new clusters are kept: $DALSEGNO_HOME, or the place that fits who we are."""
    if env.get("DALSEGNO_HOME"):
        return Path(env["DALSEGNO_HOME"]).resolve()  # one folder, one name: processes are found by it
    if getattr(os, "geteuid", lambda: 1)() == 0:  # Windows has none
        return ROOT_HOME
    state = env.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "dalsegno"


def homes(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where clusters are looked for: a cluster made with sudo is found by everyone."""
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
        """For whoever changes the cluster: no one else does meanwhile, and the machine room of a local one begins
        nothing new; what it has begun is waited for."""
        locks = self.home / "locks"
        with (
            locked(locks / f"{self.name}.lock", f"cluster {self.name}"),
            locked(locks / f"{self.name}.room", f"a node of {self.name}", wait_s=ROOM_S),
        ):
            yield


def places(env: Mapping[str, str] = os.environ) -> list[ClusterPlace]:
    """Every cluster there is, whole or half-made, one of each name."""
    found: dict[str, ClusterPlace] = {}
    for base in homes(env):
        for folder in sorted((base / "clusters").glob("*/state.json")):
            found.setdefault(folder.parent.name, ClusterPlace(folder.parent.name, base))
    return list(found.values())


def find_place(name: str | None = None, env: Mapping[str, str] = os.environ) -> ClusterPlace:
    """The cluster of this name, of $DALSEGNO_CLUSTER, or the only one there is."""
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
            "there is no cluster yet", hint="`dalsegno init` writes a cluster file, `dalsegno up` makes it real"
        )
    if len(known) > 1:
        raise UsageError(f"there are {len(known)} clusters: {', '.join(known)}", hint="name one with --cluster NAME")
    return next(iter(known.values()))


def place_named(name: str, env: Mapping[str, str] = os.environ) -> ClusterPlace:
    """Where a cluster of this name is, or would be made."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UsageError(f"`{name}` is no name of a cluster", hint="`dalsegno ls` shows their names")
    return {place.name: place for place in places(env)}.get(name) or ClusterPlace(name, home(env))


def _ls_hint(known: Mapping[str, ClusterPlace]) -> str:
    return f"`dalsegno ls` shows: {', '.join(known)}" if known else "there are none yet; `dalsegno up` makes one"


def open_local(place: ClusterPlace) -> LocalTarget:
    from dalsegno.targets.local import LocalTarget

    if inside_a_host():
        raise UsageError(
            "this shell is inside a host of a cluster, from where the cluster itself cannot be seen",
            hint="Slurm's own commands work here; for `dalsegno`, leave with `exit`",
        )
    return LocalTarget(place.folder, cache=place.home / "cache")


def inside_a_host() -> bool:
    """Whether the first process here is one of ours: then PIDs have other names than on the machine."""
    try:
        return Path("/proc/1/comm").read_text(errors="replace").startswith("ds:")
    except OSError:
        return False


def open_target(target: str, place: ClusterPlace) -> LocalTarget:
    """The target that builds a cluster of this kind."""
    if target in UNBUILT_TARGETS:
        raise TargetError(
            f"target `{target}` is not built yet: {UNBUILT_TARGETS[target]}",
            hint="use `target: local` for now; `dalsegno validate` checks files for other targets",
        )
    if platform.system() != "Linux":
        raise TargetError(
            f"`target: local` needs Linux, and this is {platform.system()}", hint="use a remote target from here"
        )
    return open_local(place)


def owner_of(place: ClusterPlace) -> int | None:
    """Return the uid of the person whose cluster it is; None where that cannot be read."""
    from dalsegno.targets.local.folder import Folder, read_state_leniently

    state = read_state_leniently(Folder(place.folder))
    try:
        return place.folder.stat().st_uid or (state.owner if state else 0)
    except OSError:
        return None


def may_change(place: ClusterPlace) -> None:
    """Refuse early what only the owner can do."""
    if place.folder.exists() and not os.access(place.folder, os.W_OK):
        owner = owner_of(place)
        name = user_of(owner) if owner is not None else owner_name(place.folder)
        raise DalsegnoError(f"cluster {place.name} belongs to {name}", hint="use sudo")


@dataclass(frozen=True)
class SlurmHere:
    """A Slurm that runs can be handed to, ours or somebody's: what its commands need in their environment."""

    env: Mapping[str, str]
    controller: Path | None = None  # the socket of our own controller, where there may be one

    @property
    def client(self) -> SlurmClient:
        return self.client_within(ANSWER_S)

    def client_within(self, timeout_s: float) -> SlurmClient:
        """One that waits no longer for an answer."""
        from dalsegno.slurm.client import SlurmClient
        from dalsegno.system.processes import LocalRunner

        return SlurmClient(LocalRunner(), self.env, timeout_s=timeout_s)


def find_slurm(name: str | None = None, env: Mapping[str, str] = os.environ) -> SlurmHere:
    """The cluster of this name, else the one this shell is on already, else our only one, else the machine's own."""
    if not name and env.get("SLURM_CONF"):
        return _ambient(env)
    if not (name or env.get("DALSEGNO_CLUSTER") or places(env)) and shutil.which("sinfo", path=env.get("PATH")):
        return _ambient(env)
    target = open_local(find_place(name, env))
    return SlurmHere({**env, **target.user_env(env)}, target.controller_socket)


def foreign_slurm(name: str | None = None, env: Mapping[str, str] = os.environ) -> SlurmHere | None:
    """The Slurm that commands would go to, where it is somebody's; None where it is a cluster of ours."""
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
    """The Slurm of a run, from the environment that was saved with it; whatever shell we are in now."""
    kept = {key: value for key, value in env.items() if key not in _SAYS_WHICH}
    return _ambient({**kept, **{key: saved[key] for key in _SAYS_WHICH if key in saved}})


def cluster_id(env: Mapping[str, str]) -> str:
    """What was drawn when the cluster of this environment was made; "" for one that is not ours."""
    from dalsegno.targets.local.folder import IDENTITY

    conf = env.get("SLURM_CONF")
    return (read_text(Path(conf).with_name(IDENTITY)) or "").strip() if conf else ""


def silence(slurm: SlurmHere) -> DalsegnoError | None:
    """That nobody answers for a cluster of ours, where that can be seen without asking: Slurm's own commands wait half
    a minute for a slurmctld that is not there."""
    from dalsegno.targets.local.folder import Folder
    from dalsegno.targets.local.observe import controller_runs

    conf = slurm.env.get("SLURM_CONF")
    if conf and not os.path.exists(conf):
        return UsageError(
            f"SLURM_CONF names {conf}, which is not there", hint="unset it, or name Slurm's own slurm.conf"
        )
    if not cluster_id(slurm.env) or inside_a_host():
        return None
    folder = Folder(Path(slurm.env["SLURM_CONF"]).parents[1])
    return None if controller_runs(folder) else no_answer(f" of {folder.name}")


def way_into(slurm: SlurmHere) -> Callable[[str, Sequence[str]], tuple[list[str], dict[str, str]]] | None:
    """How a command gets into a node of a cluster of ours on this machine, without Slurm; None for any other."""
    target = target_of(slurm)
    return (lambda node, words: target.on_node(node, words, slurm.env, "/")) if target else None


def target_of(slurm: SlurmHere) -> LocalTarget | None:
    """The cluster on this machine whose Slurm it is; None for any other, and from inside one of its hosts."""
    if not cluster_id(slurm.env) or inside_a_host():
        return None
    folder = Path(slurm.env["SLURM_CONF"]).parents[1]
    return open_local(ClusterPlace(folder.name, folder.parents[1]))


def no_answer(of: str = "") -> DalsegnoError:
    hint = "`dalsegno status` shows the daemons, `dalsegno up` starts what is missing"
    return DalsegnoError(f"slurmctld{of} does not answer", hint=hint)


def is_gone(saved: Mapping[str, str], cluster: str) -> bool:
    """Whether the cluster of a run, of this id, has been taken down, though there may be another of its name.

    Of one that is not ours, whose settings may be kept elsewhere by now, nobody can say.
    """
    return bool(cluster) and cluster_id(saved) != cluster


_SAYS_WHICH = ("SLURM_CONF", "PATH", "DALSEGNO_CONTROLLER")


def images_home(env: Mapping[str, str] = os.environ) -> Path:
    """Where images are kept: $DALSEGNO_IMAGES, else where jobs of the cluster at hand have theirs, else in our home."""
    if env.get("DALSEGNO_IMAGES"):
        return Path(env["DALSEGNO_IMAGES"]).absolute()
    return Path(_images_at_hand(env) or home(env) / "images")


def unpacked_homes(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where jobs of this user may have had to unpack images: on clusters of ours, and on this host of another."""
    from dalsegno.targets.local.folder import Folder

    clusters = sorted((home(env) / "clusters").glob("*/"))
    here = Folder(Path(env["SLURM_CONF"]).parents[1]) if env.get("SLURM_CONF") and cluster_id(env) else None
    folders = [*(Folder(each) for each in clusters), *([here] if here else [])]
    kept = [*(each.unpacked for each in folders), Path("/var/lib/dalsegno/containers/unpacked")]
    return [own for own in dict.fromkeys(path / str(os.geteuid()) for path in kept) if own.is_dir()]


def _images_at_hand(env: Mapping[str, str]) -> str:
    """Of the cluster this shell is on, else of the only one; "" if its file names none, or none of ours is at hand."""
    from dalsegno.targets.local.desired import jobs_images
    from dalsegno.targets.local.folder import Folder, read_applied

    if env.get("SLURM_CONF") and not cluster_id(env):
        return ""
    try:
        folder = Folder(Path(env["SLURM_CONF"]).parents[1] if env.get("SLURM_CONF") else find_place(env=env).folder)
        applied = read_applied(folder)
    except (DalsegnoError, OSError):
        return ""
    return jobs_images(applied, folder) if applied else ""


def runs_home(env: Mapping[str, str] = os.environ) -> Path:
    """Where this user's runs are: $DALSEGNO_RUNS, or beside the clusters, or in the user's own folder."""
    if env.get("DALSEGNO_RUNS"):
        return Path(env["DALSEGNO_RUNS"]).absolute()
    beside = home(env) / "runs"
    return beside if _may_write(beside) else Path("~/.local/state/dalsegno/runs").expanduser()


def _may_write(folder: Path) -> bool:
    """Also where it is not there yet: nothing is made by asking."""
    return os.access(next(each for each in (folder, *folder.parents) if each.exists()), os.W_OK)
