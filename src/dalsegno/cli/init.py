"""`dalsegno init`: write a commented starter cluster file."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.cli.out import file_argument
from dalsegno.errors import DalsegnoError, UsageError


@click.command()
@file_argument
@click.option(
    "--target", default="local", show_default=True, help="Target: local, ssh, parallelcluster, hyperpod or oci."
)
@click.option("--name", default="demo", show_default=True, help="Name of the cluster.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(file: str, target: str, name: str, force: bool) -> None:
    """Write a commented starter cluster file to FILE (default: cluster.yaml)."""
    from dalsegno.spec.load import parse_spec
    from dalsegno.spec.schema import starter
    from dalsegno.spec.unbuilt import UNBUILT_TARGETS
    from dalsegno.system.files import write_atomic

    path = Path(file)
    if path.is_dir():
        raise DalsegnoError("this is a folder", where=file, hint=f"name a file in it: `{path / 'cluster.yaml'}`")
    if path.exists() and not force:
        raise DalsegnoError("the file already exists", where=file, hint="use `--force` to overwrite it")
    text = starter(target, name)
    # An invalid name is refused before anything is written.
    if parse_spec(text, file).name != name:
        raise UsageError(f"invalid cluster name `{name}`", hint="use lowercase letters, digits, `-` and `_`")
    write_atomic(path, text)
    argument = "" if file == "cluster.yaml" else f" {shlex.quote(file)}"
    then = f" (target `{target}` is not built yet)" if target in UNBUILT_TARGETS else f", then `dalsegno up{argument}`"
    out.talk(f"wrote {file}; next: `dalsegno validate{argument}`{then}")
