"""Forward commands to the head node of a remote cluster, and decide which run here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from dalsegno.cli import out
from dalsegno.errors import DalsegnoError, UsageError

# These commands run on the head node of a cluster on other machines; `runs_here` names the exceptions. All other
# commands run on this machine: they create, change and show clusters, or need no cluster.
FORWARDED = frozenset({
    "run", "torchrun", "submit", "runs", "logs", "cancel", "ckpt", "top", "nodes", "events", "why", "automation",
    "inject", "drill", "monitor", "web", "doctor", "bench", "certify", "image", "containers",
})  # fmt: skip
# These commands run as root on the head node: they read the cluster's secrets, or are meant for administrators. An
# administrator may have another user name there.
AS_ROOT = frozenset({"monitor", "web", "automation"})
# These commands change hosts, as `up` does, so they run on this machine.
CHANGES_HOSTS = (("monitor", "up"), ("monitor", "down"))
# Options of forwarded commands that write files
FILE_OPTIONS = ("--output", "--svg", "--png", "--report", "--timeline")
LOCAL_SOURCES = ("docker-archive:", "oci:", "oci-archive:", "dockerd://", "podman://")
Exists = Callable[[str], bool]
Options = Mapping[str, Any]


def forward(arguments: Sequence[str], group: click.Group) -> None:
    """Replace this process with the same command on the head node if the cluster is on other machines. Return if the
    command runs on this machine. `group` has all commands."""
    if not arguments or arguments[0] not in FORWARDED or os.environ.get("SLURM_CONF"):
        return
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.targets.base import CanForward
    from dalsegno.targets.registry import is_elsewhere

    try:
        place = find_place(cluster_named(arguments, group))
    except DalsegnoError:
        return  # the command itself reports the error, or needs no cluster
    if not is_elsewhere(place.folder) or runs_here(arguments, group, os.environ):
        return
    target = open_cluster(place)
    if isinstance(target, CanForward):
        from dalsegno.system.execute import become
        from dalsegno.targets.folder import ClusterFolder, read_applied

        applied = read_applied(ClusterFolder(place.folder))
        # A folder of images for the whole cluster belongs to root. Without one, images are in the user's own home.
        shared_images = arguments[0] == "image" and bool(applied and applied.containers.folder)
        entry = target.forward(arguments, root=arguments[0] in AS_ROOT or shared_images)
        if entry is not None:
            if arguments[0] == "certify" or any(word.startswith(FILE_OPTIONS) for word in arguments):
                out.talk(f"running on the head node of {place.name}, where the files that it writes stay")
            become(entry.argv, entry.env)


def runs_here(
    arguments: Sequence[str], group: click.Group, env: Mapping[str, str], exists: Exists = os.path.exists
) -> bool:
    """Return whether a forwarded command runs on this machine, because it uses files or processes here.

    Raise UsageError if a file of this machine would be needed on the head node.
    """
    name = arguments[0]
    if tuple(arguments[:2]) in CHANGES_HOSTS:
        return True
    if name == "doctor":  # the script or log may be a file of this machine
        return any(os.path.isfile(word) for word in arguments[1:])
    decide = {"bench": _bench_here, "certify": _certify_here, "image": _image_here, "containers": _containers_here}
    if name not in decide:
        return False
    options = read_options(group, arguments)
    if options is None:
        return True  # click prints the help, or what is wrong
    if name == "image" and env.get("DALSEGNO_IMAGES"):
        return True  # DALSEGNO_IMAGES names an image store on this machine
    return decide[name](arguments[1] if len(arguments) > 1 else "", options, exists)


def _bench_here(benchmark: str, options: Options, exists: Exists) -> bool:
    if benchmark == "read":
        files = options.get("files") or ()
        return not files or any(each == "-" or exists(each) for each in files)
    if not options.get("nodes") and not options.get("cluster"):
        return True  # without `--nodes`, a benchmark measures this machine
    source = options.get("source")
    if benchmark == "build" and source and exists(source):
        raise UsageError(
            f"{source} is on this machine, but `--nodes` compiles it on the cluster",
            hint="copy it to storage that all nodes mount, and name it there; `dalsegno shell` opens a shell there",
        )
    return False


def _certify_here(_: str, options: Options, exists: Exists) -> bool:
    against = options.get("against")
    if against and exists(against):
        raise UsageError(
            f"{against} is on this machine, but the cluster is measured from its head node",
            hint="copy it to the head node, and name it there; earlier certificates are there, too",
        )
    return False


def _image_here(action: str, options: Options, exists: Exists) -> bool:
    if options.get("output"):
        return True  # the command writes the image to a file on this machine
    if action in ("show", "verify"):
        named = options.get("images") or options.get("image") or ()
        return any(exists(each) for each in ([named] if isinstance(named, str) else named))
    source = str(options.get("source") or "")
    local = source.startswith(LOCAL_SOURCES) or (bool(source) and exists(source))
    if action in ("build", "from-venv") or local:
        raise UsageError(
            f"`image {action}` reads files of this machine, but the image store is on the cluster",
            hint="add `-o FILE.sqsh` and copy the file to storage of the cluster; "
            "with DALSEGNO_IMAGES=FOLDER, the store is here",
        )
    return False


def _containers_here(action: str, options: Options, exists: Exists) -> bool:
    return bool(options.get("file"))  # a cluster file, whose hosts are checked from here


def read_options(group: click.Group, arguments: Sequence[str]) -> Options | None:
    """Return the options and arguments of a command by their names. Return None if they are invalid, or ask for
    help."""
    command: click.Command | None = group
    rest = list(arguments)
    try:
        while isinstance(command, click.Group):
            if not rest or rest[0].startswith("-"):
                return None
            command = command.get_command(click.Context(command), rest.pop(0))
        if command is None:
            return None
        settings = {**command.context_settings, "ignore_unknown_options": False}  # a misspelled option is invalid
        found, _, _ = command.make_parser(click.Context(command, **settings)).parse_args(rest)
    except click.UsageError:
        return None
    # for an option that is not given, some versions of click return a placeholder object
    given = {name: value for name, value in found.items() if isinstance(value, (str, bool, int, float, list, tuple))}
    return None if given.get("help") else given


def cluster_named(arguments: Sequence[str], group: click.Group) -> str | None:
    """Return the value of --cluster; None if it is not given.

    Arguments that follow `--` or the script of a run belong to the script, and are not searched.
    """
    name = arguments[0]
    if name == "torchrun":
        return None  # torchrun's command line has no such option
    if name in ("run", "submit"):
        # only the command's own parser knows which word is the script, and which is the value of an option
        named = (read_options(group, arguments) or {}).get("cluster")
        return str(named) if named is not None else None
    for at, word in enumerate(arguments[1:], start=1):
        if word == "--":
            return None
        if word in ("--cluster", "-M"):
            return arguments[at + 1] if at + 1 < len(arguments) else None
        if word.startswith("--cluster="):
            return word.partition("=")[2]
        if word.startswith("-M"):
            return word[2:]
    return None
