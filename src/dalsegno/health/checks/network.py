"""Does what this host sends arrive? A line that is slow under load, or loses packets, has TCP send things again."""

from __future__ import annotations

from dalsegno.health.check import WATCHING, Check
from dalsegno.health.readers.traffic import Traffic, ask_traffic
from dalsegno.health.result import Result, passed, warned


def judge_network(traffic: Traffic, *, percent: float = 3, least: float = 10, window_s: float = 60) -> Result:
    """Never more than a warning: it may be the other end's line."""
    sent, again = traffic.within(window_s)
    if again >= max(least, 1) and 100 * again >= percent * sent:
        share = 100 * again / sent
        return warned(f"{again} of {sent} TCP segments were sent again within {window_s:g} s ({share:.0f} %)")
    return passed("what is sent arrives")


NETWORK = Check("network", "TCP segments that are sent again", ask_traffic, judge_network, WATCHING, every_s=5)
