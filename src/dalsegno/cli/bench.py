"""`dalsegno bench`: measurements, a file each."""

from __future__ import annotations

import importlib

import click

BENCHMARKS = {  # name -> what it measures
    "ddp": "Ways to average gradients, from first principles to torch's DDP, side by side.",
}


class Benchmarks(click.Group):
    """As with the commands: a benchmark's file is imported when it is called."""

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
    """Run benchmarks that measure everything they compare in one run."""
