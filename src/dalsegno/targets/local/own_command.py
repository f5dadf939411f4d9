"""`dalsegno` as one of the cluster's commands, for whoever has those in front of their PATH: in a job's step too."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import join

# By paths and not by `-m dalsegno`: neither the working folder nor a user's PYTHONPATH reaches into what is imported.
START = "import sys; sys.path[:0] = {own!r}; sys.path += {others!r}; from dalsegno.cli.main import main; main()"


def own_command() -> str:
    """A script that starts this very program with this very Python, wherever both can be seen."""
    own, click = Path(__file__).resolve().parents[3], find_spec("click")
    others = [str(Path(click.origin).parents[1])] if click and click.origin else []
    start = START.format(own=[str(own)], others=others)
    return f'#!/bin/sh\nexec {join([sys.executable, "-I", "-c", start])} "$@"\n'
