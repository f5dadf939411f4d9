"""Tests of which saved states may be committed and loaded, before and after a node computed wrong gradients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path

from dalsegno.runs.coordinator.agents.messages import CorruptionFound, GrantRequested, StepVerified, read_message
from dalsegno.runs.coordinator.generations.events import AgentGone, AgentJoined, Event, StoreOpened
from dalsegno.runs.coordinator.generations.generations import Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource
from dalsegno.runs.coordinator.saved_state import SavedRun, SavedTrust, read_saved, write_saved
from dalsegno.runs.coordinator.trust import StateTrust
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.wire.frames import Reader, pack

FOUND = CorruptionFound(1, 48, (1,), "wrong gradients in step 48")


class PlayedRun:
    """The part of a coordinator that `StateTrust` uses, with a run on three nodes in its first generation."""

    def __init__(self) -> None:
        self.folder = RunFolder(Path("/runs/r"))
        self.run = Run(Shape(3, 3, 1))
        self.notes: list[str] = []
        self.entries: list[dict[str, object]] = []
        self.left: list[str] = []
        self.saved = 0
        self.tasks: list[Awaitable[None]] = []
        for event in (*map(AgentJoined, "abc"), StoreOpened("a", 1, 5000)):
            self.apply(event)

    def apply(self, event: Event) -> None:
        self.run, _ = advance(self.run, event)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def journal(self, event: RunEvent, **what: object) -> None:
        self.entries.append({"event": event, **what})

    def save_state(self) -> None:
        self.saved += 1

    def continue_without(self, node: str, why: str) -> None:
        self.left.append(node)
        self.apply(AgentGone(node))

    def run_in_background(self, work: Awaitable[None]) -> None:
        self.tasks.append(work)


def trust_of(run: PlayedRun, socket: str = "") -> StateTrust:
    return StateTrust(run, MemoryTable(), socket)  # type: ignore[arg-type]


def test_node_with_wrong_gradients_leaves_and_later_states_are_distrusted() -> None:
    run, source = PlayedRun(), NoNodeSource()
    trust = trust_of(run)
    trust.record_verified(StepVerified(1, 40))
    trust.judge(FOUND, source)
    assert run.left == ["b"] and source.excluded[:1] == ["b"]
    assert trust.state == SavedTrust(granted=2, verified=40, distrusted=(1, 40))
    assert trust.state.env == {"DALSEGNO_TRUSTED": "1:40", "DALSEGNO_VERIFIED": "40"}
    (entry,) = run.entries
    assert (entry["event"], entry["node"], entry["trusted"]) == (RunEvent.CORRUPTION, "b", 40)


def test_generation_with_wrong_gradients_may_no_longer_commit() -> None:
    run = PlayedRun()
    trust = trust_of(run)
    assert trust.answer_grant(GrantRequested(7, 1), False, lambda: True)["granted"]["ok"]
    trust.judge(FOUND, NoNodeSource())
    assert not trust.answer_grant(GrantRequested(8, 1), False, lambda: True)["granted"]["ok"]


def test_verdict_without_a_wrong_rank_is_only_noted() -> None:
    run = PlayedRun()
    trust = trust_of(run)
    trust.judge(CorruptionFound(1, 48, (), "several nodes differ"), NoNodeSource())
    assert run.notes == ["several nodes differ"] and run.left == [] and trust.state == SavedTrust()


def test_verdict_of_an_earlier_generation_is_ignored() -> None:
    run = PlayedRun()
    trust_of(run).judge(CorruptionFound(0, 48, (1,), "late"), NoNodeSource())
    assert run.left == [] and run.entries == []


def test_commit_is_refused_if_the_state_cannot_be_written() -> None:
    trust = trust_of(PlayedRun())
    answer = trust.answer_grant(GrantRequested(7, 1), False, lambda: False)
    assert not answer["granted"]["ok"] and trust.state.granted == 0


def test_successor_knows_which_states_are_distrusted(tmp_path: Path) -> None:
    run, trust = Run(Shape(1, 1, 1)), SavedTrust(2, 40, (1, 40))
    write_saved(tmp_path / "state", SavedRun(run, trust=trust))
    saved = read_saved(tmp_path / "state", run)
    assert saved is not None and saved.trust == trust
    memory = MemoryTable()
    StateTrust(PlayedRun(), memory, "").restore(saved.trust)  # type: ignore[arg-type]
    assert memory.distrusted == 1


def test_messages_of_workers_about_gradients_are_parsed() -> None:
    found = {"corruption": {"step": 48, "ranks": [1], "text": "wrong\ngradients"}, "generation": 3}
    assert read_message(found) == CorruptionFound(3, 48, (1,), "wrong\\ngradients")
    assert read_message({"verified": 40, "generation": 3}) == StepVerified(3, 40)


def test_controller_is_asked_to_drain_the_node(tmp_path: Path) -> None:
    run, asked = PlayedRun(), list[object]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(Reader().feed(await reader.read(65536)))
        writer.write(pack({"error": "you have no run"}))
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(serve, tmp_path / "sock")
        trust_of(run, str(tmp_path / "sock")).judge(FOUND, NoNodeSource())
        await asyncio.gather(*run.tasks)
        server.close()

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(main())
    assert asked == [{"corrupt": {"run": "r", "node": "b", "text": FOUND.text}}]
    assert run.notes == ["the controller was not asked to drain b: you have no run"]
