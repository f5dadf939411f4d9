"""The view in a real terminal: it draws, follows the size, and restores the terminal however it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dalsegno.cli.live.terminal import changes, check_terminal, line_text
from dalsegno.cli.live.text import Tone, TonedText
from dalsegno.errors import DalsegnoError
from tests.cli.live.screen import PtyProgram
from tests.waiting import eventually

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

CLONE = Path(__file__).parents[3]
VERDICT = "1 of 5 nodes is being replaced; training is not affected"


def start(*args: str, **env: str) -> PtyProgram:
    path = os.pathsep.join([str(CLONE / "src"), str(CLONE)])
    known = {**os.environ, "PYTHONPATH": path, "TERM": "xterm-256color", **env}
    return PtyProgram([sys.executable, "-m", "tests.cli.live.played", *args], known)


def test_view_follows_keys_and_size_and_restores_the_terminal_on_q():
    with start() as top:
        top.shows(VERDICT, ">1 NODES (5)", "train-5", "gpt-k3f9x", "q quit")
        assert top.screen.alternate and not top.screen.cursor
        top.press("\t")
        top.shows(">2 GPUS")
        top.press("/gpt\r")
        top.shows("filter: gpt", "nothing matches the filter")
        top.press("\x1b")
        top.shows("NODES (5)")
        top.resize(40, 10)
        top.shows(">2 GPUS", hides="RUNS AND JOBS")
        assert max(top.screen.lines) <= 10
        top.press("q")
        assert top.ended() == 0 and top.restored


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 1), (signal.SIGHUP, 1)])
def test_signals_restore_the_terminal(number: int, code: int):
    with start() as top:
        top.shows(VERDICT)
        top.send(number)
        assert bool(top.ended()) == bool(code) and top.restored


def test_ctrl_z_gives_the_terminal_back_until_the_program_continues():
    with start() as top:
        top.shows(VERDICT)
        top.send(signal.SIGTSTP)
        eventually(lambda: top.stopped)
        while top.read(0.1):
            pass
        assert top.restored
        top.send(signal.SIGCONT)
        eventually(lambda: top.read(0.1) and top.screen.alternate)
        top.press("q")
        assert top.ended() == 0 and top.restored


def test_error_is_printed_after_the_terminal_is_restored():
    with start("fail") as top:
        assert top.ended() == 1 and top.restored
        assert "the cluster is damaged" in top.screen.text


def test_terminal_without_escape_sequences_is_refused():
    for env in ({}, {"TERM": "dumb"}):
        with pytest.raises(DalsegnoError, match="cannot show") as caught:
            check_terminal(env)
        assert "--once" in caught.value.hint
    check_terminal({"TERM": "xterm"})


def test_only_changed_lines_are_drawn():
    assert changes(["a", "b", "c"], ["a", "x"]) == "\x1b[2;1H\x1b[2Kx\x1b[3;1H\x1b[2K"
    assert changes([], ["a"]) == "\x1b[1;1H\x1b[2Ka" and changes(["a"], ["a"]) == ""


def test_without_colour_only_bold_and_reverse_are_used():
    line = tuple(TonedText(tone.value, tone) for tone in Tone)
    assert "\x1b[32m" in line_text(line, colour=True)
    plain = line_text(line, colour=False)
    assert "\x1b[1mbad\x1b[0m" in plain and "\x1b[3" not in plain and "\x1b[2m" not in plain


@pytest.mark.cluster
@pytest.mark.alone
def test_q_ends_the_view_within_a_second_while_slurm_hangs():
    with start("hang") as top:
        top.shows("waiting for the first answer")
        pressed = time.monotonic()
        top.press("q")
        assert top.ended() == 0 and top.restored
        assert time.monotonic() - pressed < 1.0
