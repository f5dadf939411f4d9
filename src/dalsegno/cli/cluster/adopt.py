"""`dalsegno adopt`: describe a Slurm cluster that Dal Segno did not create, and watch it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import file_argument, json_option
from dalsegno.errors import CommandFailed, DalsegnoError, NotThere

if TYPE_CHECKING:
    from dalsegno.adopt.abilities import Ability
    from dalsegno.adopt.found import FoundCluster

STDOUT = "-"
TURN_S = 0.5


@click.group(invoke_without_command=True)
@click.option("--output", "-o", "file", default="cluster.yaml", show_default=True, help="File to write; - for stdout.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@json_option
@click.pass_context
def command(context: click.Context, file: str, force: bool, json_: bool) -> None:
    """Write a cluster file that describes the Slurm cluster of this machine, and show what works on it.

    It runs `scontrol show`, `sinfo` and `sacctmgr show` and reads files. It installs nothing and changes nothing but
    the output file.

    \b
    dalsegno adopt
    dalsegno adopt -o - --json
    """
    from dalsegno.adopt.abilities import find_abilities

    if context.invoked_subcommand:
        return
    _check_file(file, force)
    found = find_cluster()
    text = cluster_file_text(found, file)
    if file != STDOUT:
        from dalsegno.system.files import write_atomic

        write_atomic(Path(file), text)
    abilities = find_abilities(found)
    if json_:
        out.as_json(_as_json(found, abilities, file, text))
        return
    if file == STDOUT:
        click.echo(text, nl=False)
    _report(found, abilities, file)


def _check_file(file: str, force: bool) -> None:
    if file == STDOUT:
        return
    if Path(file).is_dir():
        raise DalsegnoError("this is a folder", where=file, hint=f"name a file in it: `{Path(file) / 'cluster.yaml'}`")
    if Path(file).exists() and not force:
        raise DalsegnoError(
            "the file already exists", where=file, hint="use `--force` to overwrite it, or `-o` to name another file"
        )


def find_cluster() -> FoundCluster:
    """Return the cluster that Slurm's commands on this machine use. Raise an error if Dal Segno created it."""
    from dalsegno.adopt.found import look
    from dalsegno.cli.controller_requests import is_silence, meaning_of
    from dalsegno.cluster import cluster_id, find_slurm, no_answer, silence
    from dalsegno.system.files import read_text
    from dalsegno.system.machine import user_name

    slurm = find_slurm()
    if shutil.which("scontrol", path=slurm.env.get("PATH")) is None:
        raise NotThere("there is no `scontrol` on the PATH", hint="run this on a login or head node of the cluster")
    if cluster_id(slurm.env):
        raise DalsegnoError(
            "Dal Segno created this cluster, and has its cluster file",
            hint="`dalsegno status` shows it; to adopt another, set SLURM_CONF to its slurm.conf",
        )
    if (silent := silence(slurm)) is not None:
        raise silent

    def read(path: str) -> str:
        try:
            return read_text(Path(path)) or ""
        except (DalsegnoError, OSError):
            return ""

    try:
        return look(slurm.client, os.path.exists, read, user_name(), os.geteuid() == 0)
    except CommandFailed as fault:
        meaning = meaning_of(fault)
        raise no_answer() if meaning is fault and is_silence(fault) else meaning from None


def cluster_file_text(found: FoundCluster, file: str) -> str:
    from dalsegno.adopt.describe import describe
    from dalsegno.adopt.render import render_valid

    name = found.setting("ClusterName")
    header = (
        f"Written by `dalsegno adopt` from cluster {name}, Slurm {found.version}, {found.platform.kind.title}.\n"
        "It describes what was found. Dal Segno changes nothing on this cluster unless a partition is armed."
    )
    return render_valid(describe(found), header, "cluster.yaml" if file == STDOUT else file)


def _as_json(found: FoundCluster, abilities: list[Ability], file: str, text: str) -> dict[str, object]:
    return {
        "cluster": found.setting("ClusterName"),
        "slurm": found.version,
        "platform": found.platform.kind.value,
        "evidence": list(found.platform.evidence),
        "partitions": len(found.partitions),
        "nodes": len(found.nodes),
        "gpus": sum(node.gpus for node in found.nodes),
        "accounting": found.has_accounting,
        "file": "" if file == STDOUT else file,
        "text": text,
        "unread": list(found.unread),
        "abilities": [{"command": each.command, "reach": each.reach.value, "text": each.text} for each in abilities],
    }


