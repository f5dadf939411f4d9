"""`dalsegno containers`: whether every host of the cluster knows `--container-image`, and mending those that do not."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.options import cluster_option, json_option
from dalsegno.cli.silence import meaning_of
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError
from dalsegno.hostlist import compress

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.containers.plugstack import Finding, HostFacts, Repair, Way
    from dalsegno.slurm.node_info import NodeInfo


@click.group()
def command() -> None:
    """Whether container jobs work on the cluster's hosts, with Pyxis or with Dal Segno's plugin."""


@command.command()
@cluster_option
@json_option
@click.option("--repair", is_flag=True, help="Mend what can be mended; needs the rights to write to the hosts.")
@click.option("--folder", default="", help="Where Dal Segno's plugin goes, on each host's own disk.")
def check(name: str | None, json_: bool, repair: bool, folder: str) -> None:
    """Ask this host and every node: does srun know --container-image, and is all there that it needs? Exits 1 if not.

    Works on any Slurm cluster from its login or head node. Nodes are asked by a small step each, else over ssh.
    With --repair, an installed Pyxis is registered where it is not; where there is none, Dal Segno's plugin is.
    """
    from dalsegno.cli import containers_words
    from dalsegno.containers.plugstack import judge
    from dalsegno.containers.plugstack.repairs import FOLDER

    folder = folder.rstrip("/") or FOLDER
    if not folder.startswith("/") or any(letter.isspace() or letter in "#%" for letter in folder):
        raise UsageError(f"{folder!r} is no folder for a plugin", hint="name it by a path without blanks, `#` and `%`")
    with interruptible():
        site = _open(name)
        hosts = site.ask()
        done = _mend(site, hosts, folder) if repair else []
        hosts = site.ask() if done else hosts
    found = judge(hosts, site.own)
    if json_:
        out.as_json(containers_words.as_json(site.asleep, hosts, found, done))
    else:
        _show(site, hosts, found, repaired=repair)
    raise SystemExit(1 if found else 0)


@dataclass(frozen=True)
class _Site:
    """A cluster, and how its nodes are reached."""

    slurm: SlurmHere
    own: bool
    nodes: tuple[str, ...]
    asleep: tuple[str, ...]  # powered down: a step would boot them
    ways: tuple[Way, ...]

    def ask(self) -> list[HostFacts]:
        from dalsegno.containers.plugstack import ask_all
        from dalsegno.system.processes import LocalRunner

        out.talk(f"asking {compress(self.nodes)}")
        return ask_all(LocalRunner(), platform.node(), self.slurm.env, self.nodes, self.ways)


def _open(name: str | None) -> _Site:
    from dalsegno.cluster import cluster_id, find_slurm, silence, way_into
    from dalsegno.containers.plugstack import Way
    from dalsegno.containers.plugstack.asking import by_srun, by_ssh

    slurm = find_slurm(name)
    if (silent := silence(slurm)) is not None:
        raise silent
    try:
        nodes = slurm.client.nodes()
    except CommandFailed as fault:
        raise meaning_of(fault) from None
    asleep = tuple(node.name for node in nodes if node.powered_down)
    closed = {node.name: why for node in nodes if (why := _closed(node))}
    partitions = {node.name: node.partitions[0] for node in nodes if node.partitions}
    inside = way_into(slurm)
    second = Way("its host", inside) if inside else by_ssh(slurm.env)
    names = tuple(node.name for node in nodes if node.name not in asleep)
    return _Site(slurm, bool(cluster_id(slurm.env)), names, asleep, (by_srun(slurm.env, partitions, closed), second))


def _closed(node: NodeInfo) -> str:
    """Why a step would wait there, "" if it would not."""
    if not node.in_service:
        return f"it is {node.state_text.lower() or 'out of service'}"
    return "all its CPUs are taken" if node.cpus_used >= node.cpus else ""


def _mend(site: _Site, hosts: Sequence[HostFacts], folder: str) -> list[Repair]:
    """This host first: where hosts share their files, the nodes are mended with it."""
    mended = _mend_some(site, hosts, folder, login=True)
    hosts = site.ask() if mended else hosts
    return [*mended, *_mend_some(site, hosts, folder, login=False)]


def _mend_some(site: _Site, hosts: Sequence[HostFacts], folder: str, *, login: bool) -> list[Repair]:
    from dalsegno.containers.native import build_key
    from dalsegno.containers.plugstack import decide_repairs
    from dalsegno.containers.plugstack.mending import mend_here, mend_node
    from dalsegno.system.processes import LocalRunner

    version = str(site.slurm.client.version())
    repairs, hand_out = decide_repairs(hosts, site.own, build_key(version), folder)
    here = {host.host for host in hosts if host.login}
    mended = []
    for repair in (each for each in repairs if (each.host in here) == login):
        for line in repair.sentences():
            out.talk(f"{repair.host}: {line}")
        parcel = _parcel(version) if repair.install else ""
        with _told():
            if login:
                mend_here(LocalRunner(), site.slurm.env, repair, parcel)
            else:
                mend_node(LocalRunner(), site.ways, repair, parcel)
            mended.append(repair)
    if login and hand_out and (mended or any(host.login and host.working for host in hosts)):
        out.talk("has slurmctld hand its files out (scontrol reconfigure)")
        with _told():
            site.slurm.client.reconfigure()
    return mended


@contextmanager
def _told() -> Iterator[None]:
    """One host that cannot be mended keeps none of the others from it."""
    try:
        yield
    except DalsegnoError as error:
        out.error(error.what, hint=error.hint)


def _parcel(version: str) -> str:
    from dalsegno.cluster import home
    from dalsegno.containers.native import build_native
    from dalsegno.containers.plugstack.mending import pack
    from dalsegno.system.processes import LocalRunner

    return pack(build_native(LocalRunner(), home() / "cache", version))


def _show(site: _Site, hosts: Sequence[HostFacts], found: Sequence[Finding], *, repaired: bool) -> None:
    from dalsegno.cli import containers_words

    out.table(containers_words.HEADERS, containers_words.rows(hosts))
    if site.asleep:
        out.talk(f"not asked, for they are powered down: {compress(site.asleep)}")
    for text in containers_words.sentences(found):
        out.data(f"\n{text}")
    if found and not repaired:
        out.talk("\n`--repair` mends what it can")
