"""The controller: a process on the head node that starts the coordinators of all runs, and watches and repairs nodes.

The controller may be killed at any time. Coordinators survive it, and the next controller resumes from the records and
the journal.
"""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.local_machine import slurm_conf
from dalsegno.log import look_at_logs
from dalsegno.programs import launcher as own_launcher
from dalsegno.recovery.agents.node_link import NodeLink
from dalsegno.recovery.agents.view import views_message
from dalsegno.recovery.answers import Answers
from dalsegno.recovery.client import MAX_ANSWER
from dalsegno.recovery.decisions.policy import ControllerSite, Policy
from dalsegno.recovery.refusal_log import RefusalLog
from dalsegno.recovery.runs.coordinators import CoordinatorKeeper, check_folder, check_may_ask
from dalsegno.recovery.runs.run_records import RunRecord, RunRecords
from dalsegno.recovery.watch import JOURNAL, NodeWatch
from dalsegno.runs.coordinator.trust import CONTROLLER
from dalsegno.system.children import allow_many_files
from dalsegno.system.files import locked, make_folder
from dalsegno.system.network import listen_at
from dalsegno.wire.frames import Message
from dalsegno.wire.requests import RequestServer

log = logging.getLogger("controller")

# Paths relative to the cluster's state folder.
SOCKET, RUNS, LOCK, SECRETS = "run/controller.sock", "controller/runs", "controller/lock", "secret/agents"

_HINT = f"use one of {', '.join(f'`{word}`' for word in ('start', 'corrupt', 'runs', 'agents', *Answers.WORDS))}"


def serve(folder: Path, site: ControllerSite, agents_at: str) -> int:
    """Run the controller until it is killed; return 1 if it cannot run.

    If `agents_at` is set, listen for node agents at this HOST:PORT.
    """
    try:
        make_folder(folder / "controller", 0o700)
        allow_many_files()
        with locked(folder / LOCK, "this cluster's controller"):
            controller = Controller(folder, own_launcher(), os.environ)
            if agents_at:
                host, _, port = agents_at.rpartition(":")
                controller.nodes.open_when_possible(host.strip("[]"), int(port))
            controller.watch_nodes(site)
            controller.serve()
    except DalsegnoError as error:
        log.error("the controller stops: %s", error)
    return 1


class Controller:
    """Serves requests and supervises coordinators. `launcher` is the command that starts Dal Segno's programs."""

    def __init__(self, folder: Path, launcher: Sequence[str], env: Mapping[str, str]) -> None:
        self.selector = selectors.DefaultSelector()
        env = {**env, CONTROLLER: str(folder / SOCKET)}
        self.keeper = CoordinatorKeeper(RunRecords(folder / RUNS), launcher, env, self.selector)
        self.keeper.begin()
        self.folder, self.refusals = folder, RefusalLog(log.warning)
        self.nodes = NodeLink(
            self.selector, folder / SECRETS, slurm_conf(env), changed=lambda node: self.request_round()
        )
        self.watch: NodeWatch | None = None
        self.answers = Answers(
            folder / JOURNAL,
            self.request_round,
            lambda: self.watch.policy if self.watch else Policy(),
            lambda node: self.watch.partitions.get(node, ()) if self.watch else (),
        )
        listener = listen_at(folder / SOCKET, 0o666)  # every user may connect; the kernel identifies the user
        self.requests = RequestServer(listener, self.selector, self.answer, RefusalLog(log.warning).log, MAX_ANSWER)
        log.info("controller %d started with %d runs", os.getpid(), len(self.keeper.known))

    def watch_nodes(self, site: ControllerSite) -> None:
        """Start the thread that watches and repairs the nodes."""
        self.watch = NodeWatch(self.folder, site, self.nodes, lambda: dict(self.keeper.known))
        self.watch.start()

    def request_round(self) -> None:
        if self.watch:
            self.watch.request_round()

    def serve(self) -> None:
        while True:
            self.turn()
            look_at_logs()

    def turn(self, most_s: float | None = None) -> None:
        """Wait for the next event and handle it."""
        times = [at for at in (self.keeper.wake(), self.requests.turn(), self.nodes.wake()) if at is not None]
        waits = [max(at - time.monotonic(), 0.0) for at in times] + ([] if most_s is None else [most_s])
        for key, events in self.selector.select(min(waits, default=None)):
            key.data(events)

    def close(self) -> None:
        """Release everything. The coordinators keep running."""
        while self.watch and not self.watch.close():
            self.turn(0.01)  # carry out calls that the recovery thread may be waiting for
        self.answers.close()
        self.requests.close()
        self.nodes.close()
        self.selector.close()

    def answer(self, uid: int, request: Message) -> Message:
        """Answer a user's request: `{"start": FOLDER}`, `{"corrupt": {…}}`, `{"runs": true}`, `{"agents": true}` or one
        for `Answers`."""
        log.debug("request of uid %d: %s", uid, ", ".join(request))
        try:
            if set(request) == {"start"}:
                check_may_ask(uid)
                self.keeper.request(check_folder(request["start"], uid), uid)
                return {"ok": True}
            if set(request) == {"corrupt"} and self.watch:
                if self.watch.wrong_results.add(uid, request["corrupt"]):
                    self.request_round()
                return {"ok": True}
            if request == {"runs": True}:
                return {"runs": [_run_message(record) for record in self.keeper.runs_of(uid)]}
            if request == {"agents": True}:
                return views_message(self.nodes.views().values())
            if set(request) & set(Answers.WORDS):
                return self.answers.answer(uid, request)
            raise DalsegnoError("unknown request", hint=_HINT)
        except DalsegnoError as error:
            self.refusals.log(f"request of uid {uid}", error.what)
            return {"error": error.what, "hint": error.hint}


def _run_message(record: RunRecord) -> Message:
    message: Message = {"run": record.run, "folder": record.folder, "uid": record.uid, "pid": record.pid}
    return {**message, "given_up": True} if record.given_up else message
