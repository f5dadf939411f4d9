"""`dalsegno nodes`, `events`, `automation`: nodes, their events and their recovery, as the controller knows them."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import ask_controller, find_controller, format_time, slurm_failure
from dalsegno.cli.elevation import elevate_for_cluster
from dalsegno.cli.out import cluster_option, json_option
from dalsegno.errors import CommandFailed, DalsegnoError

if TYPE_CHECKING:
    from pathlib import Path

    from dalsegno.slurm.facts import NodeInfo
    from dalsegno.targets.machines import CanManageMachines, InstanceAction

LEFT_ALONE = "left alone"  # shown in place of the controller's "in service" or "suspected"
SLURM_S = 3.0
SHOWN_CHECKS = 10
LAST_EVENTS = 50
EVENTS_EVERY_S = 0.5
ACTIONS = ("pause", "resume", "status")
_MODES = {
    "observe": "automation is {} and only reports what it would do (`mode: observe` in the cluster file)",
    "off": "automation is {} and only watches nodes (`mode: off` in the cluster file)",
}


@click.group(invoke_without_command=True)
@cluster_option
@json_option
@click.pass_context
def command(context: click.Context, name: str | None, json_: bool) -> None:
    """Show the cluster's nodes as its controller sees them. `nodes show NODE` shows one in detail.

    On a platform that manages machines by itself, such as HyperPod, the table has the platform's states.

    \b
    PHASE  in service, suspected, drained, down, repairing, validating, needs admin; spare, lent
           left alone: an administrator or the platform took it out of service
    """
    from dalsegno.recovery.decisions.reason import slurm_users_of

    if context.invoked_subcommand:
        return
    if (platform := _find_platform(name)) is not None:
        _show_machines(platform, json_)
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


def _find_platform(name: str | None) -> CanManageMachines | None:
    """Return the target if its platform manages the machines; None for any other target."""
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.targets.machines import CanManageMachines

    try:
        target = open_cluster(find_place(name))
    except DalsegnoError:
        return None  # there is no cluster, or Dal Segno did not create it; the command that was called reports that
    return target if isinstance(target, CanManageMachines) else None


def _show_machines(platform: CanManageMachines, json_: bool) -> None:
    from dalsegno.spec.facts import facts_to_json

    with out.progress() as say:
        say("asking the platform and Slurm")
        machines = platform.machines()
    if json_:
        out.as_json([facts_to_json(each) for each in machines])
        return
    rows = [
        [each.name, each.node or "-", each.id, each.instance, each.state, each.slurm_state or "-", each.detail]
        for each in machines
    ]
    out.table(["NAME", "NODE", "ID", "INSTANCE", "STATE", "SLURM", "DETAIL"], rows)


@command.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--api", is_flag=True, help="Use the platform's API, not Slurm: for nodes that Slurm does not know.")
@cluster_option
def replace(nodes: tuple[str, ...], api: bool, name: str | None) -> None:
    """Let the platform replace NODEs with new machines. Jobs on them end, and their local files are lost."""
    from dalsegno.targets.machines import InstanceAction

    _act(InstanceAction.REPLACE, nodes, api, name)
    out.talk("the platform replaces them in 20 to 30 minutes; `dalsegno nodes` shows the progress")


@command.command()
@click.argument("nodes", nargs=-1, required=True, metavar="NODE...")
@click.option("--api", is_flag=True, help="Use the platform's API, not Slurm: for nodes that Slurm does not know.")
@cluster_option
def reboot(nodes: tuple[str, ...], api: bool, name: str | None) -> None:
    """Let the platform reboot NODEs. Jobs on them end."""
    from dalsegno.targets.machines import InstanceAction

    _act(InstanceAction.REBOOT, nodes, api, name)
    out.talk("the platform reboots them; `dalsegno nodes` shows the progress")


def _act(action: InstanceAction, nodes: tuple[str, ...], api: bool, name: str | None) -> None:
    platform = _find_platform(name)
    if platform is None:
        find_controller(name)  # says so if there is no cluster
        raise DalsegnoError(
            f"this cluster has no platform that could {action.value} machines",
            hint="its controller repairs nodes: `dalsegno events` shows what it does",
        )
    platform.act_on_machines(action, nodes, through_api=api)


@command.command()
@click.option("--partition", "-p", default="", help="Only the nodes of this partition; by default, all in service.")
@click.option("--slots", is_flag=True, help="Add `slots=N` for Open MPI: the GPUs of a node, or its CPUs without GPUs.")
@click.option("--rdma", is_flag=True, help="Write the names of OCI's RDMA network, as in its own hostfile.rdma.")
@cluster_option
@json_option
def hostfile(partition: str, slots: bool, rdma: bool, name: str | None, json_: bool) -> None:
    """Print a host file for mpirun: the name of a node in each line.

    \b
    dalsegno nodes hostfile > hosts           in a job: the nodes of the job
    dalsegno nodes hostfile -p train --slots  elsewhere: the nodes in service
    """
    import os

    from dalsegno.cluster import find_slurm
    from dalsegno.slurm.hostfile import RDMA_SUFFIX, STACK_FOLDER, lines_of_job, lines_of_nodes, render_hostfile

    if rdma and not os.path.isdir(STACK_FOLDER):
        raise DalsegnoError(
            "only nodes of OCI's HPC stack have names in an RDMA network",
            hint="leave out --rdma; NCCL and MPI find RDMA cards without such names",
        )
    lines = None if partition or name else lines_of_job(os.environ)
    if lines is None:
        try:
            lines = lines_of_nodes(find_slurm(name).client.nodes(), partition)
        except CommandFailed as fault:
            raise slurm_failure(fault) from None
    suffix = RDMA_SUFFIX if rdma else ""
    if json_:
        out.as_json([{"name": f"{line.name}{suffix}", "slots": line.slots} for line in lines])
    else:
        out.data(render_hostfile(lines, slots=slots, suffix=suffix).rstrip("\n"))


def _slurm_nodes(name: str | None) -> list[NodeInfo]:
    """Return Slurm's nodes; [] if Slurm does not answer: the controller's view is shown anyway."""
    from dalsegno.cluster import find_slurm, silence

    try:
        slurm = find_slurm(name)
        return slurm.client_within(SLURM_S).nodes() if silence(slurm) is None else []
    except DalsegnoError:
        return []


def find_other_drains(nodes: Iterable[NodeInfo], slurm_users: Collection[str]) -> dict[str, str]:
    """Return the nodes that an administrator or the platform took out of service, each with state, user and reason."""
    from dalsegno.recovery.decisions.reason import Owner, find_owner

    others = (Owner.SOMEONE, Owner.PLATFORM)
    return {node.name: _describe_drain(node) for node in nodes if find_owner(node, slurm_users) in others}


def _describe_drain(node: NodeInfo) -> str:
    state = "drained" if node.draining else node.state_text.lower() or node.state.value.lower()
    by = f" by {node.reason_user}" if node.reason_user else ""
    return f"{state}{by}: {node.reason or 'no reason given'}"


def with_other_drains(node: dict[str, Any], others: dict[str, str]) -> dict[str, Any]:
    """Return the controller's view of a node. Mark a node in `others` as left alone, unless the controller itself has
    taken it out of service."""
    from dalsegno.recovery.decisions.phase import NodePhase

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


@command.command(short_help="Show the phase, GPUs, checks and history of NODE.")
@click.argument("node")
@cluster_option
@json_option
def show(node: str, name: str | None, json_: bool) -> None:
    """Show the phase, the GPUs (including replaced ones), the check results and the history of NODE."""
    from dalsegno.recovery.decisions.reason import slurm_users_of

    answer = ask_controller(find_controller(name), {"node": node})
    others = find_other_drains(_slurm_nodes(name), slurm_users_of(answer))
    answer["node"] = with_other_drains(answer["node"], others)
    if json_:
        out.as_json(answer)
        return
    _show(answer)


@command.command(short_help="Allow replaced GPUs to be used again.")
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
            for each in answer["checks"][-SHOWN_CHECKS:]
        ]
        out.table(["WHEN", "CHECK", "VERDICT", "FOUND"], rows)
    if answer["events"]:
        out.data("")
        for event in answer["events"]:
            out.data(describe_event(event))


def _gpu(gpu: dict[str, Any]) -> list[str]:
    plain = [gpu["uuid"], gpu["serial"] or "-", gpu["model"] or "-"]
    return [str(gpu["slot"]), *plain, format_time(gpu["since"]), format_time(gpu["sent_away_at"])]


@click.command()
@cluster_option
@click.option("--follow", "-f", is_flag=True, help="Keep printing new events until Ctrl-C.")
@click.option("--node", "-w", metavar="NODE", help="Only events of this node.")
@click.option("--all", "-a", "everything", is_flag=True, help=f"All events, not only the last {LAST_EVENTS}.")
@click.option("--json", "json_", is_flag=True, help="Print JSON, one event per line.")
def events(name: str | None, follow: bool, node: str | None, everything: bool, json_: bool) -> None:
    """Show node events and recovery actions, oldest first.

    \b
    dalsegno events -f
    dalsegno events --node gpu-2 --json
    """
    socket = find_controller(name)
    if node:
        ask_controller(socket, {"node": node})  # the controller refuses an unknown node
    since = 0 if everything or node else -LAST_EVENTS
    while True:
        since = _show_new(socket, since, node, json_)
        if not follow:
            return
        time.sleep(EVENTS_EVERY_S)


def _show_new(socket: Path, since: int, node: str | None, json_: bool) -> int:
    """Print the events after `since` and return the id of the last one."""
    while found := ask_controller(socket, {"events": since})["events"]:
        width = max(len(event["node"]) for event in found)
        for event in found:
            if node in (None, event["node"]):
                out.data(json.dumps(event) if json_ else describe_event(event, width))
        since = found[-1]["id"]
    return max(since, 0)


def describe_event(event: dict[str, Any], width: int = 0) -> str:
    """Return an event as one line, with the node's name padded to `width`."""
    kind = "" if event["node"] else f"{event['kind']} "  # the text of a node's event already contains its kind
    return f"{format_time(event['at'])}  {(event['node'] or '-').ljust(width)}  {kind}{event['text']}"


