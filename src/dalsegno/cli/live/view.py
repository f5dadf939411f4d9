"""The state of the view, and how keys change it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dalsegno.cli.live.keys import Key, KeyPress

MAX_FILTER = 64


class Panel(Enum):
    """A part of the screen. Its number is the key that selects it."""

    NODES = 1
    GPUS = 2
    RUNS = 3
    EVENTS = 4


@dataclass(frozen=True)
class PanelSize:
    """The number of visible rows of a panel, and the number of all its rows."""

    shown: int = 0
    total: int = 0

    @property
    def last_offset(self) -> int:
        return max(0, self.total - self.shown)


@dataclass(frozen=True)
class ViewState:
    """The choices of the user: the selected panel, the scroll positions, the filter, and modes such as pause."""

    panel: Panel = Panel.NODES
    offsets: Mapping[Panel, int] = field(default_factory=dict)  # the first visible row of each panel
    filter: str = ""
    typing: bool = False  # whether the filter is being typed
    paused: bool = False
    help: bool = False
    quit: bool = False


def press(view: ViewState, key: KeyPress, sizes: Mapping[Panel, PanelSize]) -> ViewState:
    """Return the view after a key was pressed. `sizes` are the sizes of the panels on the screen."""
    if view.typing:
        return _type(view, key)
    if view.help:
        return replace(view, help=False, quit=key == "q")
    if key in _COMMANDS:
        return _command(view, key)
    if key in ("1", "2", "3", "4"):
        return replace(view, panel=Panel(int(str(key))))
    return _scroll(view, key, sizes.get(view.panel, PanelSize()))


_COMMANDS = ("q", "p", "/", "?", "h", Key.TAB, Key.BACK_TAB, Key.ESCAPE)


def _command(view: ViewState, key: KeyPress) -> ViewState:
    if key == "q":
        return replace(view, quit=True)
    if key == "p":
        return replace(view, paused=not view.paused)
    if key == "/":
        return replace(view, typing=True)
    if key in ("?", "h"):
        return replace(view, help=True)
    if key is Key.ESCAPE:
        return replace(view, filter="", offsets={})
    step = 1 if key is Key.TAB else -1
    panels = list(Panel)
    return replace(view, panel=panels[(panels.index(view.panel) + step) % len(panels)])


def _type(view: ViewState, key: KeyPress) -> ViewState:
    if key is Key.ENTER:
        return replace(view, typing=False)
    if key is Key.ESCAPE:
        return replace(view, typing=False, filter="", offsets={})
    if key is Key.BACKSPACE:
        return replace(view, filter=view.filter[:-1], offsets={})
    if isinstance(key, str) and len(view.filter) < MAX_FILTER:
        return replace(view, filter=view.filter + key, offsets={})
    return view


def _scroll(view: ViewState, key: KeyPress, size: PanelSize) -> ViewState:
    at = min(view.offsets.get(view.panel, 0), size.last_offset)
    page = max(1, size.shown - 1)
    steps: dict[KeyPress, int] = {
        Key.UP: -1, "k": -1, Key.DOWN: 1, "j": 1, Key.PAGE_UP: -page, Key.PAGE_DOWN: page, " ": page,
        Key.HOME: -size.total, "g": -size.total, Key.END: size.total, "G": size.total,
    }  # fmt: skip
    if key not in steps:
        return view
    return replace(view, offsets={**view.offsets, view.panel: max(0, min(at + steps[key], size.last_offset))})
