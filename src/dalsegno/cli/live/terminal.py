"""The terminal in full-screen mode: drawing, keys and size changes. Its former state is restored when the view ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import tty
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from dalsegno.cli.live.frame import Frame, ScreenSize
from dalsegno.cli.live.keys import KeyDecoder, KeyPress
from dalsegno.cli.live.text import Line, Tone
from dalsegno.errors import DalsegnoError

# Switch to the alternate screen, hide the cursor and turn off line wrapping. Without wrapping, a character that is
# wider than expected does not break the frame.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_COLOURS = {
    Tone.GOOD: "\x1b[32m",
    Tone.WARNING: "\x1b[33m",
    Tone.BAD: "\x1b[1;31m",
    Tone.FAINT: "\x1b[2m",
    Tone.STRONG: "\x1b[1m",
    Tone.BAR: "\x1b[7m",
}
_WITHOUT_COLOUR = {Tone.BAD: "\x1b[1m", Tone.STRONG: "\x1b[1m", Tone.BAR: "\x1b[7m"}
_ESCAPE_S = 0.05  # after this time without more bytes, an ESC is the Escape key
_MAX_READ = 4096


def check_terminal(env: Mapping[str, str]) -> None:
    """Raise an error if the terminal cannot show a full-screen view."""
    term = env.get("TERM", "")
    if term in ("", "dumb"):
        raise DalsegnoError(
            f"this terminal cannot show a full-screen view (TERM={term or 'is not set'})",
            hint="`dalsegno top --once` prints the same view as plain text",
        )


def line_text(line: Line, *, colour: bool) -> str:
    """Return a line with escape sequences for its tones."""
    codes = _COLOURS if colour else _WITHOUT_COLOUR
    return "".join(f"{codes[part.tone]}{part.text}\x1b[0m" if part.tone in codes else part.text for part in line)


def changes(before: Sequence[str], after: Sequence[str]) -> str:
    """Return the output that changes a screen from the lines `before` to `after`. Only changed lines are drawn."""
    parts = [
        f"\x1b[{number + 1};1H\x1b[2K{after[number] if number < len(after) else ''}"
        for number in range(max(len(before), len(after)))
        if number >= len(before) or number >= len(after) or before[number] != after[number]
    ]
    return "".join(parts)


class LiveTerminal:
    """A terminal in full-screen mode. Use it as a context manager, which restores the terminal on exit."""

    def __init__(self, keyboard: int, screen: int, *, colour: bool, encoding: str = "utf-8") -> None:
        self._keyboard, self._screen, self._colour, self._encoding = keyboard, screen, colour, encoding
        self._decoder = KeyDecoder()
        self._saved: list[object] = []
        self._shown: list[str] = []
        self._size: ScreenSize | None = None
        self._signals: dict[int, object] = {}
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._suspend = False

    def __enter__(self) -> LiveTerminal:
        self._saved = termios.tcgetattr(self._keyboard)
        self._signals = {number: signal.signal(number, self._note) for number in (signal.SIGWINCH, signal.SIGTSTP)}
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        for number, handler in self._signals.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._woken)
        wake, self._wake = self._wake, -1
        os.close(wake)

    def wake(self) -> None:
        """Make a waiting `keys` return. Any thread may call this method."""
        with contextlib.suppress(OSError):  # a full pipe wakes `keys` anyway, and a closed one has no reader
            os.write(self._wake, b"w")

    def size(self) -> ScreenSize:
        try:
            found = os.get_terminal_size(self._screen)
        except OSError:
            return ScreenSize()
        return ScreenSize(found.columns or 80, found.lines or 24)

    def redraw(self) -> None:
        """Draw all lines with the next frame, not only the changed ones."""
        self._shown = []
        self._write("\x1b[2J")

    def draw(self, frame: Frame, size: ScreenSize) -> None:
        """Draw a frame that was rendered for this size. If the size has changed, draw the whole screen."""
        if size != self._size:
            self._size = size
            self.redraw()
        lines = [line_text(line, colour=self._colour) for line in frame.lines]
        self._write(changes(self._shown, lines))
        self._shown = lines

    def keys(self, timeout_s: float) -> Iterator[KeyPress]:
        """Wait for keys, a new size or `wake`, and yield the keys. Raise EOFError if the terminal is gone."""
        ready = self._wait(timeout_s)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, _MAX_READ)
        if self._suspend:
            self._stop_until_continued()
        if self._keyboard in ready:
            data = os.read(self._keyboard, _MAX_READ)
            if not data:
                raise EOFError
            yield from self._decoder.feed(data)
            while self._decoder.unfinished:
                if not select.select([self._keyboard], [], [], _ESCAPE_S)[0]:
                    yield from self._decoder.flush()
                    break
                yield from self._decoder.feed(os.read(self._keyboard, _MAX_READ))

    def _wait(self, timeout_s: float) -> list[int]:
        ready: list[int] = select.select([self._keyboard, self._woken], [], [], timeout_s)[0]
        return ready

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._suspend = self._suspend or number == signal.SIGTSTP
        self.wake()

    def _stop_until_continued(self) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and return to full-screen mode after `fg`."""
        self._suspend = False
        self._restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open()

    def _open(self) -> None:
        tty.setcbreak(self._keyboard)  # the terminal turns Ctrl-C into a signal, as usual
        self._write(_ENTER)
        self._shown = []

    def _restore(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._write(_LEAVE)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSAFLUSH, self._saved)  # type: ignore[arg-type]

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, errors="replace"))
        while data:
            try:
                data = data[os.write(self._screen, data) :]
            except BlockingIOError:  # another program has made the terminal non-blocking
                select.select([], [self._screen], [])
