#!/usr/bin/env python3
"""Make the pictures of the web page in docs/images, from a made-up cluster in a real Chromium.

.venv/bin/python docs/screenshots.py
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from tests.web import played
from tests.web.browser import DARK, LIGHT, Tab, chromium

from dalsegno.observe.http_server import HttpServer

IMAGES = Path(__file__).with_name("images")
IS_LIVE = "document.getElementById('live').textContent === 'live'"
PICTURES = (  # file, path, width, height, phone, colour scheme
    ("web-cluster.png", "/", 1440, 840, False, LIGHT),
    ("web-run.png", "/run/llama-k3f9x", 1440, 900, False, DARK),
    ("web-node.png", "/node/gpu-3", 1440, 900, False, LIGHT),
    ("web-phone.png", "/", 390, 844, True, DARK),
)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    played.NOW = time.time()  # ages are shown relative to now
    small = played.PlayedSite(played.small_cluster(), name="h100")
    large = played.PlayedSite(played.large_cluster(1000), name="h100")
    with chromium() as browser:
        tab = browser.tab()
        for file, path, width, height, phone, scheme in PICTURES:
            tab.size(width, height, phone=phone, scheme=scheme)
            take(tab, small, path, IMAGES / file)
        tab.size(1440, 840)
        take(tab, large, "/", IMAGES / "web-1000-nodes.png")
    small.close()
    large.close()


def take(tab: Tab, site: played.PlayedSite, path: str, file: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(listener, site.app.handle)
    server.start()
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    tab.call("Network.setCookie", name="dalsegno-1", value=site.cookie(), url=base)
    tab.open(base + path)
    tab.until(IS_LIVE)
    tab.screenshot(file)
    tab.open("about:blank")
    server.close()


if __name__ == "__main__":
    main()
