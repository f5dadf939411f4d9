"""`dalsegno compare`: compare the places where you can train, including those based on Kubernetes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option
from dalsegno.errors import UsageError

if TYPE_CHECKING:
    from dalsegno.spec.choices import Choice

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
COLUMNS = 120  # maximum width of a table
SIDE_BY_SIDE = 3  # maximum number of places in one table


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
    from dalsegno.spec.choices import choices
    from dalsegno.spec.facts import facts_to_json

    known = {choice.name: choice for choice in choices()}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no choice `{name}`", hint=did_you_mean(name, known, ", ".join(known)))
    chosen = [known[name] for name in names] or list(known.values())
    if json_:
        out.as_json([facts_to_json(choice) for choice in chosen])
        return
    for at in range(0, len(chosen), SIDE_BY_SIDE):
        if at:
            out.data("")
        group = chosen[at : at + SIDE_BY_SIDE]
        out.table(["", *(choice.name for choice in group)], table_rows(group))


def table_rows(group: Sequence[Choice]) -> list[list[str]]:
    """Return the traits as rows, with a column for each place. A long cell continues in the next rows."""
    traits = {label: [getattr(choice, trait) for choice in group] for trait, label in LABELS.items()}
    made = [f"`init --target {each.target}`" if each.target else "Dal Segno does not create it" for each in group]
    everything = {"cluster file": made, **traits, "choose it if": [choice.choose_it for choice in group]}
    label_width = max(map(len, everything))
    width = (COLUMNS - label_width) // len(group) - 2
    rows: list[list[str]] = []
    for label, cells in everything.items():
        if any(cells):
            wrapped = [textwrap.wrap(cell, width) for cell in cells]
            lines = zip_longest(*wrapped, fillvalue="")
            rows += [["" if number else label, *line] for number, line in enumerate(lines)]
    return rows
