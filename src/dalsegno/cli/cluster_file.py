"""`dalsegno init`, `validate`, `schema`: write a starter cluster file, check one, print the JSON schema."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import file_argument, json_option
from dalsegno.errors import DalsegnoError, SpecError, UsageError

if TYPE_CHECKING:
    from dalsegno.spec.facts import Cluster


@click.command()
@file_argument
@click.option(
    "--target", default="local", show_default=True, help="local, ssh, parallelcluster, hyperpod, oci or existing."
)
@click.option("--name", default="demo", show_default=True, help="Name of the cluster.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(file: str, target: str, name: str, force: bool) -> None:
    """Write a commented starter cluster file to FILE (default: cluster.yaml)."""
    from dalsegno.spec.load import parse_spec
    from dalsegno.spec.model import starter
    from dalsegno.spec.unbuilt import UNBUILT_TARGETS
    from dalsegno.system.files import write_atomic

    path = Path(file)
    if path.is_dir():
        raise DalsegnoError("this is a folder", where=file, hint=f"name a file in it: `{path / 'cluster.yaml'}`")
    if path.exists() and not force:
        raise DalsegnoError("the file already exists", where=file, hint="use `--force` to overwrite it")
    text = starter(target, name)
    # Raise for an invalid name before anything is written.
    if parse_spec(text, file).name != name:
        raise UsageError(f"invalid cluster name `{name}`", hint="use lowercase letters, digits, `-` and `_`")
    write_atomic(path, text)
    argument = "" if file == "cluster.yaml" else f" {shlex.quote(file)}"
    then = f" (target `{target}` is not built yet)" if target in UNBUILT_TARGETS else f", then `dalsegno up{argument}`"
    out.talk(f"wrote {file}; next: `dalsegno validate{argument}`{then}")


@click.command()
@file_argument
@json_option
def validate(file: str, json_: bool) -> None:
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


@click.command()
def schema() -> None:
    """Print the JSON schema of the cluster file, for editors.

    \b
    For the YAML language server, make this the first line of the cluster file:
    "# yaml-language-server: $schema=cluster.schema.json".
    """
    from dalsegno.spec.model import json_schema

    out.as_json(json_schema())
