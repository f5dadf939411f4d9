"""`dalsegno torchrun`: run a torchrun command line with the Dal Segno launcher."""

from __future__ import annotations

import click

from dalsegno.cli import out


class _Verbatim(click.Command):
    """A command that passes its arguments on unparsed, because torchrun's parser reads them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.params["words"] = tuple(args)
        return []


@click.command(cls=_Verbatim, add_help_option=False)
def command(words: tuple[str, ...]) -> None:
    """Run a script as torchrun does: same flags, same variables for the workers, same exit codes."""
    import os

    from dalsegno.runs.torchrun.args import parse_torchrun, torchrun_parser

    args = parse_torchrun(words, os.environ)
    if args is None:
        out.data(torchrun_parser({}).format_help().rstrip("\n"))
        return
    from dalsegno.runs.torchrun.launch import LaunchContext, launch
    from dalsegno.runs.torchrun.logs import write_all

    raise SystemExit(launch(args, LaunchContext(os.environ, _talk, write_all)))


def _talk(text: str) -> None:
    out.talk(f"dalsegno torchrun: {text}")
