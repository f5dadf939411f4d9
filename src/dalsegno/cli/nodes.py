"""`dalsegno nodes`: show the cluster's nodes as its controller sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import ask_controller, find_controller, format_time
from dalsegno.cli.events import line
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from dalsegno.slurm.facts import NodeInfo

LEFT_ALONE = "left alone"  # the controller itself reports such a node as "in service"
SLURM_S = 3.0
SHOWN = 10  # check results


@click.group(invoke_without_command=True)
@cluster_option
@json_option
@click.pass_context
def command(context: click.Context, name: str | None, json_: bool) -> None:
    """Show the cluster's nodes as its controller sees them. `nodes show NODE` shows one in detail.

    \b
    PHASE  in service, suspected, drained, down, repairing, validating, given up; spare, lent
           left alone: an administrator took it out of service
    """
    from dalsegno.recovery.reason import slurm_users_of

    if context.invoked_subcommand:
        return
    answer = ask_controller(find_controller(name), {"nodes": True})
    others = find_other_drains(_slurm_nodes(name), slurm_users_of(answer)) if answer["nodes"] else {}
    nodes = [with_other_drains(node, others) for node in answer["nodes"]]
    if json_:
        out.as_json(nodes)
        return
    if not nodes:
        out.talk("the controller has not seen a node yet")
        return
    out.table(["NODE", "PHASE", "SINCE", "VALIDATED", "REASON"], [_row(node) for node in sorted(nodes, key=_sort_key)])


def _slurm_nodes(name: str | None) -> list[NodeInfo]:
    """Return Slurm's nodes; [] if Slurm does not answer, so that the controller's view is still shown."""
    from dalsegno.cluster import find_slurm, silence

    try:
        slurm = find_slurm(name)
        return slurm.client_within(SLURM_S).nodes() if silence(slurm) is None else []
    except DalsegnoError:
        return []


def find_other_drains(nodes: Iterable[NodeInfo], slurm_users: Collection[str]) -> dict[str, str]:
    """Return the nodes that neither we nor Slurm took out of service, with who did it and why."""
    from dalsegno.recovery.reason import Owner, owner

    return {node.name: _describe_drain(node) for node in nodes if owner(node, slurm_users) is Owner.SOMEONE}


def _describe_drain(node: NodeInfo) -> str:
    state = "drained" if node.draining else node.state_text.lower() or node.state.value.lower()
    by = f" by {node.reason_user}" if node.reason_user else ""
    return f"{state}{by}: {node.reason or 'no reason given'}"


def with_other_drains(node: dict[str, Any], others: dict[str, str]) -> dict[str, Any]:
    """Return the controller's view of a node, marked as left alone if somebody else took it out of service."""
    from dalsegno.recovery.phase import NodePhase

    ours = NodePhase.parse(node["phase"]) not in (NodePhase.IN_SERVICE, NodePhase.SUSPECTED)
    if ours or node["node"] not in others:
        return node
    reason = "; ".join(filter(None, (others[node["node"]], node["reason"] or node["note"])))
    return {**node, "phase": LEFT_ALONE, "reason": reason}


def _sort_key(node: dict[str, Any]) -> tuple[str, int]:
    stem = node["node"].rstrip("0123456789")
    return stem, int(node["node"][len(stem) :] or 0)


def _describe_ignored(node: dict[str, Any]) -> str:
    excused = ", ".join(node.get("excused", ()))
    return f"{excused}: ignored, because an administrator returned the node" if excused else ""


def _row(node: dict[str, Any]) -> list[str]:
    reason = node["reason"] or _describe_ignored(node) or node["note"]
    return [node["node"], node["phase"], format_time(node["since"]), format_time(node["validated_at"]), reason]


@command.command()
@click.argument("node")
@cluster_option
@json_option
def show(node: str, name: str | None, json_: bool) -> None:
    """Show the phase, the GPUs (including replaced ones), the check results and the history of NODE."""
    from dalsegno.recovery.reason import slurm_users_of

    answer = ask_controller(find_controller(name), {"node": node})
    others = find_other_drains(_slurm_nodes(name), slurm_users_of(answer))
    answer["node"] = with_other_drains(answer["node"], others)
    if json_:
        out.as_json(answer)
        return
    _show(answer)


@command.command()
@click.argument("subject", metavar="NODE|GPU")
@cluster_option
@json_option
def forgive(subject: str, name: str | None, json_: bool) -> None:
    """Allow a replaced GPU to be used again: one by its UUID, or all that were in NODE.

    Until then, a machine with such a GPU is not put into service. Only root and the cluster's owner may forgive.

    \b
    dalsegno nodes forgive GPU-5d2e1f0a-9b6c-4a1e-8f57-0a3c2b1d4e6f
    """
    answer = ask_controller(find_controller(name), {"forgive": subject})
    if json_:
        out.as_json(answer)
        return
    for gpu in answer["forgiven"]:
        where = f" (last seen in {gpu['node']})" if gpu["node"] else ""
        out.talk(f"GPU {gpu['uuid']}{where} may be used again")


def _show(answer: dict[str, Any]) -> None:
    node = answer["node"]
    out.data(f"{node['node']} is {node['phase']}" + (f" since {format_time(node['since'])}" if node["since"] else ""))
    for text in filter(None, (node["reason"], node["note"])):
        out.data(f"  {text}")
    if node["tried"]:
        out.data(f"  tried: {', '.join(node['tried'])}")
    if answer["gpus"]:
        out.data("")
        out.table(["GPU", "UUID", "SERIAL", "MODEL", "SINCE", "REPLACED"], [_gpu(gpu) for gpu in answer["gpus"]])
    if answer["checks"]:
        out.data("")
        rows = [
            [format_time(each["at"]), each["check"], each["verdict"], each["text"]]
            for each in answer["checks"][-SHOWN:]
        ]
        out.table(["WHEN", "CHECK", "VERDICT", "FOUND"], rows)
    if answer["events"]:
        out.data("")
        for event in answer["events"]:
            out.data(line(event))


def _gpu(gpu: dict[str, Any]) -> list[str]:
    plain = [gpu["uuid"], gpu["serial"] or "-", gpu["model"] or "-"]
    return [str(gpu["slot"]), *plain, format_time(gpu["since"]), format_time(gpu["sent_away_at"])]