@click.command()
@click.argument("action", type=click.Choice(ACTIONS), metavar="pause|resume|status")
@cluster_option
@json_option
def automation(action: str, name: str | None, json_: bool) -> None:
    """Show, pause or resume automatic recovery: draining, repairing and returning nodes.

    While paused, no action is started; `dalsegno events` shows what would have been done. `resume` also retries
    repairs that had failed too often, and resets the hourly limit on nodes taken out of service. Only root and
    the cluster's owner may pause and resume.
    """
    if action != "status":
        elevate_for_cluster(name)
    answer = ask_controller(find_controller(name), {"automation": action})
    if json_:
        out.as_json(answer)
        return
    out.data(describe_mode(answer["automation"], answer["mode"], answer.get("armed", ())))
    if nodes := [*answer["out"], *answer["suspected"]]:
        rows = [[node["node"], node["phase"], format_time(node["since"]), _why(node)] for node in nodes]
        out.table(["NODE", "PHASE", "SINCE", "REASON"], rows)


def describe_mode(automation: str, mode: str, armed: Collection[str] = ()) -> str:
    text = _MODES.get(mode, "automation is {}").format(automation)
    return f"{text}; it acts in {', '.join(armed)}, which {'is' if len(armed) == 1 else 'are'} armed" if armed else text


def _why(node: dict[str, Any]) -> str:
    from dalsegno.recovery.decisions.phase import NodePhase

    suspected = NodePhase.parse(node["phase"]) is NodePhase.SUSPECTED
    return str(node["note"] or node["reason"] if suspected else node["reason"])
