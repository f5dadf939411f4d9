"""`dalsegno validate`: check a cluster file and report all errors at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import file_argument, json_option
from dalsegno.errors import SpecError

if TYPE_CHECKING:
    from dalsegno.spec.facts import Cluster


@click.command()
@file_argument
@json_option
def command(file: str, json_: bool) -> None:
    """Check the cluster file FILE (default: cluster.yaml) and report all errors. Exits 1 if there are any.

    A file for a target that is not built yet is checked too, with a warning: `plan` and `up` refuse it.
    """
    from dalsegno.spec.load import load_spec
    from dalsegno.spec.resolve import resolve

    try:
        cluster = resolve(load_spec(file))
    except SpecError as error:
        if not json_:
            raise
        out.as_json(_faulty(file, error))
        raise SystemExit(1) from None
    if json_:
        out.as_json({"file": file, "valid": True, "problems": [], "warnings": _warnings(cluster), **_counts(cluster)})
        return
    out.data(_summary(file, cluster))
    for text in _warnings(cluster):
        out.warn(text)


def _faulty(file: str, error: SpecError) -> dict[str, object]:
    problems = [{"what": each.what, "where": each.where, "hint": each.hint} for each in error.problems]
    return {"file": file, "valid": False, "problems": problems}


def _warnings(cluster: Cluster) -> list[str]:
    from dalsegno.spec.unbuilt import UNBUILT_TARGETS

    reason = UNBUILT_TARGETS.get(cluster.target)
    return [f"target `{cluster.target}` is not built yet: {reason}; `plan` and `up` refuse this file"] if reason else []


def _counts(cluster: Cluster) -> dict[str, object]:
    return {
        "name": cluster.name,
        "target": cluster.target,
        "nodes": sum(not node.spare for node in cluster.nodes),
        "spares": sum(node.spare for node in cluster.nodes),
        "partitions": len(cluster.partitions),
        "gpus": sum(node.gpus for node in cluster.nodes if not node.spare),
    }


def _summary(file: str, cluster: Cluster) -> str:
    counts = _counts(cluster)
    spares = f" and {_plural(counts['spares'], 'spare')}" if counts["spares"] else ""
    gpus = f", {_plural(counts['gpus'], 'GPU')}" if counts["gpus"] else ""
    where = f"{cluster.name} on {cluster.target}"
    nodes = f"{_plural(counts['nodes'], 'node')}{spares} in {_plural(counts['partitions'], 'partition')}"
    return f"{file} is valid: {where}, {nodes}{gpus}"


def _plural(count: object, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
