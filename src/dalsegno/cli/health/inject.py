"""`dalsegno inject`: inject a fault into a node or a worker."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import meaning_of
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.out import cluster_option, json_option, parse_time
from dalsegno.errors import CommandFailed, DalsegnoError, UsageError

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace, SlurmHere
    from dalsegno.inject.faults import FaultOptions, InjectableFault, InjectedFault
    from dalsegno.targets.base import CanInject


@click.command()
@click.argument("words", nargs=-1, metavar="FAULT [CODE] NODE")
@cluster_option
@click.option("--for", "for_", metavar="TIME", help="Undo the fault after this time: 5s, 300ms, 2m. Default: never.")
@click.option("--clear", is_flag=True, help="Undo injected faults: all, those of a NODE, or one FAULT of a NODE.")
@click.option("--gpu", type=click.IntRange(0, 63), metavar="I", help="Index of the GPU. Default: 0.")
@click.option("--count", type=click.IntRange(1, 1000), metavar="N", help="Number of errors, links, flaps or machines.")
@click.option("--percent", type=float, metavar="P", help="net-loss: percentage of lost packets. Default: 30.")
@click.option("--rate", metavar="RATE", help="net-slow, link-slow: bandwidth, such as 10mbit. Default: 1mbit.")
@click.option("--peer", metavar="NODE", help="link-slow: the node at the other end of the link.")
@click.option("--by", metavar="TIME", help="clock-skew: offset (5m). cloud-notice: time left (2m).")
@click.option(
    "--until", type=click.Choice(["reset", "reboot", "replace"]), help="Weakest action that repairs the fault."
)
@click.option(
    "--same-gpus", "same", is_flag=True, default=None, help="bad-replacement: the new machine has the old GPUs."
)
@click.option("--run", metavar="RUN", help="Run of the worker. Default: any run on the node.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="Rank of the worker. Default: the lowest on the node."
)
@click.option("--allow-real-nodes", is_flag=True, help="Allow faults in your own runs on real nodes.")
@click.option("--list", "list_", is_flag=True, help="List the faults.")
@json_option
def command(
    words: tuple[str, ...],
    name: str | None,
    for_: str | None,
    clear: bool,
    by: str | None,
    until: str | None,
    allow_real_nodes: bool,
    list_: bool,
    json_: bool,
    **plain: Any,
) -> None:
    """Inject FAULT into NODE; `--list` shows all faults and their effects.

    \b
    dalsegno inject power-off gpu-2
    dalsegno inject xid 79 gpu-2 --gpu 3
    dalsegno inject net-cut gpu-2 --for 5s
    dalsegno inject link-slow gpu-2 --peer gpu-3
    dalsegno inject worker-kill gpu-1 --rank 3
    dalsegno inject --clear gpu-2
    """
    from dalsegno.health.result import Remedy
    from dalsegno.inject.faults import FaultOptions

    if list_:
        _list(json_)
        return
    options = FaultOptions(
        for_s=parse_time(for_) if for_ is not None else None,
        by_s=parse_time(by) if by is not None else None,
        until=Remedy(until) if until else None,
        **plain,
    )
    if clear:
        _clear(words, options, name, allow_real_nodes, json_)
    else:
        _inject(words, options, name, allow_real_nodes, json_)


def _list(json_: bool) -> None:
    from dalsegno.inject.faults import FAULTS, OPTION_NAMES

    options = {fault.name: [OPTION_NAMES[option] for option in fault.options] for fault in FAULTS.values()}
    if json_:
        facts = ("name", "what", "undone", "safe")
        out.as_json(
            [
                {
                    **{key: getattr(fault, key) for key in facts},
                    "options": options[fault.name],
                    "repaired_by": fault.ended_by.value,
                }
                for fault in FAULTS.values()
            ]
        )
    else:
        rows = [[fault.name, fault.what, " ".join(options[fault.name])] for fault in FAULTS.values()]
        out.table(["FAULT", "WHAT HAPPENS", "OPTIONS"], rows)


def _inject(words: Sequence[str], options: FaultOptions, name: str | None, real: bool, json_: bool) -> None:
    from dalsegno.inject.faults import check_options

    fault, node, options = read_words(words, options)
    check_options(fault, options)
    facts = _open(name, real).inject(fault, node, options)
    if json_:
        out.as_json({"fault": fault.name, "node": node, **facts})
    else:
        out.talk(describe_injection(fault, node, options, facts, real))


def read_words(words: Sequence[str], options: FaultOptions) -> tuple[InjectableFault, str, FaultOptions]:
    """Parse words such as `xid 79 gpu-2`: a fault, its code if it has one, and a node."""
    from dataclasses import replace

    from dalsegno.inject.faults import find_fault

    if not words:
        raise UsageError("no fault given", hint="`dalsegno inject --list` shows them")
    fault, rest = find_fault(words[0]), list(words[1:])
    if "code" in fault.options and (codes := [word for word in rest if word.isdecimal()]):
        rest.remove(codes[0])
        options = replace(options, code=int(codes[0][:9]))
    elif "code" in fault.options and len(rest) > 1:
        raise UsageError(
            f"invalid code `{rest[0]}`: `{fault.name}` needs a number",
            hint=f"such as `dalsegno inject {fault.name} 79 {rest[-1]}`",
        )
    if not rest:
        raise UsageError(f"`{fault.name}` needs a node", hint="`dalsegno status` shows the nodes")
    if len(rest) > 1:
        example = f"{fault.name} {options.code} NODE" if options.code is not None else f"{fault.name} NODE"
        raise UsageError(f"`{' '.join(rest)}`: one node at a time", hint=f"such as `dalsegno inject {example}`")
    return fault, rest[0], options


def describe_injection(
    fault: InjectableFault, node: str, options: FaultOptions, facts: Mapping[str, Any], real: bool = False
) -> str:
    """Return a sentence about the injected fault, for the user."""
    if fault.name == "power-off" and not facts["is_node"]:
        return f"{node} is off; recovery does not repair it, because it is not a node; `dalsegno up` boots it"
    if fault.name == "power-off":
        return f"{node} is off; `dalsegno events -f` shows how it is repaired, `dalsegno up` boots it"
    if fault.name == "worker-kill":
        return f"killed rank {facts['rank']} on {node} (process {facts['pid']})"
    of_worker = fault.name == "worker-hang" or real
    which = f"rank {facts['rank']} on {node} (process {facts['pid']})" if of_worker else node
    which += f" - {options.peer}" if options.peer is not None else ""
    code = f" {options.code}" if options.code is not None else ""
    if options.for_s is not None:
        return f"{fault.name}{code}: {which}, for {options.for_s:g} s"
    if real:
        return f"{fault.name}: {which}; `dalsegno inject --allow-real-nodes --clear {node}` undoes it"
    return f"{fault.name}{code}: {which}; `dalsegno inject --clear {node}` undoes it, and so does `dalsegno up`"


def _clear(words: Sequence[str], options: FaultOptions, name: str | None, real: bool, json_: bool) -> None:
    from dalsegno.inject.faults import find_fault

    if given := options.given():
        raise UsageError(f"`--clear` and `{_word(next(iter(given)))}` cannot be combined", hint="leave one out")
    fault = find_fault(words[0]).name if len(words) > 1 else None
    target = _open(name, real)
    nodes = [words[-1]] if words else sorted({one.node for one in target.injected()})
    cleared = [one for node in nodes for one in target.clear(node, fault)]
    if json_:
        out.as_json({"cleared": [{"fault": one.fault, "node": one.node} for one in cleared]})
    else:
        _report_cleared(cleared)


def _word(option: str) -> str:
    from dalsegno.inject.faults import OPTION_NAMES

    return OPTION_NAMES[option]


def _report_cleared(cleared: Sequence[InjectedFault]) -> None:
    for one in cleared:
        out.talk(f"{one.fault} on {one.node} is undone")
    if not cleared:
        out.talk("nothing to undo")


def _open(name: str | None, real: bool) -> CanInject:
    from dalsegno.cluster import find_place, find_slurm, foreign_slurm, open_cluster
    from dalsegno.targets.base import CanInject

    if (slurm := foreign_slurm(name)) is not None:
        _check_there(slurm)
        return _own_jobs(slurm, real)
    place = find_place(name)
    if not isinstance(open_cluster(place), CanInject):  # Dal Segno created the cluster, but on real machines
        return _own_jobs(find_slurm(place.name), real)
    target = open_injectable(place)
    if real:
        raise UsageError(
            f"{place.name} is a local cluster: it has no real nodes",
            hint="leave `--allow-real-nodes` out",
        )
    return target


def _own_jobs(slurm: SlurmHere, real: bool) -> CanInject:
    """Return the user's own jobs as the target for faults. On real nodes, faults need `--allow-real-nodes`."""
    from dalsegno.inject.faults import SAFE

    if real:
        from dalsegno.inject.own_jobs import OwnJobs, enter_with_srun

        return OwnJobs(slurm.client, enter_with_srun(slurm.env))
    raise UsageError(
        "this cluster's nodes are real",
        hint=f"`--allow-real-nodes` allows the faults that affect only your own runs: {SAFE}",
    )


