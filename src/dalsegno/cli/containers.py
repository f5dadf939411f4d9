"""`dalsegno containers`: whether every host of the cluster knows `--container-image`, and mending those that do not."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.options import cluster_option, json_option
from dalsegno.errors import DalsegnoError, NotThere, SpecError, UsageError
from dalsegno.hostlist import compress

if TYPE_CHECKING:
    from dalsegno.cli.containers_site import Site
    from dalsegno.containers.named import NodeAnswer
    from dalsegno.containers.plugstack import Finding, HostFacts, Repair
    from dalsegno.containers.plugstack.compiling import Parcel
    from dalsegno.containers.plugstack.crowd import Tell
    from dalsegno.containers.plugstack.ways import Way
    from dalsegno.system.processes import Runner


@click.group()
def command() -> None:
    """Check that container jobs work on the cluster's hosts; list and remove named containers."""


@command.command()
@click.argument("file", type=click.Path(), required=False)
@cluster_option
@json_option
@click.option("--repair", is_flag=True, help="Mend what can be mended; needs the rights to write to the hosts.")
@click.option("--dry-run", is_flag=True, help="Say what --repair would do, and do nothing.")
@click.option("--folder", default="", help="Where Dal Segno's plugin goes, on each host's own disk.")
@click.option(
    "--ssh-option", "-o", "ssh_options", multiple=True, metavar="NAME=VALUE", help="As ssh's own -o; may be repeated."
)
def check(
    file: str | None,
    name: str | None,
    json_: bool,
    repair: bool,
    dry_run: bool,
    folder: str,
    ssh_options: tuple[str, ...],
) -> None:
    """Ask every host: does srun know --container-image, and is all there that it needs? Exits 1 if not.

    On the login or head node of any Slurm cluster: this host is asked, and the nodes by a small step each, else over
    ssh. With FILE, a cluster file of `target: ssh`: the hosts that it names, over ssh, from anywhere.
    With --repair, an installed Pyxis is registered where it is not; where there is none, Dal Segno's plugin is.
    """
    from dalsegno.cli import containers_words
    from dalsegno.cli.containers_site import site_here, site_of
    from dalsegno.containers.plugstack import judge
    from dalsegno.containers.plugstack.repairs import FOLDER
    from dalsegno.containers.plugstack.rounds import mend_in_rounds

    folder = folder.rstrip("/") or FOLDER
    _check_usage(file, name, folder, ssh_options)
    with interruptible():
        try:
            site = site_of(file, ssh_options) if file else site_here(name, ssh_options)
        except (NotThere, SpecError) as error:
            if file or name:
                error.exit_code = UsageError.exit_code  # 1 says that hosts were asked
            raise
        hosts = _ask(site)
        planned = _plan(site, hosts, folder) if dry_run else []
        done = mend_in_rounds(_Hands(site, folder), hosts) if repair and not dry_run else []
        hosts = _ask(site) if done else hosts
    found = judge(hosts, site.own)
    if json_:
        out.as_json(
            containers_words.as_json(site.asleep, hosts, found, done, [each for them in planned for each in them])
        )
    else:
        _show(site, hosts, found)
        for together in planned:
            _show_plan(together)
        if planned:
            out.talk("\nthat is all of it if each step helps; what shows only then is decided then")
        if found and not repair and not dry_run:
            out.talk("\n`--repair` mends what it can; `--dry-run` tells what that is")
    raise SystemExit(1 if found else 0)


nodes_option = click.option(
    "--nodelist", "-w", "wanted", metavar="NODES", default="", help="Only these nodes, as Slurm writes them."
)


@command.command("ls")
@cluster_option
@nodes_option
@json_option
def list_(name: str | None, wanted: str, json_: bool) -> None:
    """List your named containers (`--container-name`), node by node."""
    from dalsegno.containers.named import list_named, parse_listing
    from dalsegno.system.processes import LocalRunner

    with interruptible():
        way, nodes = _steps(name, wanted)
        answers = list_named(LocalRunner(), way, nodes, _telling("asked"))
    found = [each for answer in answers for each in parse_listing(answer)]
    if json_:
        out.as_json([asdict(each) for each in found])
    elif found:
        rows = [(each.node, each.name, each.image, "yes" if each.in_use else "no", _date(each.used)) for each in found]
        out.table(("NODE", "NAME", "IMAGE", "IN USE", "LAST USED"), rows)
    _tell_failed(answers)
    raise SystemExit(1 if any(answer.error for answer in answers) else 0)


