"""Xids in the kernel's log, judged for each GPU by its heaviest, unless the driver itself names the action."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from dalsegno.health.check import Check
from dalsegno.health.readers.gpus import has_gpus
from dalsegno.health.readers.kernel_log import KernelSaid, ask_kernel_log
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.world import World
from dalsegno.health.xids import SAYS_ITSELF, Event, events, meaning, named_action, remedy_for


@dataclass(frozen=True)
class XidLog:
    said: KernelSaid
    a100: bool


def ask_xids(world: World) -> XidLog:
    return XidLog(ask_kernel_log(world), world.expected.gpu_type.lower().startswith("a100"))


def judge_xid(log: XidLog, *, window_s: float = 86400, repeats: float = 3) -> Result:
    recent = [event for event in events(log.said.lines) if event.at > log.said.now - window_s]
    gpus = sorted({event.gpu for event in recent})
    found = [_of_gpu([event for event in recent if event.gpu == gpu], repeats, log.a100) for gpu in gpus]
    if not found:
        return passed("no Xid in the kernel's log")
    remedy, event = max(found, key=lambda each: list(Remedy).index(each[0]))
    text = f"Xid {event.xid} on {event.gpu}: {_words(event)}"
    if remedy is Remedy.NONE:
        return passed(f"{len(recent)} Xids that were programs' own faults, the last: {text}")
    return warned(text, str(event.xid)) if remedy is Remedy.WATCH else failed(text, remedy, str(event.xid))


def _words(event: Event) -> str:
    """The driver's, without whose process it was; ours where it says nothing."""
    return re.sub(r"^(pid=[^,]*,\s*|name=[^,]*,\s*)+", "", event.text) or meaning(event.xid)


def _of_gpu(seen: list[Event], repeats: float, a100: bool) -> tuple[Remedy, Event]:
    """The heaviest by the table and the event that it is for; Xid 154's word, where there is one, goes first."""
    counts = Counter(event.xid for event in seen)
    judged = [(remedy_for(event.xid, counts[event.xid], repeats, a100), event) for event in seen]
    plain = [each for each in judged if each[1].xid != SAYS_ITSELF] or judged
    remedy, event = max(plain, key=lambda each: list(Remedy).index(each[0]))
    named = [action for each in seen if (action := named_action(each)) is not None]
    return (named[-1] if named else remedy), event


XID = Check("xid", "errors that the NVIDIA driver logs", ask_xids, judge_xid, every_s=1, applies=has_gpus, lasts=False)
