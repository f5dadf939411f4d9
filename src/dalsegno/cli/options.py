"""Options that several commands share."""

from __future__ import annotations

import click

file_argument = click.argument("file", type=click.Path(), default="cluster.yaml", metavar="[FILE]")
cluster_option = click.option(
    "--cluster", "-M", "name", metavar="NAME", help="Which cluster; default: $DALSEGNO_CLUSTER, or the only one."
)
json_option = click.option("--json", "json_", is_flag=True, help="Print JSON.")
