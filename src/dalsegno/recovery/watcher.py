"""Watch a cluster that Dal Segno did not create: report what recovery would do, and act only in armed partitions.

The watcher is the controller's recovery loop without node agents and without runs. Its state folder has the same kind
of journal.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Remedy
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.answers import Answers
from dalsegno.recovery.client import MAX_ANSWER, WATCHER_CONF, WATCHER_SOCKET
from dalsegno.recovery.decisions.facts import Validation
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import SLURM_USERS
from dalsegno.recovery.journal.event import Event
from dalsegno.recovery.refusal_log import RefusalLog
from dalsegno.recovery.watch import JOURNAL, NodeWatch
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import is_absence
from dalsegno.spec.facts import Health
from dalsegno.spec.load import load_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.system.network import listen_at
from dalsegno.wire.frames import Message
from dalsegno.wire.liveness import Presence
from dalsegno.wire.requests import RequestServer

# A node without contact to Slurm is lost if its slurmd has not answered for this long. A shorter silence can be a
# restart of slurmd.
CONFIRM_S = 5.0
PROBE_S = 1.0
MAX_PROBES = 16  # maximum number per round: if many nodes fall silent at once, the network is most likely at fault
_NOT_EXPECTED = {
    NodeFlag.POWER_DOWN,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.POWERING_UP,
    NodeFlag.POWER_UP,
    NodeFlag.REBOOT_ISSUED,
    NodeFlag.REBOOT_REQUESTED,
}

ProbeSlurmd = Callable[[NodeInfo], bool]


def slurmd_answers(node: NodeInfo) -> bool:
    """Return whether a node's slurmd accepts a connection."""
    try:
        with socket.create_connection((node.address or node.name, node.port or 6818), PROBE_S):
            return True
    except OSError:
        return False


@dataclass
class SlurmLossDetector:
    """Detects lost nodes without node agents. `see` takes Slurm's latest answer; `views` returns the resulting states.

    A node counts as lost if Slurm has no contact with it and its slurmd does not accept a connection either. Nothing
    else can be known about the node: there are no health checks, and it cannot be validated. The liveness detector in
    `wire/liveness.py` is not used, because there are no heartbeats whose silence could be measured.
    """

    probe: ProbeSlurmd = slurmd_answers
    clock: Callable[[], float] = time.time
    _views: dict[str, AgentView] = field(default_factory=dict)
    _missed_since: dict[str, float] = field(default_factory=dict)

    def see(self, nodes: Iterable[NodeInfo]) -> None:
        now, views, probes = self.clock(), dict[str, AgentView](), 0
        for node in nodes:
            unheard = is_unheard(node)
            probes += unheard
            views[node.name] = self._view(node, now, unheard, may_probe=probes <= MAX_PROBES)
        self._missed_since = {name: at for name, at in self._missed_since.items() if name in views}
        self._views = views

    def _view(self, node: NodeInfo, now: float, unheard: bool, *, may_probe: bool) -> AgentView:
        earlier = self._views.get(node.name, AgentView(node.name))
        if node.flags & _NOT_EXPECTED:
            self._missed_since.pop(node.name, None)
            return AgentView(node.name)
        if unheard and not may_probe:
            return earlier
        if not unheard or self.probe(node):
            self._missed_since.pop(node.name, None)
            since = earlier.since if earlier.presence is Presence.CONNECTED else now
            boot = f"slurm-{node.booted_at or 0}"
            return AgentView(node.name, Presence.CONNECTED, since, last_seen=now, boot=boot, slurmd_answers=True)
        missed = self._missed_since.setdefault(node.name, now)
        if now - missed < CONFIRM_S:
            return earlier
        since = earlier.since if earlier.presence is Presence.GONE else now
        return AgentView(node.name, Presence.GONE, since, earlier.last_seen, host_answers=False, slurmd_answers=False)

    # The other methods of `NodeAgents`. Without agents, they do nothing or return nothing.

    def remember(self, nodes: Iterable[str]) -> None:
        """Do nothing: every answer of Slurm lists all nodes, so nothing needs to be remembered."""

    def views(self) -> Mapping[str, AgentView]:
        return self._views

    def validations(self) -> Mapping[str, Validation]:
        return {}

    def validating(self) -> Mapping[str, str]:
        return {}

    def validate(self, node: str, ask: str, partner: str) -> None:
        raise DalsegnoError(f"{node} has no node agent", hint="an administrator must validate it")

    def rest(self, node: str, seconds: float) -> None:
        """Do nothing: there is no agent that uses the GPUs."""

    def evidence(self, node: str) -> Mapping[str, str]:
        return {"no-evidence": "this cluster has no node agents"}