def _check_there(slurm: SlurmHere) -> None:
    """Raise an error if Slurm's commands are installed but find no slurm.conf. A Slurm that does not answer is
    accepted."""
    try:
        slurm.client.version()
    except CommandFailed as fault:
        raise meaning_of(fault) from None


def open_injectable(place: ClusterPlace) -> CanInject:
    """Open a cluster for fault injection. Every injected fault is recorded in the cluster's journal."""
    from dalsegno.cluster import may_change, open_cluster
    from dalsegno.system.files import user_of
    from dalsegno.targets.base import CanInject, require
    from dalsegno.targets.folder import ClusterFolder

    elevate_to_change(place)
    may_change(place)
    target = require(open_cluster(place), CanInject)
    return RecordedInjections(target, ClusterFolder(place.folder).journal, user_of(os.getuid()))


@dataclass(frozen=True)
class RecordedInjections:
    """A target whose injected faults are written to its cluster's journal, so that `events` and `why` show them."""

    target: CanInject
    journal: Path
    who: str

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> Mapping[str, Any]:
        began, facts = time.time(), self.target.inject(fault, node, options)
        code = f" {options.code}" if options.code is not None else ""
        lasting = f" towards {options.peer}" if options.peer is not None else ""
        lasting += f" for {options.for_s:g} s" if options.for_s is not None else ""
        self._record(node, f"fault {fault.name}{code} injected{lasting} by {self.who}", began)
        return facts

    def injected(self) -> Sequence[InjectedFault]:
        return self.target.injected()

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        cleared = self.target.clear(node, fault)
        for each in cleared:
            self._record(node, f"fault {each.fault} undone by {self.who}", time.time())
        return cleared

    def _record(self, node: str, text: str, at: float) -> None:
        """Write an event to the journal. If that fails, for example because the injected fault is a full disk, print a
        warning."""
        import sqlite3

        from dalsegno.recovery.journal.event import EventStage
        from dalsegno.recovery.journal.store import Journal

        try:
            journal = Journal(self.journal)
            try:
                journal.record_request(node, text, at, EventStage.DONE)
            finally:
                journal.close()
        except (DalsegnoError, OSError, sqlite3.Error) as error:
            out.warn(f"this is not in the cluster's journal: {error}")
