"""Keys of a terminal: bytes in, keys out. A key may arrive in parts, and several keys at once."""

from __future__ import annotations

import codecs
from enum import Enum


class Key(Enum):
    """A key that is not a character."""

    UP = "up"
    DOWN = "down"
    PAGE_UP = "page-up"
    PAGE_DOWN = "page-down"
    HOME = "home"
    END = "end"
    TAB = "tab"
    BACK_TAB = "back-tab"
    ENTER = "enter"
    ESCAPE = "escape"
    BACKSPACE = "backspace"
    REDRAW = "redraw"


KeyPress = Key | str

_ESCAPE = "\x1b"
_SEQUENCES = {
    "[A": Key.UP, "OA": Key.UP, "[B": Key.DOWN, "OB": Key.DOWN, "[5~": Key.PAGE_UP, "[6~": Key.PAGE_DOWN,
    "[H": Key.HOME, "OH": Key.HOME, "[1~": Key.HOME, "[7~": Key.HOME,
    "[F": Key.END, "OF": Key.END, "[4~": Key.END, "[8~": Key.END, "[Z": Key.BACK_TAB,
}  # fmt: skip
_CONTROLS = {
    "\t": Key.TAB, "\r": Key.ENTER, "\n": Key.ENTER, "\x7f": Key.BACKSPACE, "\b": Key.BACKSPACE, "\x0c": Key.REDRAW,
}  # fmt: skip
_MAX_SEQUENCE = 16  # a longer sequence is not a key


class KeyDecoder:
    """Turns the bytes of a terminal into keys."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._waiting = ""

    @property
    def unfinished(self) -> bool:
        """Return whether an escape sequence is incomplete. If no input follows soon, `flush` returns the Escape key."""
        return bool(self._waiting)

    def feed(self, data: bytes) -> list[KeyPress]:
        """Add bytes from the terminal, and return the keys that are complete."""
        self._waiting += self._decoder.decode(data)
        keys: list[KeyPress] = []
        while self._waiting:
            taken, key = _first_key(self._waiting)
            if not taken:
                break
            self._waiting = self._waiting[taken:]
            keys += [key] if key else []
        return keys

    def flush(self) -> list[KeyPress]:
        """Return the Escape key in place of an unfinished sequence; nothing if no sequence is unfinished."""
        waiting, self._waiting = self._waiting, ""
        return [Key.ESCAPE] if waiting else []


def _first_key(text: str) -> tuple[int, KeyPress | None]:
    """Return the length of the first key and the key. The length is 0 if more input is needed; the key is None if it is
    unknown."""
    if text[0] != _ESCAPE:
        key = _CONTROLS.get(text[0]) or (text[0] if text[0].isprintable() else None)
        return 1, key
    if len(text) == 1:
        return 0, None
    if text[1] not in "[O":
        return 1, Key.ESCAPE  # the Escape key, followed by another key
    for length in range(3, min(len(text), _MAX_SEQUENCE) + 1):
        last = text[length - 1]
        if last == "~" or last.isalpha():
            return length, _SEQUENCES.get(text[1:length])
    return (0, None) if len(text) < _MAX_SEQUENCE else (len(text), None)
