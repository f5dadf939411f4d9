#!/usr/bin/env python3
"""Measure the web page: first byte, 1,000 nodes in a browser, and how late updates arrive.

    benchmarks/web.py            prints the figures, exits 1 if one exceeds its limit
    benchmarks/web.py --json

The pages of a generated cluster are served by the real application and opened in a real Chromium. A page is interactive
when all its nodes are drawn and its stream of updates is open.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tests.web.browser import Browser, Tab, chromium
from tests.web.played import PlayedSite, large_cluster, small_cluster

from dalsegno.observe.http_server import HttpServer
from dalsegno.slurm.facts import NodeState
from dalsegno.web.snapshot import SlurmPart
from dalsegno.web.sources import PlayedSources

LIMITS_S = {"first byte": 0.05, "1,000 nodes interactive": 1.0, "updates behind": 1.0}
IS_LIVE = "document.getElementById('live')?.textContent === 'live'"
ROUNDS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.parse_args()
    with chromium() as browser:
        figures = measure(browser)
    if asked.json:
        print(json.dumps(figures))
    else:
        for name, times in figures.items():
            limit = f"limit {LIMITS_S[name]:g} s" if name in LIMITS_S else ""
            print(f"{name:32} median {median(times):.3f} s, worst {max(times):.3f} s  {limit}")
    return 0 if all(median(figures[name]) <= limit for name, limit in LIMITS_S.items()) else 1


def measure(browser: Browser) -> dict[str, list[float]]:
    """Return the measured times of each figure by its name, in seconds."""
    figures: dict[str, list[float]] = {}
    with served(small_cluster()) as (address, cookie):
        figures["first byte"] = [first_byte_s(address, cookie) for _ in range(ROUNDS)]
    sources = large_cluster(1000)
    with served(sources) as (address, cookie):
        figures["first byte, 1,000 nodes"] = [first_byte_s(address, cookie) for _ in range(ROUNDS)]
        tab = browser.tab()
        tab.size(1440, 900)
        tab.call("Network.setCookie", name="dalsegno-1", value=cookie, url=f"http://{address}/")
        tab.open(f"http://{address}/events")  # loads the style sheet into the cache, where it usually is
        figures["1,000 nodes interactive"] = [interactive_s(tab, address) for _ in range(ROUNDS)]
        figures["updates behind"] = [behind_s(tab, sources, at) for at in range(ROUNDS)]
    return figures


@contextmanager
def served(sources: PlayedSources) -> Iterator[tuple[str, str]]:
    """Serve a generated cluster; yield its address and the cookie of an operator."""
    site = PlayedSite(sources)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(listener, site.app.handle)
    server.start()
    with site.live.watching():
        site.live.fresh()
        yield f"127.0.0.1:{listener.getsockname()[1]}", site.cookie()
    server.close()
    site.close()


def first_byte_s(address: str, cookie: str) -> float:
    connection = http.client.HTTPConnection(address, timeout=30)
    began = time.perf_counter()
    connection.request("GET", "/", headers={"Cookie": f"dalsegno-1={cookie}", "Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    passed = time.perf_counter() - began
    assert answer.status == 200
    answer.read()
    connection.close()
    return passed


def interactive_s(tab: Tab, address: str) -> float:
    """Return the time from the start of the navigation until all nodes are drawn and updates arrive."""
    tab.open(f"http://{address}/")
    tab.until(f"{IS_LIVE} && document.querySelectorAll('.tile').length === 1000")
    return float(tab.run("performance.now()")) / 1000


def behind_s(tab: Tab, sources: PlayedSources, at: int) -> float:
    """Change the state of one node and return how long the browser takes to show it."""
    assert isinstance(sources.slurm_part, SlurmPart)
    name = f"gpu-{500 + at:04d}"
    tab.run(
        f"new MutationObserver(() => {{ if (!window.shown{at} && document.getElementById('node-{name}')"
        f".classList.contains('down')) window.shown{at} = Date.now(); }})"
        ".observe(document.body, {childList: true, subtree: true, attributes: true})"
    )
    nodes = [replace(each, state=NodeState.DOWN) if each.name == name else each for each in sources.slurm_part.nodes]
    sources.slurm_part = replace(sources.slurm_part, nodes=tuple(nodes))
    began = time.time()
    tab.until(f"window.shown{at}")
    return float(tab.run(f"window.shown{at}")) / 1000 - began


if __name__ == "__main__":
    sys.exit(main())
