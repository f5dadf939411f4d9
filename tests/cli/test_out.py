"""Tests of terminal output: colour, line width and escaping."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dalsegno.cli import out


def on_terminal(code: str, columns: int, **env: str) -> str:
    """Return what a terminal of this width receives from a program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    plain = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    words = [sys.executable, "-c", f"from dalsegno.cli import out\n{code}"]
    done = subprocess.run(words, env={**plain, **env}, stdout=theirs, stderr=theirs, timeout=60)
    os.close(theirs)
    output = b""
    try:
        while more := os.read(ours, 65536):
            output += more
    except OSError:  # the other end is closed, and all data was read
        pass
    os.close(ours)
    assert done.returncode == 0, output
    return output.decode()


def test_no_color_turns_colour_off():
    code = "out.error('it failed', hint='fix it'); out.warn('hot'); out.heading('Now')"
    assert "\x1b[31m" in on_terminal(code, 80) and "\x1b[36m" in on_terminal(code, 80, NO_COLOR="")
    assert "\x1b" not in on_terminal(code, 80, NO_COLOR="1")


def test_replaced_line_fits_the_terminal():
    """A line that wraps cannot be cleared completely: only its last row can."""
    drawn = on_terminal("out.replace_line('x' * 100)", 40, NO_COLOR="1").removeprefix(out.ERASE)
    assert drawn == "x" * 39
    steps = on_terminal("with out.progress() as say: say('y' * 100)", 40, NO_COLOR="1")
    assert [len(line) for line in steps.split(out.ERASE) if line] == [39]


HOSTILE = "\x1b]0;title\x07\x1b[2Jred\x9b31m\r\u202e\x08"


def test_escape_codes_in_text_do_not_reach_the_terminal():
    """The rule applies to all text: job names, reasons, paths, and messages of other programs."""
    code = (
        f"t = {HOSTILE!r}\n"
        "out.talk(t); out.data(t); out.step(t); out.step(t, bold=True); out.heading(t)\n"
        "out.warn(t); out.error(t, where=t, hint=t); out.replace_line(t)\n"
        "out.table(['A', 'B'], [[t, 'x\\ny'], ['1', '2']])\n"
        "with out.progress() as say: say(t)"
    )
    drawn = on_terminal(code, 200, NO_COLOR="1").replace(out.ERASE, "").replace("\r\n", "\n")
    assert not {letter for letter in drawn if not letter.isprintable()} - {"\n"}
    assert drawn.count("red") == 12 and "x\\ny" in drawn


def test_line_breaks_in_our_text_are_kept(capsys: pytest.CaptureFixture[str]):
    out.data("a\tb\nc")
    assert capsys.readouterr().out == "a\tb\nc\n"


@pytest.mark.parametrize("say", ["out.talk('x')", "say('x')"])
def test_closed_pipe_of_messages_does_not_stop_a_change(tmp_path: Path, say: str):
    """`dalsegno up 2>&1 | head -1` must still apply all changes after `head` has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"with out.progress() as say:\n    for _ in range(3): {say}\nopen('changed', 'w')"
    words = [sys.executable, "-c", f"from dalsegno.cli import out\n{code}"]
    done = subprocess.run(words, cwd=tmp_path, stdout=writer, stderr=writer, timeout=60)
    os.close(writer)
    assert done.returncode == 0 and (tmp_path / "changed").exists()
