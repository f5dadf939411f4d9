"""The coordinator of a torchrun: in a thread of the agent on the meeting's host, with its life and its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from dalsegno.jobs.torchrun.keys import Keys
from dalsegno.jobs.torchrun.meeting import LOOPBACK
from dalsegno.jobs.torchrun.names import host_of
from dalsegno.jobs.torchrun.site import JOIN_S, LAST_CALL_S, TorchrunSite, seconds
from dalsegno.launch.agents import Agents
from dalsegno.launch.coordinator import Coordinator
from dalsegno.launch.events import Finish
from dalsegno.launch.generations import Run
from dalsegno.launch.journal import RunEvent
from dalsegno.launch.peers import Peer
from dalsegno.launch.staff import Boss, NoStaff
from dalsegno.launch.telling import Teller, Told
from dalsegno.launch.words import Broken, Word

Talk = Callable[[str], None]


class Hosted:
    """One such thread. `port` is where it listens; `join` waits until it has said good-bye to everybody."""

    def __init__(self, site: TorchrunSite, keys: Keys, talk: Talk) -> None:
        self._site, self._keys, self._talk = site, keys, talk
        self._opened: Future[int] = Future()
        self._coordinator: TorchrunCoordinator | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def open(self) -> int:
        """Start it; OSError if it cannot listen there."""
        self._thread.start()
        return self._opened.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # whoever waits for the port is told; later it is the thread's own end
            if not self._opened.done():
                self._opened.set_exception(error)
            else:
                raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = TorchrunCoordinator(self._site, self._keys, self._talk, self._opened.set_result)
        await self._coordinator.serve()

    def leave(self, signal_name: str) -> None:
        """Our agent was told to end: nobody can go on without us, so all are told, and may still save."""
        self._soon(lambda of: of.leave(signal_name))

    def stop(self, why: str) -> None:
        self._soon(lambda of: of.stop(1, why))

    def _soon(self, do: Callable[[TorchrunCoordinator], None]) -> None:
        loop, coordinator = self._loop, self._coordinator
        if loop is not None and coordinator is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it is over already, and has told everybody
                loop.call_soon_threadsafe(do, coordinator)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class TorchrunCoordinator(Coordinator):
    """Counts as torchrun does, listens where torchrun would, and keeps nothing."""

    def __init__(self, site: TorchrunSite, keys: Keys, talk: Talk, opened: Callable[[int], None]) -> None:
        patience = Patience(site.shape.min_nodes, seconds(site.args, "join_timeout", JOIN_S))
        gather_s = seconds(site.args, "last_call_timeout", LAST_CALL_S)
        self._voice = Voice(site, talk)
        super().__init__(site, patience.work_for, gather_s, self._voice)
        self.run = Run(site.shape, site.max_restarts, literal=True)
        self._terms, self._keys, self._opened = site, keys, opened

    async def open(self) -> None:
        meeting, secret = self._terms.meeting, self._keys.secret
        self.agents = Agents(self._keys.mark, secret, self._terms.timing, self)
        greeting = None if meeting.alone else self._keys.greeting
        self._opened(await self.agents.open(meeting.port, greeting, LOOPBACK if meeting.alone else "0.0.0.0"))

    def _write_state(self, durable: bool) -> bool:
        """Nobody comes after us."""
        return True

    def leave(self, signal_name: str) -> None:
        """Who leaves now is not lost."""
        self._voice.quiet = True
        self.agents.send_all({"leave": signal_name})

    def agent_said(self, peer: Peer, word: Word) -> None:
        """There is no other node to take the place of one that cannot start workers."""
        if isinstance(word, Broken):
            self.stop(1, f"{host_of(peer.name)}: {word.why}")
        else:
            super().agent_said(peer, word)


class Patience(NoStaff):
    """Nobody is asked for: agents come by themselves. Too few for too long end the run, as they end torchrun's."""

    def __init__(self, least: int, join_s: float) -> None:
        super().__init__()
        self._least, self._join_s = least, join_s
        self._short_since: float | None = None
        self._boss: Boss | None = None

    def work_for(self, boss: Boss) -> Patience:
        self._boss = boss
        return self

    def look_after(self) -> None:
        boss, now = self._boss, time.monotonic()
        if boss is None or len(boss.present) >= self._least:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > self._join_s and not boss.closing:
            boss.stop(1, f"{len(boss.present)} of {self._least} nodes came within {self._join_s:.0f} s")


class Voice(Teller):
    """Says the little that people want to know between start and end; torchrun's users look at nothing but output."""

    def __init__(self, site: TorchrunSite, talk: Talk) -> None:
        super().__init__(site)
        self._talk = talk
        self.quiet = False

    def journal(self, event: RunEvent, **what: object) -> None:
        if event == RunEvent.LOST and not self.quiet:
            self._talk(f"lost {host_of(str(what['node']))}: {what['why']}")

    def note(self, text: str) -> None:
        """Of what is imported ahead: nobody asked for it, so nobody is told that it did not work."""

    def generation(self, run: Run) -> None:
        if run.generation > 1 and run.group is not None:
            nodes = len(run.group.places)
            why = f": rank {run.last.rank} on {host_of(run.last.node)} {run.last.what()}" if run.last else ""
            of = f"{run.restarts} of {run.max_restarts} restarts used"
            self._talk(f"starting again on {nodes} node{'s' if nodes > 1 else ''} ({of}){why}")

    def status(self, of: Told) -> None:
        """There is no file to write it to."""

    def ended(self, of: Told, end: Finish) -> None:
        """Each agent says it, on its own node."""
