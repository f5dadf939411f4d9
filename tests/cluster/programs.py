"""Find processes of a cluster by their program."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dalsegno.system.children import ancestors, arguments


def programs(pids: Iterable[int], matches: Callable[[list[str]], bool]) -> list[int]:
    """Return the processes whose arguments match, except children that have forked but not yet called exec."""
    found = [pid for pid in pids if matches(arguments(pid))]
    return [pid for pid in found if arguments(pid) not in [arguments(parent) for parent in ancestors(pid)[:1]]]
