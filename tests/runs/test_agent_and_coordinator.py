"""Real agents and a real coordinator on one machine."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dalsegno.runs import journal
from dalsegno.runs.agent.link import CoordinatorLink, fallback_ports
from dalsegno.runs.coordinator.agents.agents import Peer
from dalsegno.runs.coordinator.agents.hangs import HangWatch
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.agents.messages import AgentHello, GrantRequested
from dalsegno.runs.coordinator.coordinator import Coordinator
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource
from dalsegno.runs.coordinator.saved_state import SavedRun, read_saved, write_saved
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunPhase
from dalsegno.system import children
from dalsegno.train.memory.files import sweep
from dalsegno.why.run import explain_run
from tests.runs.played import in_loop, played
from tests.runs.small_site import SmallSite
from tests.system.test_files import disk_calls

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

SOURCE = str(Path(__file__).parents[2] / "src")
PYTHON_39 = next((Path.home() / ".pyenv" / "versions").glob("3.9.*/bin/python"), None)


@in_loop
async def test_run_completes(tmp_path: Path):
    async with played(tmp_path, "print('rank', rank)", "n1", "n2") as run:
        assert await run.ends() == 0
        assert [run.log(rank)[1] for rank in (0, 1)] == ["rank 0", "rank 1"]
        assert sorted(run.who(rank)[1] for rank in (0, 1)) == ["n1", "n2"]
        assert (run.status.phase, run.status.exit_code, run.status.restarts) == (RunPhase.ENDED, 0, 0)
        assert not run.folder.state.exists(), "no state is left to resume from"
        assert [agent.wait(60) for agent in run.agents.values()] == [0, 0] and run.processes() == []


@in_loop
async def test_killed_worker_starts_a_new_generation_on_all_nodes(tmp_path: Path):
    async with played(tmp_path, "wait() if generation == 1 else None", "n1", "n2") as run:
        await run.until_runs()
        os.kill(run.who(1)[0], signal.SIGKILL)
        assert await run.ends() == 0
        assert (run.status.generation, run.status.restarts, run.status.lost_nodes) == (2, 1, 0)
        assert all(run.who(rank, 2) != run.who(rank) for rank in (0, 1))
        assert children.start_ticks(run.who(0)[0]) is None, "the other worker was ended too"


@in_loop
async def test_all_output_of_nodes_without_the_run_folder_arrives_although_generations_are_short(tmp_path: Path):
    script = """
        for number in range(5000):
            print(generation, rank, number, "x" * 80)
        if generation == 1:
            wait() if rank == 0 else os.kill(os.getpid(), 9)
        """
    async with played(tmp_path, script, "n1", "n2", folder_is_shared=False) as run:
        assert await run.ends() == 0
        for generation, rank in ((1, 1), (2, 0), (2, 1)):
            lines = [f"{generation} {rank} {number} {'x' * 80}" for number in range(5000)]
            assert run.log(rank, generation)[1:] == lines
        assert [agent.wait(60) for agent in run.agents.values()] == [0, 0]


@in_loop
async def test_same_traceback_twice_ends_the_run_and_is_reported(tmp_path: Path):
    async with played(tmp_path, "raise ValueError('bad batch') if rank else wait()", "n1", "n2") as run:
        assert await run.ends() == 1
        assert run.status.report.splitlines()[-1] == "ValueError: bad batch"
        assert "the same failure as before" in run.status.message and run.status.generation == 2


@in_loop
async def test_killed_agent_is_replaced_by_a_spare(tmp_path: Path):
    async with played(tmp_path, "wait()", "n1", "n2") as run:
        await run.until_runs()
        run.join("spare")
        await run.until(lambda: run.events().count("ready") == 3)
        _, lost = run.who(0)
        pid, _ = run.who(0)
        run.agents[lost].kill()
        await run.until_runs(2)
        assert children.start_ticks(pid) is None, "the workers died with their agent"
        assert run.who(0, 2)[1] == "spare" and run.who(1, 2)[1] == run.who(1)[1], "the others keep their ranks"
        saved = read_saved(run.folder.state, Run(Shape(2, 2, 1)))
        assert saved and saved.used == ("n1", "n2", "spare"), "the memory of the lost node is remembered"
        run.go.touch()
        assert await run.ends() == 0
        assert (run.status.restarts, run.status.lost_nodes) == (0, 1)


@in_loop
async def test_killed_warm_parent_is_replaced_on_the_same_node(tmp_path: Path):
    async with played(tmp_path, "wait()", "n1", "n2") as run:
        await run.until_runs()
        (parent,) = [pid for pid in children.descendants(run.agents["n1"].pid) if pid != run.who(0)[0]][:1]
        os.kill(parent, signal.SIGKILL)
        await run.until_runs(2)
        run.go.touch()
        assert await run.ends() == 0 and "cold" in run.events()


@in_loop
async def test_successor_of_a_killed_coordinator_finds_the_workers_running(tmp_path: Path):
    async with played(tmp_path, "wait()") as run:
        first = await run.coordinate_elsewhere()
        run.join("n1", "n2")
        await run.until_runs()
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        before = [run.who(rank) for rank in (0, 1)]
        await run.coordinate()
        await run.until(lambda: "came back" in run.events())
        # The first coordinator may have been killed before it wrote its last status.
        await run.until(lambda: len(run.status.nodes) == 2 and run.status.phase is RunPhase.RUNNING)
        assert run.status.generation == 1
        run.go.touch()
        assert await run.ends() == 0
        assert [run.who(rank) for rank in (0, 1)] == before and len(run.log(0)) == 1
        assert "came back" in run.events() and run.log(0, 2) == []


class Squatter:
    """A process on the ports of a dead coordinator that accepts connections and sends nothing."""

    def __init__(self, *ports: int) -> None:
        self._sockets = [socket.create_server(("0.0.0.0", port)) for port in ports]

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@in_loop
async def test_agents_find_a_restarted_coordinator_whose_port_was_taken(tmp_path: Path):
    async with played(tmp_path, "wait()") as run:
        first = await run.coordinate_elsewhere()
        run.join("n1", "n2")
        await run.until_runs()
        connect = json.loads(run.folder.connect.read_text())
        next_port, *_ = fallback_ports(bytes.fromhex(connect["secret"]))
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        squatter = Squatter(connect["port"])
        before = [run.who(rank) for rank in (0, 1)]
        await run.coordinate()
        await run.until(lambda: "came back" in run.events())
        await run.until(lambda: len(run.status.nodes) == 2 and run.status.phase is RunPhase.RUNNING)
        assert json.loads(run.folder.connect.read_text())["port"] == next_port
        assert run.status.generation == 1 and [run.who(rank) for rank in (0, 1)] == before
        run.go.touch()
        assert await run.ends() == 0 and "lost" not in run.events()
        squatter.close()


def test_fallback_ports_depend_on_the_run():
    ports = fallback_ports(b"a" * 32)
    assert len(set(ports)) == 4 and all(20_000 <= port < 32_000 for port in ports)
    assert ports == fallback_ports(b"a" * 32) and not set(ports) & set(fallback_ports(b"b" * 32))


@in_loop
async def test_worker_end_without_a_coordinator_is_reported_to_the_next(tmp_path: Path):
    async with played(tmp_path, "wait()") as run:
        first = await run.coordinate_elsewhere()
        run.join("n1", "n2")
        await run.until_runs()
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
        run.go.touch()
        await run.until(lambda: all(children.start_ticks(run.who(rank)[0]) is None for rank in (0, 1)))
        await run.coordinate()
        assert await run.ends() == 0


@in_loop
async def test_cancelled_run_leaves_nothing_behind(tmp_path: Path):
    script = """
    import subprocess
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wait()
    """
    async with played(tmp_path, script, "n1", "n2") as run:
        await run.until_runs()
        run.folder.cancel.touch()
        assert await run.ends() == 143
        assert [agent.wait(60) for agent in run.agents.values()] == [0, 0]
        assert run.processes() == [] and run.status.message == "cancelled"


@in_loop
async def test_stopped_agent_on_a_live_host_is_not_lost(tmp_path: Path):
    timing = Timing(gone_s=0.6)
    async with played(tmp_path, "wait()", "n1", "n2", timing=timing) as run:
        await run.until_runs()
        run.agents["n1"].send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * timing.gone_s)  # the test observes this period
        run.agents["n1"].send_signal(signal.SIGCONT)
        run.go.touch()
        assert await run.ends() == 0
        assert "lost" not in run.events() and run.status.generation == 1


@in_loop
async def test_only_workers_of_the_present_generation_may_commit(tmp_path: Path):
    script = """
    sys.path.insert(0, %r)
    from dalsegno.wire.frames import Reader, send
    def may_commit(generation):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\\0" + os.environ["DALSEGNO_AGENT"])
        send(sock, {"step": 1, "generation": generation})
        send(sock, {"grant": generation})
        return next(Reader().feed(sock.recv(4096)))["granted"]
    print(may_commit(generation), may_commit(generation - 1), may_commit(generation + 1))
    """
    async with played(tmp_path, script % SOURCE, "n1", shape=Shape(1, 1, 1)) as run:
        assert await run.ends() == 0
        assert run.log(0)[1] == "True False False"


@in_loop
async def test_invalid_worker_message_does_not_end_the_agent(tmp_path: Path):
    script = """
    sys.path.insert(0, %r)
    from dalsegno.wire.frames import send
    if generation == 1:
        for nonsense in ({"grant": "soon"}, {"grant": None}, {"step": "one", "generation": 1}, {"step": None}):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect("\\0" + os.environ["DALSEGNO_AGENT"])
            send(sock, nonsense)
        send(sock, {"grant": 1})
        sock.settimeout(60)
        assert sock.recv(4096)
    """
    async with played(tmp_path, script % SOURCE, "n1", shape=Shape(1, 1, 1), max_restarts=0) as run:
        task = asyncio.ensure_future(run.ends())
        await run.until(lambda: task.done() or "lost" in run.events())
        assert "lost" not in run.events() and task.done() and task.result() == 0


@in_loop
async def test_commit_is_denied_when_the_coordinator_dies(tmp_path: Path):
    script = """
    sys.path.insert(0, %r)
    from dalsegno.wire.frames import Reader, send
    wait()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect("\\0" + os.environ["DALSEGNO_AGENT"])
    send(sock, {"grant": generation})
    print("asked")
    print(next(Reader().feed(sock.recv(4096)))["granted"])
    time.sleep(60)
    """
    async with played(tmp_path, script % SOURCE, shape=Shape(1, 1, 1)) as run:
        coordinator = await run.coordinate_elsewhere()
        run.join("n1")
        await run.until_runs(ranks=1)
        os.kill(coordinator, signal.SIGSTOP)
        run.go.touch()
        await run.until(lambda: "asked" in run.log(0))
        os.kill(coordinator, signal.SIGKILL)
        os.waitpid(coordinator, 0)
        await run.until(lambda: len(run.log(0)) == 3)
        assert run.log(0)[2] == "False"


@in_loop
async def test_agent_whose_warm_parent_died_is_reset(tmp_path: Path):
    """Orders in transit belong to a generation that is over. The next orders follow the reset."""
    async with played(tmp_path, "wait()", shape=Shape(1, 1, 1)) as run:
        await run.coordinate()
        connect = json.loads(run.folder.connect.read_text())
        link = CoordinatorLink(bytes.fromhex(connect["secret"]), ["127.0.0.1"], connect["port"], "n1")
        hello = {"run": run.folder.run, "probe": 1, "found": {}, "generation": 0, "stopped": 0, "reports": []}
        assert await asyncio.to_thread(link.connect, hello)
        link.send({"ready": {"warm": True}})
        link.send({"cold": "its warm parent was killed"})
        heard: list[str] = []
        with contextlib.suppress(asyncio.TimeoutError):
            while "reset" not in heard:
                messages = await asyncio.wait_for(asyncio.to_thread(link.receive), 60.0)
                heard += [word for message in messages for word in message]
        link.close()
        assert heard == ["setup", "open_store", "reset"]


@in_loop
async def test_hanging_run_saves_all_stacks_and_restarts_at_once(tmp_path: Path):
    script = "def stands_still():\n    time.sleep(600)\nstands_still() if generation == 1 else None"
    async with played(tmp_path, script, "n1", "n2", hang_timeout_s=3.0) as run:
        # all agents answer, so the timeout is not reached
        run.coordinator.hangs = HangWatch(run.coordinator, 3.0, stacks_s=1000)
        assert await run.ends() == 0
        assert all("in stands_still" in run.folder.stacks(1, rank).read_text() for rank in (0, 1))
        assert (run.status.generation, run.status.restarts) == (2, 1)


@in_loop
async def test_idle_rank_is_reported_when_another_has_returned(tmp_path: Path):
    """The run continues, because only its user knows what the rank waits for."""
    async with played(tmp_path, "time.sleep(600) if rank else None", "n1", "n2") as run:
        run.coordinator.hangs = HangWatch(run.coordinator, 0, idle_s=1.0)
        await run.until_runs()
        await run.until(lambda: "idle" in run.events())
        (idle,) = [entry for entry in journal.read(run.folder.journal) if entry["event"] == "idle"]
        assert (idle["returned"], list(idle["ranks"])) == (1, ["1"])
        assert "1 rank has returned, but rank 1 on n" in idle["text"]
        assert "train.py" in Path(idle["stacks"]).read_text()
        found = explain_run(run.status, list(journal.read(run.folder.journal)))
        assert "hangs: 1 rank has returned, but rank 1" in found.sentence
        assert run.coordinator.run.phase is GenerationPhase.RUNNING
    sweep(run.folder.run)  # the agents of the run were killed


@in_loop
async def test_run_whose_ranks_are_all_idle_is_reported_until_one_works(tmp_path: Path):
    script = """
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.2)
    while not os.path.exists(sys.argv[1] + ".end"):
        pass
    """
    async with played(tmp_path, script, "n1", "n2") as run:
        run.coordinator.hangs = HangWatch(run.coordinator, None, all_idle_s=1.0)
        await run.until(lambda: "idle" in run.events())
        entries = list(journal.read(run.folder.journal))
        (idle,) = [entry for entry in entries if entry["event"] == "idle"]
        assert (idle["returned"], list(idle["ranks"])) == (0, ["0", "1"])
        assert "no step and no output, and all 2 ranks have been idle for" in idle["text"]
        assert "train.py" in Path(idle["stacks"]).read_text()
        assert "hangs: no step and no output" in explain_run(run.status, entries).sentence
        run.go.touch()
        await run.until(lambda: run.events().count("idle") == 2)
        assert "is training" in explain_run(run.status, list(journal.read(run.folder.journal))).sentence
        Path(f"{run.go}.end").touch()
        assert await run.ends() == 0 and run.status.restarts == 0, "it was not ended"


@in_loop
async def test_silent_agent_does_not_delay_the_restart_of_a_hanging_run(tmp_path: Path):
    async with played(tmp_path, "time.sleep(600) if generation == 1 else None", "n1", "n2") as run:
        await run.until_runs()
        run.agents["n1"].send_signal(signal.SIGSTOP)
        run.coordinator.hangs = HangWatch(run.coordinator, 1.0, stacks_s=0.2)
        await run.until(lambda: run.coordinator.run.phase is GenerationPhase.STOPPING)
        run.agents["n1"].send_signal(signal.SIGCONT)
        assert await run.ends() == 0


@in_loop
async def test_elastic_run_starts_with_available_nodes_and_grows(tmp_path: Path):
    async with played(tmp_path, "wait()", "n1", gather_s=0.05, shape=Shape(1, 2, 1), max_restarts=0) as run:
        await run.until_runs(1, ranks=1)
        run.join("n2")
        await run.until_runs(2, ranks=2)
        run.go.touch()
        assert await run.ends() == 0 and run.status.restarts == 0


@in_loop
async def test_leftovers_of_a_killed_agent_are_swept_before_workers_start(tmp_path: Path):
    """A daemon forked by a worker, without an exec, still has the environment of the warm parent."""
    script = """
    if generation == 1 and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("daemon", os.getpid(), flush=True)
            time.sleep(60)
        os._exit(0)
    wait()
    """
    async with played(tmp_path, script, "n1", shape=Shape(1, 1, 1)) as run:
        await run.until(lambda: any("daemon" in line for line in run.log(0)))
        daemon = int(next(line for line in run.log(0) if "daemon" in line).split()[1])
        run.agents["n1"].kill()
        try:
            await run.until(lambda: "lost" in run.events())
            run.join("n1")
            await run.until_runs(2, ranks=1)
            assert children.start_ticks(daemon) is None
        finally:
            children.end([process for process in children.find(lambda pid: pid == daemon)])


@pytest.mark.skipif(PYTHON_39 is None, reason="no Python 3.9 is installed")
@in_loop
async def test_agent_and_workers_run_on_python_3_9(tmp_path: Path):
    script = "print(sys.version_info[:2])"
    async with played(tmp_path, script, python=str(PYTHON_39), shape=Shape(1, 1, 1)) as run:
        await run.coordinate()
        run.join("n1", python=str(PYTHON_39))
        assert await run.ends() == 0
        assert run.log(0)[1] == "(3, 9)"


class Callers(NoNodeSource):
    """A node source whose agents never connect."""

    called: frozenset[str] = frozenset()

    async def recall_agents(self, nodes: Collection[str]) -> set[str]:
        self.called = frozenset(nodes)
        return set()


def test_successor_completes_an_interrupted_shutdown(tmp_path: Path):
    """The successor also sweeps what the previous coordinator would have swept."""
    staff = Callers()
    site = SmallSite(RunFolder(tmp_path))
    ended = Run(site.shape, site.max_restarts, phase=GenerationPhase.ENDED, generation=1, exit_code=3, why="as it was")
    write_saved(site.folder.state, SavedRun(ended, used=("n1", "n3")))

    async def serve() -> int:
        return await asyncio.wait_for(Coordinator(site, lambda control: staff).serve(), 60.0)

    assert asyncio.run(serve()) == 3 and staff.called == {"n1", "n3"}


@in_loop
async def test_unreadable_state_restarts_the_run_and_releases_its_jobs(tmp_path: Path):
    async with played(tmp_path, "print('rank', rank)") as run:
        run.folder.state.write_text("{")
        run.folder.connect.write_text(json.dumps({"secret": "00" * 32, "port": 1}))
        given_back: list[int] = []

        class Staffed(NoNodeSource):
            async def release_all(self, code: int | None = None) -> None:
                given_back.append(len(given_back))

        run.task = asyncio.ensure_future(Coordinator(run.site, lambda control: Staffed()).serve())
        await run.until(lambda: "began" in run.events())
        assert given_back == [0]
        assert json.loads(run.folder.connect.read_text())["secret"] != "00" * 32, (
            "old agents must not find this coordinator"
        )
        (note,) = [entry for entry in journal.read(run.folder.journal) if entry["event"] == "note"]
        assert f"scancel --name={run.folder.run}" in str(note["text"])
        run.join("n1", "n2")
        assert await run.ends() == 0


def test_full_disk_does_not_end_the_run(tmp_path: Path):
    site = SmallSite(RunFolder(tmp_path / "gone"))
    coordinator = Coordinator(site, lambda control: NoNodeSource())
    coordinator.save_state()
    coordinator.journal(RunEvent.BEGAN)
    coordinator.note("a note")


def test_commit_is_allowed_only_after_it_is_saved(tmp_path: Path):
    """Otherwise a successor could let an earlier generation commit over it."""
    site = SmallSite(RunFolder(tmp_path / "gone"))
    coordinator = Coordinator(site, lambda control: NoNodeSource())
    coordinator.run = Run(Shape(1, 1, 1), generation=3)
    sent: list[Any] = []
    peer = Peer("n1", AgentHello("n1", 1), "127.0.0.1", b"", sent.append, lambda: None)
    coordinator.agent_message(peer, GrantRequested(7, 3))
    assert sent == [{"granted": {"number": 7, "ok": False, "why": "the run's folder cannot be written"}}]
    site.folder.root.mkdir()
    calls = disk_calls(lambda: coordinator.agent_message(peer, GrantRequested(8, 3)))
    assert calls == ["fsync", "replace", "fsync of a folder"]
    assert sent[1] == {"granted": {"number": 8, "ok": True, "why": ""}}
    saved = read_saved(site.folder.state, Run(Shape(1, 1, 1)))
    assert saved is not None and saved.trust.granted == 3
