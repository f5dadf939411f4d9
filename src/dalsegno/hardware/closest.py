"""The name a user most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_SURE = 0.7
_LOOKED_AT = 2000  # comparing is slow, and a cluster may have 65,000 nodes


def closest(name: str, names: Iterable[str]) -> str:
    """The nearest of `names`, or "" if none is near. Of short words two may share most letters by chance (`foo`,
    `oom`): one that is only just near begins alike."""
    from difflib import SequenceMatcher, get_close_matches

    wanted = name.lower()[:100]
    by_lower = {each.lower(): each for each in islice(names, _LOOKED_AT)}
    for near in get_close_matches(wanted, list(by_lower), n=3, cutoff=0.6):
        if near[:1] == wanted[:1] or SequenceMatcher(None, near, wanted).ratio() >= _SURE:
            return by_lower[near]
    return ""


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """A hint: "did you mean `…`?", or `otherwise`."""
    near = closest(name, names)
    return f"did you mean `{near}`?" if near else otherwise
