"""Tests of import progress: a bar in a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

SCRIPT = """
import time
from dalsegno.cli.containers.image_report import ImportBar
bar = ImportBar()
bar.stage("packing", 1000)
time.sleep(0.2)
bar.advance(500)
bar.close()
"""


def test_terminal_shows_a_progress_bar_and_clears_it():
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        subprocess.run([sys.executable, "-c", SCRIPT], stderr=theirs, env=env, check=True)
        os.close(theirs)
        shown = terminal.read(10_000).decode()
    assert f"packing  {'━' * 12}{'─' * 12}  500 B of 1000 B" in shown.replace("1.0 kB", "1000 B")
    assert shown.endswith("\r\x1b[2K")


def test_pipe_gets_plain_progress_lines():
    done = subprocess.run([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE, text=True, check=True)
    assert done.stderr == "packing\n"
