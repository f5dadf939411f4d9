"""Fake checks and orders whose behaviour the tests choose."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

from dalsegno.health.messages import MAX_PART, Finding, GpuIdentity, GpuReading, Order, Reply
from dalsegno.health.result import passed
from dalsegno.node_agent.orders import Send
from dalsegno.system.hanging_calls import ask
from dalsegno.wire.frames import Message


class Played:
    """Two checks; the settings choose the behaviour of one of them."""

    def __init__(self, settings: Message) -> None:
        self.settings = settings

    def names(self) -> Iterable[str]:
        return [name for name in ("good", "bad") if name not in self.settings.get("off", ())]

    def run_due(self, without: frozenset[str]) -> Iterator[str | Finding]:
        for name in self.names():
            if name not in without:
                yield name
                if name == "bad":
                    self.misbehave()
                yield Finding(name, passed(self.settings.get("word", "fine")), time.time())

    def misbehave(self) -> None:
        if self.settings.get("bad") == "hangs":
            time.sleep(1000)
        if self.settings.get("bad") == "sleeps":
            ask(["sleep", "1000"], timeout_s=1000)

    def gpus(self) -> Iterable[GpuIdentity] | None:
        return [GpuIdentity(0, "GPU-1")]

    def readings(self) -> Iterable[GpuReading] | None:
        return [GpuReading(0, 41.0, 512, 81920, 95.0)]


def do(order: Order, send: Send) -> None:
    context = order.arguments.get("context")
    if context == "fails":
        raise ValueError("no such context")
    if context == "dies":
        os._exit(3)
    if context == "hangs":
        time.sleep(1000)
    text = "x" * int(order.arguments.get("size", "0")) or "some words"
    for start in range(0, len(text), MAX_PART):
        send(Reply(order.number, file="words.txt", part=text[start : start + MAX_PART]))
