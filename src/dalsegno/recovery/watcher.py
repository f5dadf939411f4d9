"""Watch a cluster that Dal Segno did not create: say what recovery would do, and act only in armed partitions.

It is the controller's recovery loop without node agents and without runs. Its state folder has the same journal.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Remedy
from dalsegno.recovery.answers import Answers
from dalsegno.recovery.client import MAX_ANSWER, WATCHER_CONF, WATCHER_SOCKET
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import SLURM_USERS
from dalsegno.recovery.journal.event import Event
from dalsegno.recovery.refusal_log import RefusalLog
from dalsegno.recovery.slurm_witness import SlurmWitness
from dalsegno.recovery.watch import JOURNAL, NodeWatch
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Health
from dalsegno.spec.load import load_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.files import make_folder, write_atomic
from dalsegno.system.network import listen_at
from dalsegno.wire.frames import Message
from dalsegno.wire.requests import RequestServer

log = logging.getLogger("watcher")

LOCK = "controller/lock"  # path relative to the state folder
RUNS_REFUSED = "this cluster has a watcher, which starts no runs"


class ExistingSite:
    """The cluster of a file with `target: existing`. The file is read again when it has changed."""

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
        if cluster.target != "existing":
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
        self.watch = NodeWatch(folder, ExistingSite(file, slurm), SlurmWitness())
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