@command.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@cluster_option
@nodes_option
def remove(names: tuple[str, ...], name: str | None, wanted: str) -> None:
    """Remove your named containers from the nodes that keep them. One that is in use stays."""
    from dalsegno.containers.named import remove_named
    from dalsegno.system.processes import LocalRunner

    for each in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", each):
            raise UsageError(f"invalid container name {each!r}", hint="`dalsegno containers ls` lists yours")
    with interruptible():
        way, nodes = _steps(name, wanted)
        answers = remove_named(LocalRunner(), way, nodes, names, _telling("asked"))
    for answer in answers:
        for line in answer.lines:
            out.talk(f"{answer.node}: removed {line}")
    _tell_failed(answers)
    removed = {line for answer in answers for line in answer.lines}
    missing = [each for each in names if each not in removed]
    if missing and not any(answer.error for answer in answers):
        out.error(f"no node has a container {', '.join(missing)}", hint="`dalsegno containers ls` lists yours")
    raise SystemExit(1 if missing or any(answer.error for answer in answers) else 0)


def _steps(name: str | None, wanted: str) -> tuple[Way, list[str]]:
    """How nodes are asked, and which: those that are awake, or of them the wanted ones."""
    from dalsegno.cli.containers_site import slurm_here, steps_on
    from dalsegno.hostlist import expand

    slurm, nodes = slurm_here(name)
    names = [node.name for node in nodes if not node.powered_down]
    chosen = expand(wanted) if wanted else names
    if unknown := [each for each in chosen if each not in names]:
        raise UsageError(f"no node {compress(unknown)} is up in this cluster", hint="`sinfo -N` lists them")
    return steps_on(slurm, nodes), chosen


def _tell_failed(answers: Sequence[NodeAnswer]) -> None:
    for answer in answers:
        if answer.error:
            out.error(f"{answer.node}: {answer.error}")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _check_usage(file: str | None, name: str | None, folder: str, ssh_options: Sequence[str]) -> None:
    if not folder.startswith("/"):
        raise UsageError(f"{folder!r} is no folder for a plugin", hint="name it by its whole path, from `/` on")
    if any(letter.isspace() or letter in "#%" for letter in folder):
        raise UsageError(f"{folder!r} is no folder for a plugin", hint="name it by a path without blanks, `#` and `%`")
    if file and name:
        raise UsageError("a file and --cluster name two clusters", hint="give one of them")
    for option in ssh_options:
        if not re.fullmatch(r"\s*[A-Za-z]\w*(\s*=\s*|\s+)\S.*", option, re.DOTALL):
            raise UsageError(
                f"{option!r} is no option of ssh's", hint="write `--ssh-option NAME=VALUE`, as `--ssh-option Port=2222`"
            )


def _ask(site: Site) -> list[HostFacts]:
    from dalsegno.containers.plugstack import ask_all
    from dalsegno.system.processes import LocalRunner

    out.talk(f"asking {compress(dict.fromkeys((*site.logins, *site.nodes)))}")
    return ask_all(LocalRunner(), site.routes, site.logins, site.nodes, _telling("asked"))


def _telling(word: str) -> Tell:
    """In a terminal, how many hosts are through."""
    live = sys.stderr.isatty()

    def tell(count: int, all_: int) -> None:
        if live:
            out.replace_line(f"{word} {count} of {all_}" if count < all_ else "")

    return tell


def _decide(site: Site, hosts: Sequence[HostFacts], folder: str) -> tuple[list[Repair], bool]:
    from dalsegno.containers.native import build_key
    from dalsegno.containers.plugstack import decide_repairs
    from dalsegno.containers.plugstack.choice import slurm_version

    return decide_repairs(hosts, site.own, build_key(slurm_version(hosts)), folder)


