"""`dalsegno containers`: check that every host knows `--container-image`; list and remove named containers."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import meaning_of
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import CommandFailed, NotThere, SpecError, UsageError
from dalsegno.hostlist import compress

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.containers.named import NodeAnswer
    from dalsegno.containers.plugstack import CommandStep, ContainerFinding, HostRoute, PluginBuild, PluginFacts
    from dalsegno.containers.plugstack.hosts import Progress
    from dalsegno.slurm.facts import NodeInfo

HEADERS = ["HOSTS", "--container-image", "PLUGIN", "ENROOT"]
Cells = TypeVar("Cells", bound=tuple[str, ...])
FC = TypeVar("FC", bound=Callable[..., Any])


@click.group()
def command() -> None:
    """Check that container jobs work on the cluster's hosts; list and remove named containers."""


def _removed(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    """Raise UsageError if a removed option is given. With it, earlier versions of `check` could change hosts."""
    if given:
        raise UsageError(
            f"`{parameter.opts[0]}` was removed: `dalsegno containers check` does not change hosts any more",
            hint="run the commands that `dalsegno containers check` prints",
        )


def _removed_option(name: str) -> Callable[[FC], FC]:
    return click.option(name, is_flag=True, hidden=True, expose_value=False, callback=_removed)


@command.command(short_help="Check that every host knows --container-image.")
@click.argument("file", type=click.Path(), required=False)
@cluster_option
@json_option
@click.option(
    "--folder", default="", help="Where the printed commands install Dal Segno's plugin, on each host's disk."
)
@click.option(
    "--ssh-option",
    "-o",
    "ssh_options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Option for ssh, as ssh's own -o; may be repeated.",
)
@_removed_option("--repair")
@_removed_option("--dry-run")
def check(file: str | None, name: str | None, json_: bool, folder: str, ssh_options: tuple[str, ...]) -> None:
    """Check that every host knows --container-image, and print the commands that fix what is wrong.

    Run it on the login or head node of any Slurm cluster: it checks this host, and each node through a small job step
    or over ssh. With FILE, a cluster file with `target: ssh`, it checks the hosts in the file over ssh, from anywhere.
    It changes nothing on any host. Exits 1 if something is wrong.
    """
    from dalsegno.containers.plugstack import judge, plan_commands
    from dalsegno.containers.plugstack.commands import FOLDER

    folder = folder.rstrip("/") or FOLDER
    _check_usage(file, name, folder, ssh_options)
    with interruptible():
        try:
            checked = hosts_in(file, ssh_options) if file else hosts_here(name, ssh_options)
        except (NotThere, SpecError) as error:
            if file or name:
                # exit code 1 would mean that hosts were checked and have problems
                error.exit_code = UsageError.exit_code
            raise
        hosts = _ask(checked)
    found = judge(hosts, checked.own)
    steps = plan_commands(hosts, found, checked.own, checked.asleep, _build(checked, hosts, folder))
    if json_:
        out.as_json(report_as_json(checked.asleep, hosts, found, steps))
    else:
        _show(checked, hosts, found, steps)
    raise SystemExit(1 if found else 0)


nodes_option = click.option(
    "--nodelist", "-w", "wanted", metavar="NODES", default="", help="Only these nodes, as a Slurm host list: gpu-[1-4]."
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
        route, nodes = _steps(name, wanted)
        answers = list_named(LocalRunner(), route, nodes, _show_progress("asked"))
    found = [each for answer in answers for each in parse_listing(answer)]
    if json_:
        out.as_json([asdict(each) for each in found])
    elif found:
        rows = [(each.node, each.name, each.image, "yes" if each.in_use else "no", _date(each.used)) for each in found]
        out.table(("NODE", "NAME", "IMAGE", "IN USE", "LAST USED"), rows)
    _report_failed(answers)
    raise SystemExit(1 if any(answer.error for answer in answers) else 0)


@command.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@cluster_option
@nodes_option
def remove(names: tuple[str, ...], name: str | None, wanted: str) -> None:
    """Remove your named containers from all nodes. Containers in use are kept."""
    from dalsegno.containers.named import remove_named
    from dalsegno.system.processes import LocalRunner

    for each in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", each):
            raise UsageError(f"invalid container name {each!r}", hint="`dalsegno containers ls` lists yours")
    with interruptible():
        route, nodes = _steps(name, wanted)
        answers = remove_named(LocalRunner(), route, nodes, names, _show_progress("asked"))
    for answer in answers:
        for line in answer.lines:
            out.talk(f"{answer.node}: removed {line}")
    _report_failed(answers)
    removed = {line for answer in answers for line in answer.lines}
    missing = [each for each in names if each not in removed]
    if missing and not any(answer.error for answer in answers):
        out.error(f"no node has a container {', '.join(missing)}", hint="`dalsegno containers ls` lists yours")
    raise SystemExit(1 if missing or any(answer.error for answer in answers) else 0)


def _steps(name: str | None, wanted: str) -> tuple[HostRoute, list[str]]:
    """Return the route to the nodes, and the nodes to use: those in `wanted`, or all that are not powered down.

    Raise UsageError if a node in `wanted` is unknown or powered down.
    """
    from dalsegno.hostlist import expand

    slurm, nodes = slurm_here(name)
    names = [node.name for node in nodes if not node.powered_down]
    chosen = expand(wanted) if wanted else names
    if unknown := [each for each in chosen if each not in names]:
        raise UsageError(f"no node {compress(unknown)} is up in this cluster", hint="`sinfo -N` lists them")
    return steps_on(slurm, nodes), chosen


def _report_failed(answers: Sequence[NodeAnswer]) -> None:
    for answer in answers:
        if answer.error:
            out.error(f"{answer.node}: {answer.error}")


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _check_usage(file: str | None, name: str | None, folder: str, ssh_options: Sequence[str]) -> None:
    if not folder.startswith("/"):
        raise UsageError(f"invalid folder {folder!r} for the plugin", hint="use an absolute path, such as `/opt`")
    if any(letter.isspace() or letter in "#%" for letter in folder):
        raise UsageError(f"invalid folder {folder!r} for the plugin", hint="use a path without blanks, `#` and `%`")
    if file and name:
        raise UsageError("a file and --cluster cannot be combined", hint="give one of them")
    for option in ssh_options:
        if not re.fullmatch(r"\s*[A-Za-z]\w*(\s*=\s*|\s+)\S.*", option, re.DOTALL):
            raise UsageError(
                f"invalid ssh option {option!r}", hint="use `--ssh-option NAME=VALUE`, such as `-o Port=2222`"
            )


@dataclass(frozen=True)
class CheckedHosts:
    """The hosts of a cluster, and how each of them is reached."""

    own: bool  # whether `dalsegno up` created this cluster; always False for a cluster file
    logins: tuple[str, ...]  # hosts on which jobs are submitted
    nodes: tuple[str, ...]
    asleep: tuple[str, ...]  # nodes that are powered down and not checked, because a job step would boot them
    routes: dict[str, tuple[HostRoute, ...]]  # the routes to each host, best first
    here: str = ""  # the login host that this process runs on; "" for a cluster file


def hosts_here(name: str | None, ssh_options: Sequence[str]) -> CheckedHosts:
    """Return this host and the cluster's nodes. A node that is powered down is only named in `asleep`."""
    from dalsegno.cluster import cluster_id, way_into
    from dalsegno.containers.plugstack import HostRoute
    from dalsegno.containers.plugstack.hosts import local_route, ssh_route

    slurm, nodes = slurm_here(name)
    asleep = tuple(node.name for node in nodes if node.powered_down)
    inside = way_into(slurm)
    second = HostRoute("its host", inside) if inside else ssh_route(slurm.env, ssh_options)
    this = platform.node()
    names = others(nodes, this)
    routes = {**dict.fromkeys(names, (steps_on(slurm, nodes), second)), this: (local_route(slurm.env),)}
    return CheckedHosts(bool(cluster_id(slurm.env)), (this,), names, asleep, routes, here=this)


def hosts_in(file: str, ssh_options: Sequence[str]) -> CheckedHosts:
    """Return the hosts of a cluster file, reached over ssh. The calling host does not need Slurm."""
    from dalsegno.containers.plugstack.hosts import ssh_route
    from dalsegno.spec.load import load_spec
    from dalsegno.spec.resolve import resolve
    from dalsegno.spec.targets import Ssh, hosts_of

    spec = load_spec(file)
    cluster = resolve(spec)
    if not cluster.names_hosts:
        raise UsageError(
            f"{file} names no hosts that are reached over ssh: its target is `{cluster.target}`",
            hint="on the cluster's login or head node, `dalsegno containers check` needs no file",
        )
    logins = (cluster.head, *cluster.logins)
    nodes = tuple(node.name for node in cluster.nodes if node.name not in logins)
    route = ssh_route(os.environ, ssh_options, hosts_of(spec.ssh or Ssh(), (*logins, *nodes)))
    return CheckedHosts(False, logins, nodes, (), dict.fromkeys((*logins, *nodes), (route,)))


def slurm_here(name: str | None) -> tuple[SlurmHere, list[NodeInfo]]:
    """Return the Slurm of the named cluster, or by default the one that this shell uses, and its nodes."""
    from dalsegno.cluster import find_slurm, silence

    slurm = find_slurm(name)
    if (silent := silence(slurm)) is not None:
        raise silent
    try:
        return slurm, list(slurm.client.nodes())
    except CommandFailed as fault:
        raise _no_settings() if isinstance(meaning_of(fault), NotThere) else fault from None


def steps_on(slurm: SlurmHere, nodes: Sequence[NodeInfo]) -> HostRoute:
    """Return the route that runs a small Slurm job on each node, except nodes that are out of service or full."""
    from dalsegno.containers.plugstack.hosts import srun_route

    closed = {node.name: why for node in nodes if (why := _closed(node))}
    partitions = {node.name: node.partitions[0] for node in nodes if node.partitions}
    return srun_route(slurm.env, partitions, closed)


def others(nodes: Sequence[NodeInfo], this: str) -> tuple[str, ...]:
    """Return the nodes to check from here: all except powered-down nodes, and except this host if it is a node."""
    return tuple(node.name for node in nodes if not node.powered_down and node.name != this)


def _no_settings() -> NotThere:
    return NotThere(
        "Slurm's commands are installed here, but they find no slurm.conf: this host belongs to no cluster",
        hint="run this on a login or head node, or set SLURM_CONF; with a cluster file of `target: ssh`, "
        "`dalsegno containers check FILE` works from anywhere",
    )


def _closed(node: NodeInfo) -> str:
    """Return why a job would have to wait for a node; "" if it would start at once."""
    if not node.in_service:
        return f"it is {node.state_text.lower() or 'out of service'}"
    return "all its CPUs are taken" if node.cpus_used >= node.cpus else ""


def _ask(checked: CheckedHosts) -> list[PluginFacts]:
    from dalsegno.containers.plugstack import ask_all
    from dalsegno.system.processes import LocalRunner

    out.talk(f"asking {compress(dict.fromkeys((*checked.logins, *checked.nodes)))}")
    return ask_all(LocalRunner(), checked.routes, checked.logins, checked.nodes, _show_progress("asked"))


def _show_progress(word: str) -> Progress:
    """Return a callback that shows in a terminal how many hosts are done."""
    live = sys.stderr.isatty()

    def show(count: int, total: int) -> None:
        if live:
            out.replace_line(f"{word} {count} of {total}" if count < total else "")

    return show


def _build(checked: CheckedHosts, hosts: Sequence[PluginFacts], folder: str) -> PluginBuild | None:
    """Return how Dal Segno's plugin is compiled on this host; None if the hosts come from a cluster file."""
    from dalsegno.containers.native import build_key, source_folder
    from dalsegno.containers.plugstack import PluginBuild
    from dalsegno.containers.plugstack.check import slurm_version

    if not checked.here:
        return None
    return PluginBuild(checked.here, str(source_folder()), build_key(slurm_version(hosts)), folder)


def _show(
    checked: CheckedHosts, hosts: Sequence[PluginFacts], found: Sequence[ContainerFinding], steps: Sequence[CommandStep]
) -> None:
    out.table(HEADERS, table_rows(hosts))
    if checked.asleep:
        out.talk(f"not checked, because they are powered down: {compress(checked.asleep)}")
    for names, (what, fix) in _grouped((each.host, (each.what, each.fix)) for each in found):
        out.data(f"\n{names}: {what}\n  fix: {fix}")
    if steps:
        out.data("\nRun these commands as root, in this order. Then run the check again.")
    for text in describe_steps(steps):
        out.data(f"\n{text}")


def table_rows(hosts: Sequence[PluginFacts]) -> list[list[str]]:
    """Return the rows of the table under HEADERS."""
    return [[names, *row] for names, row in _grouped((host.host, _row(host)) for host in hosts)]


def _row(host: PluginFacts) -> tuple[str, str, str]:
    if host.silent:
        return "?", "?", "?"
    line = host.working
    return ("yes" if "srun" in host.knows else "no"), (line.plugin if line else "-"), host.enroot or "-"


def describe_steps(steps: Sequence[CommandStep]) -> list[str]:
    """Return each step as text to paste into a shell: comments say where and why, then the commands."""
    return [
        "\n".join(
            [
                f"# {number}. on {compress(step.hosts)}: {step.purpose}",
                *([f"# caution: {step.caution}"] if step.caution else []),
                *step.commands,
            ]
        )
        for number, step in enumerate(steps, 1)
    ]


def report_as_json(
    not_asked: Sequence[str],
    hosts: Sequence[PluginFacts],
    found: Sequence[ContainerFinding],
    steps: Sequence[CommandStep],
) -> dict[str, object]:
    """Return the report as `--json` prints it."""
    return {
        "ok": not found,
        "hosts": [
            {
                "host": host.host, "login": host.login, "asked": not host.silent, "knows": sorted(host.knows),
                "plugstack": host.stack, "plugin": host.working.plugin if host.working else None, "enroot": host.enroot,
            }
            for host in hosts
        ],
        "not_asked": list(not_asked),
        "findings": [{"host": each.host, "what": each.what, "fix": each.fix} for each in found],
        "commands": [asdict(step) for step in steps],
    }  # fmt: skip


def _grouped(results: Iterable[tuple[str, Cells]]) -> list[tuple[str, Cells]]:
    """Join hosts with the same cells, ordered by the first host of each group."""
    groups: dict[Cells, list[str]] = {}
    for host, cells in results:
        groups.setdefault(cells, []).append(host)
    return [(compress(names), cells) for cells, names in groups.items()]
