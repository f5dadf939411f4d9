"""`dalsegno bench`: benchmarks, one module each."""

from __future__ import annotations

import importlib

import click

BENCHMARKS = {  # name -> what it measures
    "ddp": "Compare ways to average gradients, from one message per parameter to torch's DDP.",
}


class Benchmarks(click.Group):
    """The group of all benchmarks. A benchmark's module is imported only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in BENCHMARKS:
            return None
        found: click.Command = importlib.import_module(f"dalsegno.cli.bench_{name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


@click.group(cls=Benchmarks)
def command() -> None:
    """Run a benchmark. Everything it compares is measured in the same run."""
