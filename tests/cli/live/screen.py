"""A terminal for tests: a program in a pseudo-terminal, and what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")
_HANGS_S = 60.0  # timeout for a program that hangs


class Screen:
    """The lines that a terminal shows. Only the escape sequences that the view uses are accepted."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}
        self.row, self.alternate, self.cursor, self.wraps = 1, False, True, True
        self.rest = ""

    def feed(self, text: str) -> None:
        text, at = self.rest + text, 0
        self.rest = ""
        while at < len(text):
            if text[at] != "\x1b":
                self._write(text[at])
                at += 1
                continue
            found = _SEQUENCE.match(text, at)
            if found is None:
                assert len(text) - at < 12, f"an unknown sequence: {text[at : at + 12]!r}"
                self.rest = text[at:]
                return
            self._do(found[1] + found[3], found[2])
            at = found.end()

    def _write(self, letter: str) -> None:
        if letter == "\n":
            self.row += 1
        elif letter != "\r":
            self.lines[self.row] = self.lines.get(self.row, "") + letter

    def _do(self, what: str, numbers: str) -> None:
        if what == "H":
            self.row = int(numbers.split(";")[0] or 1)
        elif what == "K":
            self.lines[self.row] = ""
        elif what == "J":
            self.lines = {}
        elif what in ("?h", "?l"):
            name = {"1049": "alternate", "25": "cursor", "7": "wraps"}[numbers]
            setattr(self, name, what == "?h")
        else:
            assert what == "m", f"an unknown sequence: {what!r}"

    @property
    def text(self) -> str:
        return "\n".join(self.lines.get(row, "").rstrip() for row in range(1, max(self.lines, default=0) + 1))


class PtyProgram:
    """A program in a pseudo-terminal of its own."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, columns: int = 80, rows: int = 24) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(self.theirs)
        self.screen = Screen()
        self.process = subprocess.Popen(
            list(argv), stdin=self.theirs, stdout=self.theirs, stderr=self.theirs, env=dict(env),
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def __enter__(self) -> PtyProgram:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def shows(self, *texts: str, hides: str = "") -> str:
        """Wait until the screen shows all these texts and none of `hides`. Return the whole screen."""
        until = time.monotonic() + _HANGS_S
        while not all(text in self.screen.text for text in texts) or (hides and hides in self.screen.text):
            assert time.monotonic() < until, f"the screen does not show {texts}:\n{self.screen.text}"
            assert self.read(0.2) or self.process.poll() is None, f"it has ended:\n{self.screen.text}"
        return self.screen.text

    def read(self, timeout_s: float) -> bool:
        """Read the program's output. Return False if there is none."""
        if not select.select([self.ours], [], [], timeout_s)[0]:
            return False
        self.screen.feed(os.read(self.ours, 65536).decode(errors="replace"))
        return True

    def ended(self) -> int:
        """Wait for the program to end, read the rest of its output, and return its exit code."""
        until = time.monotonic() + _HANGS_S
        while self.process.poll() is None:
            self.read(0.02)
            assert time.monotonic() < until, f"it does not end:\n{self.screen.text}"
        while self.read(0):
            pass
        return self.process.returncode

    @property
    def stopped(self) -> bool:
        """Return whether the program is stopped, as by Ctrl-Z."""
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return found is not None and found.si_status == signal.SIGSTOP

    @property
    def restored(self) -> bool:
        """Return whether the terminal is as before: its settings, the usual screen, a visible cursor, line breaks."""
        screen = self.screen
        same = termios.tcgetattr(self.theirs) == self.before
        return same and not screen.alternate and screen.cursor and screen.wraps
