"""Circles in who is below whom."""

from __future__ import annotations


def find_cycle(below: dict[str, list[str]]) -> list[str]:
    """One cycle in a graph given by each name's neighbours, [] if it has none."""
    done: set[str] = set()
    for start in below:
        trail: list[str] = []
        if _walk(start, below, trail, done):
            return trail[trail.index(trail[-1]) : -1]
    return []


def _walk(start: str, below: dict[str, list[str]], trail: list[str], done: set[str]) -> bool:
    """Depth first without recursion (a chain may be long); leaves the trail ending where it bit itself."""
    open_at = {start: iter(below.get(start, []))}
    trail.append(start)
    while trail:
        follower = next(open_at[trail[-1]], None)
        if follower is None:
            done.add(trail[-1])
            del open_at[trail.pop()]
        elif follower in open_at:
            trail.append(follower)
            return True
        elif follower not in done:
            trail.append(follower)
            open_at[follower] = iter(below.get(follower, []))
    return False
