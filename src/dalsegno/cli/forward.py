"""Run a command on the head of a cluster that is on other machines."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dalsegno.errors import DalsegnoError

# These commands run on the cluster's head node. All others run on this machine: they create, change and show clusters,
# or need none.
FORWARDED = frozenset({
    "run", "torchrun", "submit", "runs", "logs", "cancel", "ckpt", "top", "nodes", "events", "why", "automation",
    "inject", "drill", "monitor", "web", "doctor",
})  # fmt: skip
# These commands run as root there: they read the cluster's secrets, or are meant for administrators, who may log in
# under another name.
AS_ROOT = frozenset({"monitor", "web", "automation", "inject"})
CHANGES_HOSTS = (("monitor", "up"), ("monitor", "down"))  # run on this machine, because they change hosts as `up` does
TAKES_A_COMMAND = ("run", "torchrun", "submit")


def forward(arguments: Sequence[str]) -> None:
    """Replace this process with the same command on the head node if the cluster is on other machines; else return."""
    if not arguments or arguments[0] not in FORWARDED or os.environ.get("SLURM_CONF"):
        return
    if tuple(arguments[:2]) in CHANGES_HOSTS:
        return
    if arguments[0] == "doctor" and any(os.path.isfile(word) for word in arguments[1:]):
        return  # the script or log is a file of this machine
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.targets.base import CanForward
    from dalsegno.targets.registry import is_elsewhere

    try:
        place = find_place(cluster_named(arguments))
    except DalsegnoError:
        return  # the command reports the error itself, or needs no cluster
    if not is_elsewhere(place.folder):
        return
    target = open_cluster(place)
    if isinstance(target, CanForward):
        from dalsegno.system.execute import become

        entry = target.forward(arguments, root=arguments[0] in AS_ROOT)
        if entry is not None:
            become(entry.argv, entry.env)


def cluster_named(arguments: Sequence[str]) -> str | None:
    """Return the value of --cluster. Arguments after `--`, or after the script of a run, are the script's own."""
    for at, word in enumerate(arguments[1:], start=1):
        if word == "--" or (word.endswith(".py") and arguments[0] in TAKES_A_COMMAND):
            return None
        if word in ("--cluster", "-M"):
            return arguments[at + 1] if at + 1 < len(arguments) else None
        if word.startswith("--cluster="):
            return word.partition("=")[2]
    return None
