"""`dalsegno compare`: the places to train and their traits, Kubernetes-based ones included."""

from __future__ import annotations

import textwrap

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.errors import UsageError

LABELS = {
    "orchestrator": "orchestrator",
    "management": "managed by",
    "recovery_alone": "recovery without us",
    "recovery_with_us": "recovery with us",
    "health": "health checks",
    "spot": "spot",
    "price": "price",
    "not_for": "not for",
}
COLUMNS = 100


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def command(names: tuple[str, ...], json_: bool) -> None:
    """Compare the places to train: who manages them, how they recover, and what they cost. NAMEs limit the list.

    \b
    dalsegno compare
    dalsegno compare hyperpod parallelcluster
    """
    from dalsegno.hardware import did_you_mean
    from dalsegno.spec.choices import TRAITS, choices
    from dalsegno.spec.facts import facts_to_json

    known = {choice.name: choice for choice in choices()}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no choice `{name}`", hint=did_you_mean(name, known, ", ".join(known)))
    chosen = [known[name] for name in names] or list(known.values())
    if json_:
        out.as_json([facts_to_json(choice) for choice in chosen])
        return
    width = max(map(len, LABELS.values()))
    for choice in chosen:
        made = f"`dalsegno init --target {choice.target}`" if choice.target else "Dal Segno does not create it"
        out.data(f"{choice.name}: {made}")
        for trait in TRAITS:
            lines = textwrap.wrap(getattr(choice, trait), COLUMNS - width - 4)
            out.data(f"  {LABELS[trait].ljust(width)}  {lines[0]}")
            for line in lines[1:]:
                out.data(f"  {' ' * width}  {line}")
        if choice.choose_it:
            out.data(f"  {'choose it if'.ljust(width)}  {choice.choose_it}")
        out.data("")
