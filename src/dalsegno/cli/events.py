"""`dalsegno events`: node events and recovery actions."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.asking import ask_controller, controller_of, when
from dalsegno.cli.out import cluster_option

if TYPE_CHECKING:
    from pathlib import Path

LAST = 50
EVERY_S = 0.5


@click.command()
@cluster_option
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("--node", "-w", metavar="NODE", help="Only of this node.")
@click.option("--all", "-a", "everything", is_flag=True, help=f"From the beginning, not only the last {LAST}.")
@click.option("--json", "json_", is_flag=True, help="Print JSON, one event a line.")
def command(name: str | None, follow: bool, node: str | None, everything: bool, json_: bool) -> None:
    """Show node events and recovery actions, in order.

    \b
    dalsegno events -f
    dalsegno events --node gpu-2 --json
    """
    socket = controller_of(name)
    if node:
        ask_controller(socket, {"node": node})  # one that is not known is refused
    since = 0 if everything or node else -LAST
    while True:
        since = _show_new(socket, since, node, json_)
        if not follow:
            return
        time.sleep(EVERY_S)


def _show_new(socket: Path, since: int, node: str | None, json_: bool) -> int:
    """All that is there; returns from where to go on."""
    while events := ask_controller(socket, {"events": since})["events"]:
        width = max(len(event["node"]) for event in events)
        for event in events:
            if node in (None, event["node"]):
                out.data(json.dumps(event) if json_ else line(event, width))
        since = events[-1]["id"]
    return max(since, 0)


def line(event: dict[str, Any], width: int = 0) -> str:
    """`width`: of the nodes' names, so that all texts begin below each other."""
    kind = "" if event["node"] else f"{event['kind']} "  # of a node the text says it all
    return f"{when(event['at'])}  {(event['node'] or '-').ljust(width)}  {kind}{event['text']}"
