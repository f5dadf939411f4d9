"""`dalsegno automation`: have the cluster look after its nodes, or leave them to you."""

from __future__ import annotations

import click

from dalsegno.cli import out
from dalsegno.cli.asking import ask_controller, controller_of, when
from dalsegno.cli.options import cluster_option, json_option

WORDS = ("pause", "resume", "status")


@click.command()
@click.argument("word", type=click.Choice(WORDS), metavar="pause|resume|status")
@cluster_option
@json_option
def command(word: str, name: str | None, json_: bool) -> None:
    """Whether nodes are drained, mended and returned without you.

    Paused, nothing is begun; what would have been done is told by `dalsegno events`. After `resume`, also what had
    failed too often is tried again, and as many nodes as in an hour may be taken out once more. Only root and the
    cluster's owner may pause and resume.
    """
    answer = ask_controller(controller_of(name), {"automation": word})
    if json_:
        out.as_json(answer)
        return
    out.data(f"automation is {answer['automation']}")
    if answer["out"]:
        rows = [[node["node"], node["phase"], when(node["since"]), node["reason"]] for node in answer["out"]]
        out.table(["NODE", "PHASE", "SINCE", "REASON"], rows)