def is_unheard(node: NodeInfo) -> bool:
    """Return whether Slurm has no contact with a node, or has set it down for that reason."""
    return not node.responding or (node.down and is_absence(node.reason))


log = logging.getLogger("watcher")

LOCK = "controller/lock"  # path relative to the state folder
RUNS_REFUSED = "this cluster has a watcher, which starts no runs"


class ExistingSite:
    """The cluster that a file with `target: existing` describes. The file is read again when it has changed."""

    target = object()  # this target cannot reset, reboot or replace nodes

    def __init__(self, file: Path, slurm: SlurmClient) -> None:
        self.file, self.slurm = file, slurm
        self.slurm_users = SLURM_USERS | {slurm.config().get("SlurmUser", "").partition("(")[0]}
        self._read_at, self._health = 0, Health(mode="observe")
        self._read()

    def policy(self) -> Policy:
        try:
            self._read()
        except (DalsegnoError, OSError) as error:
            log.warning("the last valid settings stay in use: %s", error)
        policy = Policy.of(self._health, frozenset(), frozenset(), self.slurm_users)
        return replace(policy, agents=False, gone_remedy=Remedy.DRAIN)

    def is_being_changed(self) -> bool:
        return False

    def _read(self) -> None:
        stamp = self.file.stat().st_mtime_ns
        if stamp == self._read_at:
            return
        self._read_at = stamp  # set before the file is read, so that a faulty file is reported only once
        cluster = resolve(load_spec(self.file))
        if not cluster.is_foreign:
            raise DalsegnoError(
                f"its target is `{cluster.target}`", where=str(self.file), hint="`dalsegno adopt` writes such a file"
            )
        self._health = cluster.health
        log.info("mode %s, armed: %s", cluster.health.mode, ", ".join(cluster.health.armed) or "no partition")


class NodeWatcher:
    """Watches the nodes in a thread, and answers requests about them. It refuses to start runs."""

    def __init__(self, folder: Path, file: Path, slurm: SlurmClient, slurm_conf: str) -> None:
        for name, mode in {"": 0o755, "run": 0o755, "controller": 0o700}.items():
            make_folder(folder / name, mode)
        self.watch = NodeWatch(folder, ExistingSite(file, slurm), SlurmLossDetector())
        self.selector = selectors.DefaultSelector()
        self.answers = Answers(
            folder / JOURNAL,
            self.watch.request_round,
            lambda: self.watch.policy,
            lambda node: self.watch.partitions.get(node, ()),
        )
        listener = listen_at(folder / WATCHER_SOCKET, 0o666)
        self.requests = RequestServer(listener, self.selector, self.answer, RefusalLog(log.warning).log, MAX_ANSWER)
        write_atomic(folder / WATCHER_CONF, slurm_conf)  # other commands find this watcher by this file
        self._folder, self._shown = folder, self.answers.store.last_event()
        self.watch.start()

    def turn(self, most_s: float) -> list[Event]:
        """Serve requests for a while, and return the events since the last turn."""
        until = self.requests.turn()
        wait_s = most_s if until is None else min(most_s, max(until - time.monotonic(), 0.0))
        for key, events in self.selector.select(wait_s):
            key.data(events)
        found = self.answers.store.events(self._shown)
        self._shown = found[-1].id if found else self._shown
        return list(found)

    def answer(self, uid: int, request: Message) -> Message:
        try:
            if set(request) & set(Answers.WORDS):
                return self.answers.answer(uid, request)
            raise DalsegnoError(RUNS_REFUSED, hint="`dalsegno run` submits a batch job instead")
        except DalsegnoError as error:
            return {"error": error.what, "hint": error.hint}

    def close(self) -> None:
        for name in (WATCHER_SOCKET, WATCHER_CONF):
            os.unlink(self._folder / name)
        while not self.watch.close():
            time.sleep(0.01)
        self.answers.close()
        self.requests.close()
        self.selector.close()