def _report(found: FoundCluster, abilities: list[Ability], file: str) -> None:
    from dalsegno.adopt.abilities import Reach

    gpus = sum(node.gpus for node in found.nodes)
    counts = f"{len(found.nodes)} nodes in {len(found.partitions)} partitions" + (f", {gpus} GPUs" if gpus else "")
    out.talk(f"{found.setting('ClusterName')}: {found.platform.kind.title}, Slurm {found.version}, {counts}")
    for each in found.platform.evidence:
        out.talk(f"  {each}")
    for each in found.unread:
        out.warn(f"could not read {each}")
    headings = {
        Reach.USER: "works as an ordinary user",
        Reach.ADMINISTRATOR: "needs an administrator",
        Reach.NOBODY: "does not work here",
    }
    for reach in Reach:
        chosen = [each for each in abilities if each.reach is reach]
        if not chosen:
            continue
        out.heading(headings[reach])
        width = max(len(each.command) for each in chosen)
        for ability in chosen:
            out.step(f"{ability.command.ljust(width)}  {ability.text}")
    if file != STDOUT:
        out.talk(f"\nwrote {file}; next: `dalsegno run train.py`, or `dalsegno adopt watch`")


# The command `dalsegno adopt watch`


@command.command(short_help="Watch the nodes, and say what recovery would do.")
@file_argument
def watch(file: str) -> None:
    """Watch the nodes of the cluster that FILE describes (default: cluster.yaml), and say what recovery would do.

    Observing needs no special rights. The watcher finds lost nodes, nodes that Slurm drained, and nodes on which all
    jobs fail. In armed partitions it drains such nodes, which needs the rights of a Slurm operator.

    \b
    dalsegno adopt watch
    dalsegno events -f
    """
    from dalsegno.cli.health.nodes import describe_event
    from dalsegno.cli.interrupts import Interrupted, stoppable
    from dalsegno.cluster import find_slurm, watcher_folder
    from dalsegno.log import start_logging
    from dalsegno.recovery.watcher import LOCK, NodeWatcher
    from dalsegno.spec.load import load_spec
    from dalsegno.system.files import locked, make_folder

    _refuse_file_of_others(Path(file))
    start_logging("watcher")
    slurm, name = find_slurm(), load_spec(file).name
    folder = watcher_folder(name)
    make_folder(folder)
    make_folder((folder / LOCK).parent, 0o700)
    with locked(folder / LOCK, f"the watcher of {name}"):
        watcher = NodeWatcher(folder, Path(file).absolute(), slurm.client, slurm.env.get("SLURM_CONF", ""))
        out.talk(f"watching {name}; Ctrl-C ends it, `dalsegno events` and `dalsegno nodes` show more")
        try:
            with stoppable():
                while True:
                    for event in watcher.turn(TURN_S):
                        out.data(describe_event(event.message()))
        except Interrupted:
            pass  # Ctrl-C is the usual way to end the watcher
        finally:
            watcher.close()


def _refuse_file_of_others(file: Path) -> None:
    """Raise an error if this is root and another user can change the file, because the file decides which nodes are
    drained."""
    from dalsegno.system.ownership import part_of_others, trusted_owners

    theirs = part_of_others(file, trusted_owners()) if os.geteuid() == 0 else ""
    if theirs:
        raise DalsegnoError(
            f"other users can change {theirs}, and so which nodes are drained",
            where=str(file),
            hint="copy the file to a folder that only root can change, such as /etc/dalsegno",
        )


@command.command(short_help="Let `adopt watch` act in PARTITION.")
@click.argument("partition")
@file_argument
def arm(partition: str, file: str) -> None:
    """Let `adopt watch` act in PARTITION: write it to `armed` of the cluster file FILE (default: cluster.yaml).

    The watcher acts on a node if all of its partitions are armed. A running watcher reads the file again
    within seconds.
    """
    _set_armed(file, lambda armed: [*armed, partition])
    out.talk(f"{partition} is armed; Dal Segno acts on a node if all of its partitions are armed")


@command.command()
@click.argument("partition")
@file_argument
def disarm(partition: str, file: str) -> None:
    """Let `adopt watch` only observe in PARTITION again."""
    _set_armed(file, lambda armed: [name for name in armed if name != partition])
    out.talk(f"{partition} is only observed")


def _set_armed(file: str, change: Callable[[list[str]], list[str]]) -> None:
    from dalsegno.adopt.render import with_armed
    from dalsegno.spec.load import load_spec, parse_spec
    from dalsegno.system.files import write_atomic

    armed = change(list(load_spec(file).health.armed))
    text = with_armed(Path(file).read_text(encoding="utf-8"), list(dict.fromkeys(armed)))
    if text is None:
        raise DalsegnoError(
            "the file has no line `armed:` below `health:`", where=file, hint=f"add `armed: [{', '.join(armed)}]` there"
        )
    parse_spec(text, file)
    write_atomic(Path(file), text)
