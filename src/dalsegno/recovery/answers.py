"""The controller's answers to requests of users about events, nodes, automatic recovery and replaced GPUs."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.decisions.budget import count_taken_last_hour
from dalsegno.recovery.decisions.forecast import forecast
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import write_reason
from dalsegno.recovery.decisions.records import NodeRecord, NodeRecords
from dalsegno.recovery.journal.store import Journal
from dalsegno.wire.frames import Message

MAX_EVENTS = 500  # maximum number of events per answer, which must fit into one message
MAX_NAME = 100
LAST = 50  # number of events shown with a node
_HINT = "use `events`, `automation`, `nodes`, `node` or `forgive`"


class Answers:
    """Serves the requests `{"events": SINCE}`, `{"automation": WORD}`, `{"nodes": true}`, `{"node": NAME}` and
    `{"forgive": NODE-OR-GPU}`.

    `changed` is called after a user has changed something; `partitions` returns a node's partitions. The journal is
    opened by the thread that first needs it.
    """

    WORDS = ("events", "automation", "nodes", "node", "forgive")

    def __init__(
        self,
        journal: Path,
        changed: Callable[[], None],
        policy: Callable[[], Policy] = Policy,
        partitions: Callable[[str], Collection[str]] = lambda node: (),
    ) -> None:
        self._journal, self._changed, self._policy, self._opened = journal, changed, policy, list[Journal]()
        self._partitions = partitions

    @property
    def store(self) -> Journal:
        if not self._opened:
            self._opened.append(Journal(self._journal))
        return self._opened[0]

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def answer(self, uid: int, request: Message) -> Message:
        if set(request) == {"events"}:
            return self._events(request["events"])
        if set(request) - {"by"} == {"automation"}:
            return self._automation(uid, request["automation"], request.get("by"))
        if set(request) == {"nodes"} and request["nodes"] is True:
            return {"nodes": [node_message(own) for own in self.store.refresh().nodes.values()], **self._slurm_users()}
        if set(request) == {"node"} and isinstance(request["node"], str):
            return self._node(request["node"])
        if set(request) == {"forgive"} and isinstance(request["forgive"], str):
            return self._forgive(uid, request["forgive"])
        raise DalsegnoError("unknown request", hint=_HINT)

    def _events(self, since: object) -> Message:
        """Return the events after the id `since`. A negative `since` requests that many of the last events."""
        if type(since) is not int or abs(since) > 1 << 53:
            raise DalsegnoError("`events` must be the id of the last known event", hint="use 0 for all events")
        first = since if since >= 0 else max(self.store.last_event() + since, 0)
        return {"events": [event.message() for event in self.store.events(first, most=MAX_EVENTS)]}

    def _automation(self, uid: int, word: object, by: object = None) -> Message:
        """Carry out a request about automation and return the answer. `by` is the person who sent the request through
        the web page."""
        if word in ("pause", "resume"):
            _check_owner(uid, f"{word} automatic recovery")
            who = by[:MAX_NAME] if isinstance(by, str) and by.isprintable() else _name(uid)
            self.store.pause(word == "pause", who, time.time())
            self._changed()
        elif word != "status":
            raise DalsegnoError(f"unknown automation command `{word!s:.40}`", hint="use pause, resume or status")
        records, policy, now = self.store.refresh(), self._policy(), time.time()
        out = [node_message(own) for own in records.nodes.values() if own.out]
        suspected = [node_message(own) for own in records.nodes.values() if own.phase is NodePhase.SUSPECTED]
        return {
            "automation": "paused" if records.paused else "on",
            "mode": policy.mode,
            "armed": sorted(policy.armed),
            "per_hour": policy.per_hour,
            "taken": {name: count_taken_last_hour(records, name, now) for name in partitions_of(records)},
            "out": out,
            "suspected": suspected,
        }

    def _forgive(self, uid: int, name: str) -> Message:
        _check_owner(uid, "forgive a GPU")
        found = self.store.forgive(name, _name(uid), time.time()) if name else []
        if not found:
            hint = "`dalsegno nodes show NODE` lists a node's GPUs, and which of them were replaced"
            raise DalsegnoError(f"{name!r:.80} is neither a replaced GPU nor a node with one", hint=hint)
        self._changed()
        return {"forgiven": [asdict(each) for each in found]}

    def _node(self, name: str) -> Message:
        records = self.store.refresh()
        own = records.nodes.get(name)
        if own is None:
            raise DalsegnoError(f"unknown node {name!r:.80}", hint="`dalsegno nodes` lists them")
        ahead = forecast(own, self._partitions(name), records, self._policy(), time.time())
        return {
            **self._slurm_users(),
            "node": node_message(own),
            "ahead": ahead.message() if ahead else None,
            "gpus": [asdict(each) for each in self.store.gpu_history(name)],
            "events": [event.message() for event in self.store.last_events(name, LAST)],
            "checks": [asdict(event) for event in self.store.last_checks(name, LAST)],
        }

    def _slurm_users(self) -> Message:
        return {"slurm_users": sorted(self._policy().slurm_users)}


def _check_owner(uid: int, action: str) -> None:
    if uid not in (0, os.geteuid()):
        raise DalsegnoError(f"only root and the cluster's owner may {action}, not uid {uid}", hint="use sudo")


def node_message(own: NodeRecord) -> Message:
    return {
        "node": own.node,
        "phase": own.phase.value,
        "since": own.entered or None,
        "reason": write_reason(own.fault) if own.fault else "",
        "tried": [step.value for step in own.steps],
        "note": own.said,
        "about": own.about.topic.value,
        "held_back": own.held_back.value,
        "excused": list(own.excuses),
        "validated_at": own.validated_at or None,
        "boot": own.last_boot,
    }


def partitions_of(records: NodeRecords) -> list[str]:
    """Return the partitions that appear in the recorded budget marks, sorted by name."""
    return sorted({partition for mark in records.marks for partition in mark.partitions})


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
