"""`dalsegno automation`: pause or resume automatic recovery."""

from __future__ import annotations

from typing import Any

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import ask_controller, find_controller, format_time
from dalsegno.cli.elevation import elevate_for_cluster
from dalsegno.cli.out import cluster_option, json_option

ACTIONS = ("pause", "resume", "status")
_MODES = {
    "observe": "automation is {} and only reports what it would do (`mode: observe` in the cluster file)",
    "off": "automation is {} and only watches nodes (`mode: off` in the cluster file)",
}


@click.command()
@click.argument("action", type=click.Choice(ACTIONS), metavar="pause|resume|status")
@cluster_option
@json_option
def command(action: str, name: str | None, json_: bool) -> None:
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
    out.data(describe_mode(answer["automation"], answer["mode"]))
    if nodes := [*answer["out"], *answer["suspected"]]:
        rows = [[node["node"], node["phase"], format_time(node["since"]), _why(node)] for node in nodes]
        out.table(["NODE", "PHASE", "SINCE", "REASON"], rows)


def describe_mode(automation: str, mode: str) -> str:
    return _MODES.get(mode, "automation is {}").format(automation)


def _why(node: dict[str, Any]) -> str:
    from dalsegno.recovery.phase import NodePhase

    suspected = NodePhase.parse(node["phase"]) is NodePhase.SUSPECTED
    return str(node["note"] or node["reason"] if suspected else node["reason"])
