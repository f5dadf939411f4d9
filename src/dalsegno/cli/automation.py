"""`dalsegno automation`: have the cluster look after its nodes, or leave them to you."""

from __future__ import annotations

from typing import Any

import click

from dalsegno.cli import out
from dalsegno.cli.asking import ask_controller, controller_of, when
from dalsegno.cli.elevation import elevate_for_cluster
from dalsegno.cli.out import cluster_option, json_option

WORDS = ("pause", "resume", "status")
_MODES = {
    "observe": "automation is {}, and only observes: it says what it would do (`mode: observe` in the cluster file)",
    "off": "automation is {}, and does nothing: nodes are only watched (`mode: off` in the cluster file)",
}


@click.command()
@click.argument("word", type=click.Choice(WORDS), metavar="pause|resume|status")
@cluster_option
@json_option
def command(word: str, name: str | None, json_: bool) -> None:
    """Show, pause or resume automatic recovery: draining, repairing and returning nodes.

    Paused, nothing is begun; what would have been done is told by `dalsegno events`. After `resume`, also what had
    failed too often is tried again, and as many nodes as in an hour may be taken out once more. Only root and the
    cluster's owner may pause and resume.
    """
    if word != "status":
        elevate_for_cluster(name)
    answer = ask_controller(controller_of(name), {"automation": word})
    if json_:
        out.as_json(answer)
        return
    out.data(sentence(answer["automation"], answer["mode"]))
    if nodes := [*answer["out"], *answer["suspected"]]:
        rows = [[node["node"], node["phase"], when(node["since"]), _why(node)] for node in nodes]
        out.table(["NODE", "PHASE", "SINCE", "REASON"], rows)


def sentence(automation: str, mode: str) -> str:
    return _MODES.get(mode, "automation is {}").format(automation)


def _why(node: dict[str, Any]) -> str:
    from dalsegno.recovery.phase import NodePhase

    suspected = NodePhase.told(node["phase"]) is NodePhase.SUSPECTED
    return str(node["note"] or node["reason"] if suspected else node["reason"])
