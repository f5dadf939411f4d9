"""Processes of a cluster by the program that they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dalsegno.system.children import ancestors, arguments


def programs(pids: Iterable[int], matches: Callable[[list[str]], bool]) -> list[int]:
    """Whose words match; not what one of them has just forked, and what bears its words until it starts a program."""
    found = [pid for pid in pids if matches(arguments(pid))]
    return [pid for pid in found if arguments(pid) not in [arguments(parent) for parent in ancestors(pid)[:1]]]
