"""The name a user most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_LOOKED_AT = 2000  # comparing is slow, and a cluster may have 65,000 nodes


def closest(name: str, names: Iterable[str]) -> str:
    """The nearest of `names`, or "" if none is near."""
    from difflib import get_close_matches

    by_lower = {each.lower(): each for each in islice(names, _LOOKED_AT)}
    found = get_close_matches(name.lower()[:100], list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """A hint: "did you mean `…`?", or `otherwise`."""
    near = closest(name, names)
    return f"did you mean `{near}`?" if near else otherwise
