"""`dalsegno events`: node events and recovery actions."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import ask_controller, find_controller, format_time
from dalsegno.cli.out import cluster_option

if TYPE_CHECKING:
    from pathlib import Path

LAST = 50
EVERY_S = 0.5


@click.command()
@cluster_option
@click.option("--follow", "-f", is_flag=True, help="Keep printing new events until Ctrl-C.")
@click.option("--node", "-w", metavar="NODE", help="Only events of this node.")
@click.option("--all", "-a", "everything", is_flag=True, help=f"All events, not only the last {LAST}.")
@click.option("--json", "json_", is_flag=True, help="Print JSON, one event per line.")
def command(name: str | None, follow: bool, node: str | None, everything: bool, json_: bool) -> None:
    """Show node events and recovery actions, oldest first.

    \b
    dalsegno events -f
    dalsegno events --node gpu-2 --json
    """
    socket = find_controller(name)
    if node:
        ask_controller(socket, {"node": node})  # the controller refuses an unknown node
    since = 0 if everything or node else -LAST
    while True:
        since = _show_new(socket, since, node, json_)
        if not follow:
            return
        time.sleep(EVERY_S)


def _show_new(socket: Path, since: int, node: str | None, json_: bool) -> int:
    """Print the events after `since` and return the id of the last one."""
    while events := ask_controller(socket, {"events": since})["events"]:
        width = max(len(event["node"]) for event in events)
        for event in events:
            if node in (None, event["node"]):
                out.data(json.dumps(event) if json_ else line(event, width))
        since = events[-1]["id"]
    return max(since, 0)


def line(event: dict[str, Any], width: int = 0) -> str:
    """Return an event as one line, with the node's name padded to `width`."""
    kind = "" if event["node"] else f"{event['kind']} "  # the text of a node's event says its kind already
    return f"{format_time(event['at'])}  {(event['node'] or '-').ljust(width)}  {kind}{event['text']}"
