"""`dalsegno init`, `validate`, `schema`: write a starter cluster file, check one, print the JSON schema."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dalsegno.cli import out
from dalsegno.cli.out import file_argument, json_option
from dalsegno.errors import DalsegnoError, SpecError, UsageError
from dalsegno.spec.choices import Needs, TrainingDuration, TrainingPlace, TrainingPurpose

if TYPE_CHECKING:
    from dalsegno.spec.facts import Cluster

_KINDS = (TrainingPlace, TrainingPurpose, TrainingDuration)
PLACES, PURPOSES, DURATIONS = ([each.value for each in kind] for kind in _KINDS)
_QUESTIONS = (
    ("place", "Where are the machines?", PLACES),
    ("purpose", "What is the cluster for?", PURPOSES),
    ("duration", "How long does one training run?", DURATIONS),
)
_CONFIRMATIONS = (
    ("containers", "Do jobs run in containers?"),
    ("spot", "Do you want spot instances?"),
    ("mig", "Are GPUs divided into MIG slices?"),
)

# What to replace in the starter file of a target, because it is an example. The other starters work unchanged.
_EXAMPLES = {
    "ssh": ("ssh.user", "ssh.hosts"),
    "parallelcluster": ("parallelcluster.region", "partitions", "storage"),
    "hyperpod": (
        "hyperpod.region", "hyperpod.execution_role", "hyperpod.bucket", "hyperpod.subnets",
        "hyperpod.security_groups", "hyperpod.ssh_key", "partitions",
    ),
    "oci": ("oci.region", "oci.compartment", "oci.ad", "oci.ssh_key", "oci.template", "partitions"),
}  # fmt: skip


@click.command()
@file_argument
@click.option("--target", default=None, help="local (the default), ssh, parallelcluster, hyperpod, oci or existing.")
@click.option("--on", "place", type=click.Choice(PLACES), help="Where the machines are; chooses the target.")
@click.option("--for", "purpose", type=click.Choice(PURPOSES), help="What the cluster is for; chooses the target.")
@click.option("--duration", type=click.Choice(DURATIONS), help="How long one training runs; chooses the target.")
@click.option("--managed/--self-managed", default=None, help="Whether the provider repairs the machines.")
@click.option("--containers", is_flag=True, help="Jobs run in container images.")
@click.option("--spot", is_flag=True, help="Use spot instances.")
@click.option("--mig", is_flag=True, help="GPUs are divided into MIG slices.")
@click.option("--ask", is_flag=True, help="Ask these questions.")
@click.option("--name", default="demo", show_default=True, help="Name of the cluster.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(file: str, target: str | None, name: str, force: bool, ask: bool, **answers: Any) -> None:
    """Write a commented starter cluster file to FILE (default: cluster.yaml).

    Name the target, or say what you need, and the fitting target is chosen. `dalsegno compare` shows all choices.

    \b
    dalsegno init --on aws --for pretraining --duration weeks
    dalsegno init --ask
    """
    from dalsegno.spec.choices import cautions, fit_starter, recommend
    from dalsegno.spec.load import parse_spec
    from dalsegno.spec.model import starter
    from dalsegno.spec.targets import DEFAULT_TARGET
    from dalsegno.system.files import write_atomic

    path = Path(file)
    if path.is_dir():
        raise DalsegnoError("this is a folder", where=file, hint=f"name a file in it: `{path / 'cluster.yaml'}`")
    if path.exists() and not force:
        raise DalsegnoError("the file already exists", where=file, hint="use `--force` to overwrite it")
    needs = _read_needs(answers, ask)
    if target is not None and any(value is not None for value in (needs.place, needs.purpose, needs.duration)):
        raise UsageError(
            "`--target` names the target, and `--on`, `--for` and `--duration` choose it", hint="give one or the other"
        )
    chosen = recommend(needs) if target is None and (ask or needs != Needs()) else None
    target = target or (chosen.target if chosen else DEFAULT_TARGET)
    text = fit_starter(starter(target, name), needs, target)
    # Raise an error for an invalid name before anything is written.
    if parse_spec(text, file).name != name:
        raise UsageError(f"invalid cluster name `{name}`", hint="use lowercase letters, digits, `-` and `_`")
    write_atomic(path, text)
    for line in chosen.why if chosen else ():
        out.talk(line)
    for line in chosen.cautions if chosen else cautions(needs, target):
        out.warn(line)
    for line in next_steps(target, file):
        out.talk(line)


def next_steps(target: str, file: str) -> list[str]:
    """Return what to do with a starter file: what to replace in it, and the commands for it."""
    argument = "" if file == "cluster.yaml" else f" {shlex.quote(file)}"
    check, plan, up = (f"`dalsegno {command}{argument}`" for command in ("validate", "plan", "up"))
    fields = ", ".join(f"`{field}`" for field in _EXAMPLES.get(target, ()))
    fill_in = [f"put your own values into {fields}"] if fields else []
    if target == "existing":
        adopt = "dalsegno adopt --force" + (f" -o{argument}" if argument else "")
        watch = f"`dalsegno adopt watch{argument}`, which watches the nodes"
        return [
            f"wrote {file}; on a machine of that cluster, `{adopt}` writes it with the real nodes",
            f"next: {check}, then {watch}; `dalsegno run train.py` trains there without this file",
        ]
    if target == "local":
        return [f"wrote {file}; next: {check}, then {up}"]
    shows = "which shows what it creates" if target == "ssh" else "which shows what it creates and what that costs"
    return [f"wrote {file}", *fill_in, f"next: {check}, {plan}, {shows}, then {up}"]


def _read_needs(answers: Mapping[str, Any], ask: bool) -> Needs:
    """Return the needs that the flags name. With `ask`, ask on the terminal for those that no flag names."""
    given = dict(answers)
    if ask:
        for key, text, values in _QUESTIONS:
            if given[key] is None:
                given[key] = click.prompt(text, type=click.Choice(values), err=True)
        if given["managed"] is None and given["place"] == TrainingPlace.AWS.value:
            given["managed"] = click.confirm("Should the provider repair broken machines?", err=True)
        for key, text in _CONFIRMATIONS:
            given[key] = given[key] or click.confirm(text, default=False, err=True)
    return Needs(
        place=TrainingPlace(given["place"]) if given["place"] else None,
        purpose=TrainingPurpose(given["purpose"]) if given["purpose"] else None,
        duration=TrainingDuration(given["duration"]) if given["duration"] else None,
        managed=given["managed"],
        containers=given["containers"],
        spot=given["spot"],
        mig=given["mig"],
    )


@click.command()
@file_argument
@json_option
def validate(file: str, json_: bool) -> None:
    """Check the cluster file FILE (default: cluster.yaml) and report all errors. Exits 1 if there are any."""
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
        out.as_json({"file": file, "valid": True, "problems": [], **_counts(cluster)})
        return
    out.data(_summary(file, cluster))


def _faulty(file: str, error: SpecError) -> dict[str, object]:
    problems = [{"what": each.what, "where": each.where, "hint": each.hint} for each in error.problems]
    return {"file": file, "valid": False, "problems": problems}


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
