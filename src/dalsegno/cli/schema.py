"""`dalsegno schema`: print the cluster file's JSON schema."""

from __future__ import annotations

import click

from dalsegno.cli import out


@click.command()
def command() -> None:
    """Print the JSON schema of the cluster file, for editors.

    \b
    For the YAML language server, make this the first line of the cluster file:
    "# yaml-language-server: $schema=cluster.schema.json".
    """
    from dalsegno.spec.schema import json_schema

    out.as_json(json_schema())
