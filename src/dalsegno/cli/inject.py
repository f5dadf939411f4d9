"""`dalsegno inject`: break a node or a worker on purpose, and see what happens."""

from __future__ import annotations

import re
from dataclasses import asdict
from difflib import get_close_matches

import click

from dalsegno.cli import out
from dalsegno.cli.options import cluster_option, json_option
from dalsegno.errors import UsageError
from dalsegno.targets.base import CanBreak

FAULTS = {
    "power-off": "The node is gone from one moment to the next, without a word; `dalsegno up` boots it again.",
    "net-cut": "All its packets are dropped while its link stays up; until --clear or `up`, or for --for.",
    "worker-kill": "One worker of a run on the node is killed: the lowest rank there, or --rank.",
}
UNITS_S = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "h": 3600.0}


@click.command()
@click.argument("fault", required=False)
@click.argument("node", required=False)
@cluster_option
@click.option("--for", "for_", metavar="TIME", help="net-cut: mend it after 5s, 300ms, 2m … Default: not by itself.")
@click.option("--clear", is_flag=True, help="net-cut: mend it now.")
@click.option("--run", metavar="RUN", help="worker-kill: a worker of this run. Default: of any there.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="R", help="worker-kill: this rank. Default: the lowest there."
)
@click.option("--list", "list_", is_flag=True, help="List the faults.")
@json_option
def command(
    fault: str | None,
    node: str | None,
    name: str | None,
    for_: str | None,
    clear: bool,
    run: str | None,
    rank: int | None,
    list_: bool,
    json_: bool,
) -> None:
    """Break NODE with a FAULT: power-off, net-cut or worker-kill. `--list` tells what each does.

    \b
    dalsegno inject power-off gpu-2
    dalsegno inject net-cut gpu-2 --for 5s
    dalsegno inject worker-kill gpu-1 --rank 3
    """
    if list_:
        _list(json_)
        return
    fault, node = _named(fault, node)
    for_s = parse_time(for_) if for_ is not None else None
    _check_options(fault, {"--for": for_, "--clear": clear or None, "--run": run, "--rank": rank})
    if for_s is not None and clear:
        raise UsageError("`--for` and `--clear` do not go together", hint="leave one out: `--clear` mends it now")
    told, facts = _break(_open(name), fault, node, for_s, clear, run, rank)
    if json_:
        out.as_json({"fault": fault, "node": node, **facts})
    else:
        out.talk(told)


def _list(json_: bool) -> None:
    if json_:
        out.as_json([{"name": name, "what": what} for name, what in FAULTS.items()])
    else:
        out.table(["FAULT", "WHAT HAPPENS"], [[name, what] for name, what in FAULTS.items()])


def _named(fault: str | None, node: str | None) -> tuple[str, str]:
    if fault is None:
        raise UsageError("which fault?", hint="`dalsegno inject --list` shows them")
    if fault not in FAULTS:
        close = get_close_matches(fault, FAULTS, 1)
        raise UsageError(
            f"there is no fault `{fault}`",
            hint=f"did you mean `{close[0]}`?" if close else f"one of {', '.join(FAULTS)}",
        )
    if node is None:
        raise UsageError(f"`{fault}` of which node?", hint="`dalsegno status` shows the nodes")
    return fault, node


OPTIONS: dict[str, tuple[str, ...]] = {
    "power-off": (),
    "net-cut": ("--for", "--clear"),
    "worker-kill": ("--run", "--rank"),
}


def _check_options(fault: str, given: dict[str, object]) -> None:
    """An option that does nothing is a misunderstanding: better told than passed over."""
    for option, value in given.items():
        if value is not None and option not in OPTIONS[fault]:
            whose = next(name for name, options in OPTIONS.items() if option in options)
            raise UsageError(f"`{option}` says nothing to `{fault}`", hint=f"leave it out; it is for `{whose}`")


def parse_time(text: str) -> float:
    """Seconds: `5`, `5s`, `0.3s`, `300ms`, `2m`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", text.strip())
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if seconds <= 0:
        raise UsageError(f"`{text}` is no time", hint="such as `5s`, `300ms` or `2m`")
    return seconds


def _open(name: str | None) -> CanBreak:
    from dalsegno.cluster import find_place, may_change, open_local

    place = find_place(name)
    may_change(place)
    target = open_local(place)
    if not isinstance(target, CanBreak):
        raise UsageError(
            f"nodes of {place.name} cannot be broken on purpose",
            hint="name a cluster with `target: local`: `dalsegno ls` shows them",
        )
    return target


def _break(
    target: CanBreak, fault: str, node: str, for_s: float | None, clear: bool, run: str | None, rank: int | None
) -> tuple[str, dict[str, object]]:
    """Do it; what was done, in words and as facts."""
    if fault == "power-off":
        target.power_off(node)
        return f"{node} is off; `dalsegno up` boots it again", {}
    if fault == "worker-kill":
        worker = target.kill_worker(node, run, rank)
        return f"killed rank {worker.rank} on {node} (process {worker.pid})", asdict(worker)
    if clear:
        target.mend_network(node)
        return f"{node} is on the network", {"cleared": True}
    target.cut_network(node, for_s)
    until = f"for {for_s:g} s" if for_s is not None else f"until `dalsegno inject net-cut {node} --clear`, or `up`"
    return f"{node} is cut off {until}", {"for_s": for_s}
