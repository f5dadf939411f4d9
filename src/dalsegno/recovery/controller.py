"""The controller: one small process on the head node that keeps the coordinators of all runs, hears the nodes and looks
after them.

It may be killed at any moment: coordinators live on, and the next controller goes on from records and journal.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.here import slurm_conf
from dalsegno.printable import logged
from dalsegno.programs import launcher as own_launcher
from dalsegno.recovery.agent_view import views_message
from dalsegno.recovery.complaints import Complaints
from dalsegno.recovery.coordinators import CoordinatorKeeper, Records, RunRecord, Say, check_folder, check_may_ask
from dalsegno.recovery.node_link import NodeLink
from dalsegno.recovery.policy import ControllerSite, Policy
from dalsegno.recovery.user_socket import Answers, UserSocket
from dalsegno.recovery.watch import JOURNAL, NodeWatch
from dalsegno.system.children import allow_many_files
from dalsegno.system.files import locked, make_folder
from dalsegno.wire.frames import Message

# Below the cluster's state folder.
SOCKET, RUNS, LOCK, SECRETS = "run/controller.sock", "controller/runs", "controller/lock", "secret/agents"


def serve(folder: Path, site: ControllerSite, agents_at: str) -> int:
    """Until it is killed; hears node agents at HOST:PORT, if told to."""
    try:
        make_folder(folder / "controller", 0o700)
        allow_many_files()
        with locked(folder / LOCK, "this cluster's controller"):
            controller = Controller(folder, own_launcher(), os.environ, say)
            if agents_at:
                host, _, port = agents_at.rpartition(":")
                controller.nodes.open_when_possible(host.strip("[]"), int(port))
            controller.look_after(site)
            controller.serve()
    except DalsegnoError as error:
        say(f"cannot go on: {error}")
    return 1


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {logged(text)}\n")
    sys.stderr.flush()


class Controller:
    """Answers requests and keeps coordinators. `launcher` are the words before a program's name."""

    def __init__(self, folder: Path, launcher: Sequence[str], env: Mapping[str, str], say: Say) -> None:
        self.selector = selectors.DefaultSelector()
        self.keeper = CoordinatorKeeper(Records(folder / RUNS), launcher, env, self.selector, say)
        self.keeper.begin()
        self.folder, self.say, self.complaints = folder, say, Complaints(say)
        self.nodes = NodeLink(self.selector, folder / SECRETS, slurm_conf(env), say, lambda node: self.ring())
        self.watch: NodeWatch | None = None
        self.answers = Answers(
            folder / JOURNAL,
            self.ring,
            lambda: self.watch.policy if self.watch else Policy(),
            lambda node: self.watch.partitions.get(node, ()) if self.watch else (),
        )
        self.door = UserSocket(folder / SOCKET, self.selector, self.answer, say)
        say(f"controller {os.getpid()} keeps {len(self.keeper.known)} runs")

    def look_after(self, site: ControllerSite) -> None:
        """Look after the nodes from now on, in a thread beside the loop."""
        self.watch = NodeWatch(self.folder, site, self.nodes, self.say, lambda: dict(self.keeper.known))
        self.watch.start()

    def ring(self) -> None:
        if self.watch:
            self.watch.ring()

    def serve(self) -> None:
        while True:
            self.turn()

    def turn(self, most_s: float | None = None) -> None:
        """Wait for the next thing to happen, and see to it."""
        times = [at for at in (self.keeper.wake(), self.door.turn(), self.nodes.wake()) if at is not None]
        waits = [max(at - time.monotonic(), 0.0) for at in times] + ([] if most_s is None else [most_s])
        for key, events in self.selector.select(min(waits, default=None)):
            key.data(events)

    def close(self) -> None:
        """Let go of everything; the coordinators live on."""
        while self.watch and not self.watch.close():
            self.turn(0.01)  # it may be waiting for an answer of ours
        self.answers.close()
        self.door.close()
        self.nodes.close()
        self.selector.close()

    def answer(self, uid: int, request: Message) -> Message:
        """One request of one user: `{"start": FOLDER}`, `{"runs": true}`, `{"agents": true}` or `Answers`'."""
        try:
            if set(request) == {"start"}:
                check_may_ask(uid)
                self.keeper.ask(check_folder(request["start"], uid), uid)
                return {"ok": True}
            if request == {"runs": True}:
                return {"runs": [_tell(record) for record in self.keeper.kept(uid)]}
            if request == {"agents": True}:
                return views_message(self.nodes.views().values())
            if set(request) & set(Answers.WORDS):
                return self.answers.answer(uid, request)
            raise DalsegnoError("the controller does not understand this", hint="ask for `start`, `runs` or `agents`")
        except DalsegnoError as error:
            self.complaints.about(f"a request of uid {uid}", error.what)
            return {"error": error.what, "hint": error.hint}


def _tell(record: RunRecord) -> Message:
    told: Message = {"run": record.run, "folder": record.folder, "uid": record.uid, "pid": record.pid}
    return {**told, "given_up": True} if record.given_up else told