@dataclass(frozen=True)
class _Hands:
    """What is done to the hosts of a site, and told."""

    site: Site
    folder: str
    parcels: dict[str, Parcel] = field(default_factory=dict)  # our plugin, once for each version of Slurm
    told: list[str] = field(default_factory=list)

    def ask(self) -> list[HostFacts]:
        return _ask(self.site)

    def decide(self, hosts: Sequence[HostFacts]) -> tuple[list[Repair], bool]:
        return _decide(self.site, hosts, self.folder)

    def mend(self, hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> list[Repair]:
        from dalsegno.containers.plugstack.choice import slurm_version

        self.tell_of_absent(hosts, repairs)
        if not any(each.install for each in repairs):
            return _mend_some(self.site, repairs, None)
        version = slurm_version(hosts)
        if version not in self.parcels:
            self.parcels[version] = _compile(self.site, hosts)
        return _mend_some(self.site, repairs, self.parcels[version])

    def hand_out(self) -> None:
        _hand_out(self.site)

    def tell_of_absent(self, hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> None:
        """Before anything is done, for which no host is asked again."""
        from dalsegno.cli import containers_words

        install = next((each.install for each in repairs if each.install), "")
        silent = [host.host for host in hosts if host.silent]
        for text in containers_words.absent(silent, self.site.asleep, install) if install else ():
            if text not in self.told:
                self.told.append(text)
                out.warn(text)

    def hold_back(self, lacking: Sequence[HostFacts], plugin: str) -> None:
        names = compress([host.host for host in lacking])
        out.error(
            f"{names} reads the same plugstack.conf as others, and has no {plugin}: no line is written, for with one "
            "that requires it no job would start there",
            hint="mend that one, and run the same again: what is done stays done",
        )

    def leave_nodes(self, unmended: Sequence[HostFacts], vain: bool) -> None:
        names, spite = compress([host.host for host in unmended]), " in spite of its repair" * vain
        out.error(
            f"{names} does not know --container-image{spite}: no node gets a line",
            hint=f"what was before is kept: {unmended[0].kept}" if vain else "mend that one, and run the same again",
        )


@dataclass(frozen=True)
class _Plan(_Hands):
    """The same, imagined: hosts answer what they would if all that was done helped."""

    hosts: list[HostFacts] = field(default_factory=list)
    planned: list[Sequence[Repair]] = field(default_factory=list)  # what is done at once, one after the other

    def ask(self) -> list[HostFacts]:
        return list(self.hosts)

    def mend(self, hosts: Sequence[HostFacts], repairs: Sequence[Repair]) -> list[Repair]:
        from dalsegno.containers.plugstack.imagined import imagine

        self.tell_of_absent(hosts, repairs)
        self.planned.append(repairs)
        self.hosts[:] = imagine(self.hosts, repairs)
        return list(repairs)

    def hand_out(self) -> None:
        from dalsegno.containers.plugstack import Repair
        from dalsegno.containers.plugstack.imagined import imagine_handed_out

        self.planned.append([Repair(self.site.logins[0], hand_out=True)])
        self.hosts[:] = imagine_handed_out(self.hosts)


def _plan(site: Site, hosts: Sequence[HostFacts], folder: str) -> list[Sequence[Repair]]:
    """All that `--repair` would do, in its order."""
    from dalsegno.containers.plugstack.rounds import mend_in_rounds

    plan = _Plan(site, folder, hosts=list(hosts))
    mend_in_rounds(plan, hosts)
    return plan.planned


def _mend_some(site: Site, repairs: Sequence[Repair], parcel: Parcel | None) -> list[Repair]:
    """One host that cannot be mended keeps none of the others from it. Those that were."""
    from dalsegno.cli import containers_words
    from dalsegno.containers.plugstack.crowd import each_of
    from dalsegno.containers.plugstack.mending import mend
    from dalsegno.system.processes import LocalRunner

    def do(runner: Runner, repair: Repair) -> DalsegnoError | None:
        try:
            mend(runner, site.routes[repair.host], repair, parcel)
        except DalsegnoError as error:
            return error
        return None

    _show_plan(repairs)
    came = list(zip(repairs, each_of(LocalRunner(), do, repairs, _telling("mended")), strict=True))
    for what, hint in containers_words.failures((repair.host, error) for repair, error in came if error):
        out.error(what, hint=hint)
    return [repair for repair, error in came if error is None]


def _hand_out(site: Site) -> None:
    from dalsegno.containers.plugstack.mending import hand_out
    from dalsegno.system.processes import LocalRunner

    out.talk("has slurmctld hand its files out (scontrol reconfigure)")
    try:
        hand_out(LocalRunner(), site.routes[site.logins[0]], site.logins[0])
    except DalsegnoError as error:
        out.error(f"slurmctld was not told: {error.what}", hint=error.hint)


def _compile(site: Site, hosts: Sequence[HostFacts]) -> Parcel:
    """On the first host that answered, as `slurm_version` has it."""
    from dalsegno.containers.plugstack.compiling import compile_on
    from dalsegno.system.processes import LocalRunner

    host = next(each.host for each in hosts if not each.silent)
    out.talk(f"compiling Dal Segno's plugin on {host}")
    return compile_on(LocalRunner(), site.routes[host], host)


def _show_plan(repairs: Sequence[Repair]) -> None:
    from dalsegno.cli import containers_words

    for line in containers_words.plans(repairs):
        out.talk(line)


def _show(site: Site, hosts: Sequence[HostFacts], found: Sequence[Finding]) -> None:
    from dalsegno.cli import containers_words

    out.table(containers_words.HEADERS, containers_words.rows(hosts))
    if site.asleep:
        out.talk(f"not asked, for they are powered down: {compress(site.asleep)}")
    for text in containers_words.sentences(found):
        out.data(f"\n{text}")
