"""`dalsegno` as one of the cluster's commands, for whoever has those in front of their PATH: in a job's step too."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from shlex import join

from dalsegno.programs import launcher
from dalsegno.runs.auto_resume.decide import NOTES

# By paths and not by `-m dalsegno`: neither the working folder nor a user's PYTHONPATH reaches into what is imported.
START = "import sys; sys.path[:0] = {own!r}; sys.path += {others!r}; from dalsegno.cli.main import main; main()"

RESUME = "dalsegno-resume"


def own_command() -> str:
    """A script that starts this very program with this very Python, wherever both can be seen."""
    return f'#!/bin/sh\nexec {join(own_argv())} "$@"\n'


def own_argv() -> list[str]:
    """Return the words before our arguments that start this very program, whatever the environment says."""
    own, click = Path(__file__).resolve().parents[3], find_spec("click")
    others = [str(Path(click.origin).parents[1])] if click and click.origin else []
    start = START.format(own=[str(own)], others=others)
    return [sys.executable, "-I", "-c", start]


def resume_command() -> str:
    """What takes srun's place for `--auto-resume=1`; where this Python cannot be seen, srun itself does."""
    words = list(launcher())
    return (
        f'#!/bin/sh\n[ -x {join(words[:1])} ] && exec {join([*words, "step-again"])} "$@"\n'
        f'srun=$1; shift 2\nexport {NOTES}=-1\nexec "$srun" "$@"\n'
    )
