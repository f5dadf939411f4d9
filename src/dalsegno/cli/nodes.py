"""`dalsegno nodes`: how the cluster's nodes are, as its controller sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.asking import ask_controller, controller_of, when
from dalsegno.cli.events import line
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.slurm.facts import NodeInfo

LEFT_ALONE = "left alone"  # of which the controller says "in service": as far as it is concerned, it is
SLURM_S = 3.0
SHOWN = 10  # of what its checks found


@click.group(invoke_without_command=True)
@cluster_option
@json_option
@click.pass_context
def command(context: click.Context, name: str | None, json_: bool) -> None:
    """Show the cluster's nodes as its controller sees them. `nodes show NODE` shows one in detail.

    \b
    PHASE  in service, suspected, drained, down, repairing, validating, given up; spare, lent
           left alone: somebody else keeps it out of service
    """
    from dalsegno.recovery.reason import slurm_users_of

    if context.invoked_subcommand:
        return
    told = ask_controller(controller_of(name), {"nodes": True})
    others = taken_by_others(_seen_by_slurm(name), slurm_users_of(told)) if told["nodes"] else {}
    nodes = [as_it_is(node, others) for node in told["nodes"]]
    if json_:
        out.as_json(nodes)
        return
    if not nodes:
        out.talk("the controller has not seen a node yet")
        return
    out.table(["NODE", "PHASE", "SINCE", "VALIDATED", "REASON"], [_row(node) for node in sorted(nodes, key=_by_name)])


def _seen_by_slurm(name: str | None) -> list[NodeInfo]:
    """Nothing where Slurm does not answer: then what the controller says is all there is."""
    from dalsegno.cluster import find_slurm, silence

    try:
        slurm = find_slurm(name)
        return slurm.client_within(SLURM_S).nodes() if silence(slurm) is None else []
    except DalsegnoError:
        return []


def taken_by_others(nodes: Iterable[NodeInfo], slurm_users: Collection[str]) -> dict[str, str]:
    """Nodes that neither we nor Slurm itself took out of service: who did, and what for."""
    from dalsegno.recovery.reason import Owner, owner

    return {node.name: _by_whom(node) for node in nodes if owner(node, slurm_users) is Owner.SOMEONE}


def _by_whom(node: NodeInfo) -> str:
    state = "drained" if node.draining else node.state_text.lower() or node.state.value.lower()
    by = f" by {node.reason_user}" if node.reason_user else ""
    return f"{state}{by}: {node.reason or 'no reason given'}"


def as_it_is(told: dict[str, Any], others: dict[str, str]) -> dict[str, Any]:
    """What the controller says of a node, unless somebody else keeps from service what it would have there."""
    from dalsegno.recovery.phase import NodePhase

    ours = NodePhase.told(told["phase"]) not in (NodePhase.IN_SERVICE, NodePhase.SUSPECTED)
    if ours or told["node"] not in others:
        return told
    reason = "; ".join(filter(None, (others[told["node"]], told["reason"] or told["note"])))
    return {**told, "phase": LEFT_ALONE, "reason": reason}


def _by_name(node: dict[str, Any]) -> tuple[str, int]:
    stem = node["node"].rstrip("0123456789")
    return stem, int(node["node"][len(stem) :] or 0)


def _excused(node: dict[str, Any]) -> str:
    excused = ", ".join(node.get("excused", ()))
    return f"{excused}: left to whoever has returned it" if excused else ""


def _row(node: dict[str, Any]) -> list[str]:
    reason = node["reason"] or _excused(node) or node["note"]
    return [node["node"], node["phase"], when(node["since"]), when(node["validated_at"]), reason]


@command.command()
@click.argument("node")
@cluster_option
@json_option
def show(node: str, name: str | None, json_: bool) -> None:
    """Its phase, its GPUs with those that were sent away, and its history."""
    from dalsegno.recovery.reason import slurm_users_of

    told = ask_controller(controller_of(name), {"node": node})
    told["node"] = as_it_is(told["node"], taken_by_others(_seen_by_slurm(name), slurm_users_of(told)))
    if json_:
        out.as_json(told)
        return
    _show(told)


@command.command()
@click.argument("subject", metavar="NODE|GPU")
@cluster_option
@json_option
def forgive(subject: str, name: str | None, json_: bool) -> None:
    """Let a GPU that was sent away come back: one by its UUID, or all that NODE had.

    A machine with a GPU that was sent away is refused. Only root and the cluster's owner may forgive.

    \b
    dalsegno nodes forgive GPU-5d2e1f0a-9b6c-4a1e-8f57-0a3c2b1d4e6f
    """
    answer = ask_controller(controller_of(name), {"forgive": subject})
    if json_:
        out.as_json(answer)
        return
    for gpu in answer["forgiven"]:
        where = f" (last seen in {gpu['node']})" if gpu["node"] else ""
        out.talk(f"GPU {gpu['uuid']}{where} may come back")


def _show(told: dict[str, Any]) -> None:
    node = told["node"]
    out.data(f"{node['node']} is {node['phase']}" + (f" since {when(node['since'])}" if node["since"] else ""))
    for text in filter(None, (node["reason"], node["note"])):
        out.data(f"  {text}")
    if node["tried"]:
        out.data(f"  tried: {', '.join(node['tried'])}")
    if told["gpus"]:
        out.data("")
        out.table(["GPU", "UUID", "SERIAL", "MODEL", "SINCE", "SENT AWAY"], [_gpu(gpu) for gpu in told["gpus"]])
    if told["checks"]:
        out.data("")
        rows = [[when(each["at"]), each["check"], each["verdict"], each["text"]] for each in told["checks"][-SHOWN:]]
        out.table(["WHEN", "CHECK", "VERDICT", "FOUND"], rows)
    if told["events"]:
        out.data("")
        for event in told["events"]:
            out.data(line(event))


def _gpu(gpu: dict[str, Any]) -> list[str]:
    plain = [gpu["uuid"], gpu["serial"] or "-", gpu["model"] or "-"]
    return [str(gpu["slot"]), *plain, when(gpu["since"]), when(gpu["sent_away_at"])]
