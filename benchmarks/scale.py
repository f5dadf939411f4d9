#!/usr/bin/env python3
"""Measure a run's coordinator and the controller with thousands of agents: a lost node, CPU, memory, bytes on the wire.

    sudo benchmarks/scale.py                        256, 1,024 and 4,096 agents; some minutes
    sudo benchmarks/scale.py --nodes 256 --seconds 5 --json
    sudo benchmarks/scale.py --part controller
    sudo benchmarks/scale.py --part coordinator --nodes 4096 --node-timeout 1

The coordinator and the controller are the real programs, each in a process of its own. A few processes play the agents:
each agent has its own address in a private network, its own connection, and its own heartbeats. A host is lost like one
with a cut cable: no packet leaves or reaches its address. Players answer at once, so the times are those of the program
and the wire. Hang detection is on, as by default: agents are asked for the activity of their ranks until these have
reported a few steps, or all the time with --no-steps. `scale_controller.py` has the controller's part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import agents
from scale_controller import PORT, ControllerFigures, control, measure_controller

from dalsegno.runs.agent.link import AGENT, COORDINATOR, INTERVAL_S, Heartbeat, beat_key, pack_beat
from dalsegno.runs.coordinator.agents.liveness import DEFAULT_GONE_S, MAX_GONE_S, MIN_GONE_S, Timing
from dalsegno.runs.coordinator.coordinator import Coordinator
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import StandbyMode
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource
from dalsegno.runs.coordinator.site import GenerationLayout, NodeEnv
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.submit.frameworks import ProcessLayout, torch_env
from dalsegno.wire.client import read_frame
from dalsegno.wire.frames import Message, Reader, pack, parse
from dalsegno.wire.handshake import MAX_SEALED_BYTES, ClientHandshake, Session

HEAD = "10.98.255.1"
SPARES = 2
CRASHED, LOST = 3, 5  # number of the agent whose worker is killed, and of the one that is cut off
NPROC = 8  # workers per node
SIZES = (256, 1024, 4096)
STEP_S = 1.0  # duration of a training step; nodes of large runs do not report every step
MAX_ORDER_S, MAX_CPU_PERCENT, MAX_MIB = 1.0, 50.0, 500.0  # limits at all sizes up to the last one in SIZES
LONGEST_S = 300.0


def address(number: int) -> str:
    return f"10.98.{number // 250}.{number % 250 + 1}"


# Coordinator


@dataclass(frozen=True)
class ScaleTerms:
    """A run without Slurm whose agents are played."""

    folder: RunFolder
    shape: Shape
    max_restarts: int = 100
    timing: Timing = field(default_factory=Timing)
    hang_timeout_s: float | None = None  # as by default: the limit is derived from the steps
    standby: StandbyMode = StandbyMode.OFF
    name: str = "scale"
    own_job: int | None = None

    def setup(self) -> Message:
        return {"folder": str(self.folder.root), "gone_s": self.timing.gone_s}

    def node_env(self, seats: GenerationLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
        layout = ProcessLayout(
            run=self.folder.run, hosts=seats.hosts, nproc_per_node=seats.nproc_per_node, port=seats.port,
            restarts=seats.restarts, max_restarts=self.max_restarts,
        )  # fmt: skip
        return torch_env(layout, group_rank, found)


def coordinate(root: Path, nodes: int, node_timeout_s: float) -> None:
    terms = ScaleTerms(RunFolder(root), Shape(nodes, nodes, NPROC), timing=Timing(node_timeout_s))
    asyncio.run(Coordinator(terms, lambda _: NoNodeSource()).serve())


# Agents


class PlayedAgent:
    """One agent: its connection, its heartbeats, and the answers to the coordinator's orders."""

    def __init__(self, number: int, connect: Mapping[str, Any], probe: int) -> None:
        self.number, self.name = number, f"n{number:04d}"
        self.generation = 0
        self.started: dict[int, float] = {}  # generation -> when its order to start workers came
        self.stopped: dict[int, float] = {}
        self.opened: dict[int, float] = {}  # generation -> when the order to open its store came to this agent
        self.ranks: list[int] = []
        self.interval_s, self.report_s = INTERVAL_S, STEP_S
        self.silent = self.mute = False  # cut off; running a script that reports no steps
        self.asked, self._cpu_s = 0, 0.0  # queries for the activity of the ranks, and the CPU time of the last answer
        self._beat = time.time_ns()
        self._reader = Reader(MAX_SEALED_BYTES)
        self._left = b""
        self.sock, self.session = self._dial(connect, probe)
        self._key = beat_key(self.session)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((address(number), 0))
        self._udp.connect((HEAD, connect["port"]))
        self._udp.setblocking(False)

    def _dial(self, connect: Mapping[str, Any], probe: int) -> tuple[socket.socket, Session]:
        sock = socket.socket()
        sock.bind((address(self.number), 0))
        sock.settimeout(60)
        sock.connect((HEAD, connect["port"]))
        handshake, until = ClientHandshake(AGENT, COORDINATOR), time.monotonic() + 60
        greeting = parse(read_frame(sock, 8 << 10, until))
        proof = handshake.answer(greeting, bytes.fromhex(connect["secret"]), connect["run"], self.name)
        hello = {"run": connect["run"], "probe": probe, "pid": self.number + 1, "found": {"HOSTNAME": self.name}}
        opening = {"run": connect["run"], "agent": self.name, **proof}
        sock.sendall(pack(opening) + handshake.session.closer.close(hello))
        session = handshake.finish(parse(read_frame(sock, 8 << 10, until)))
        sock.setblocking(False)
        return sock, session

    def send(self, message: Message) -> None:
        self._left += self.session.closer.close(message)
        self.flush()

    def flush(self) -> None:
        if self._left:
            with contextlib.suppress(BlockingIOError):
                self._left = self._left[self.sock.send(self._left) :]

    def beat(self) -> None:
        self._beat += 1
        try:
            self._udp.send(pack_beat(self._key, Heartbeat(self.name, self._beat)))
            while True:  # the coordinator's answers
                self._udp.recv(512)
        except OSError:
            pass

    def receive(self) -> Iterator[Message]:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        for body in self._reader.bodies(data):
            yield self.session.opener.open(body)

    def answer(self, message: Message) -> None:
        if "setup" in message:
            self.interval_s = float(message["setup"].get("beat_s") or INTERVAL_S)
            self.report_s = max(STEP_S, float(message["setup"].get("report_s") or STEP_S))
        elif "open_store" in message:
            self.opened[message["open_store"]] = time.time()
            self.send({"store": message["open_store"], "port": 29500})
        elif "start" in message:
            self.generation = message["start"]["generation"]
            self.ranks = [worker["rank"] for worker in message["start"]["workers"]]
            self.started[self.generation] = time.time()
        elif "stop" in message:
            self.stopped[message["stop"]] = time.time()
            self.send({"stopped": message["stop"]})
        elif "work" in message:
            self.asked += 1
            self._cpu_s += STEP_S * 5
            self.send(activity_answer(message["work"], self.ranks, self._cpu_s))


def activity_answer(generation: int, ranks: Sequence[int], cpu_s: float) -> Message:
    """Return the answer to a query for the activity of ranks: CPU time, bytes moved, and the use of the GPUs."""
    return {"worked": generation, "ranks": {str(rank): [cpu_s, 1 << 20, 95, 60] for rank in ranks}}


class Players:
    """The agents that one process plays. `turn` must be called often, also while more agents connect."""

    def __init__(self) -> None:
        self.agents: list[PlayedAgent] = []
        self._beat_at: dict[PlayedAgent, float] = {}
        self._step_at: dict[PlayedAgent, float] = {}
        self._listener = socket.socket()  # the coordinator probes this port of every address
        self._listener.bind(("0.0.0.0", 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def connect(self, number: int, connect: Mapping[str, Any]) -> None:
        agent = PlayedAgent(number, connect, self._listener.getsockname()[1])
        self.agents.append(agent)
        self.selector.register(agent.sock, selectors.EVENT_READ, lambda: self._receive(agent))
        now = time.monotonic()
        self._beat_at[agent] = now + random.random() * INTERVAL_S
        self._step_at[agent] = now + random.random() * STEP_S

    def turn(self, timeout_s: float) -> None:
        for key, _ in self.selector.select(timeout_s):
            key.data()
        now = time.monotonic()
        for agent in self.agents:
            if agent.silent:
                continue
            if self._beat_at[agent] <= now:
                self._beat_at[agent] = now + agent.interval_s
                agent.beat()
            trains = agent.generation and agent.generation not in agent.stopped and not agent.mute
            if trains and self._step_at[agent] <= now:
                self._step_at[agent] = now + agent.report_s
                agent.send({"step": int(now), "generation": agent.generation})
            agent.flush()

    def _receive(self, agent: PlayedAgent) -> None:
        if not agent.silent:
            for message in agent.receive():
                agent.answer(message)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._listener.accept()[0].close()


def play(first: int, count: int, connect: Mapping[str, Any]) -> None:
    """Play some agents. Commands come on standard input; each is answered with one line of JSON."""
    players, commands = Players(), list[str]()

    def read_commands() -> None:
        line = os.read(sys.stdin.fileno(), 4096)
        if not line:
            sys.exit()
        commands.extend(line.decode().split())

    players.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, read_commands)
    for number in range(first, first + count):
        players.connect(number, connect)
        players.turn(0)
    while True:
        players.turn(0.01)
        while commands:
            obey(commands.pop(0), players.agents)


def obey(word: str, agents: list[PlayedAgent]) -> None:
    command, _, value = word.partition("=")
    if command == "ready":
        for agent in agents:
            agent.send({"ready": {"warm": True, "seconds": 1.0}})
    elif command == "crash":
        for agent in agents:
            if agent.number == int(value):
                agent.send({"ended": {"generation": agent.generation, "rank": agent.ranks[0], "code": -9}})
    elif command == "mute":
        for agent in agents:
            agent.mute = True
    elif command == "cut":
        for agent in agents:
            agent.silent = agent.silent or agent.number == int(value)
    elif command == "times":
        generation = int(value)
        started = [agent.started[generation] for agent in agents if generation in agent.started]
        stopped = [agent.stopped[generation - 1] for agent in agents if generation - 1 in agent.stopped]
        opened = [agent.opened[generation] for agent in agents if generation in agent.opened]
        asked = [float(agent.asked) for agent in agents]
        print(json.dumps({"started": started, "stopped": stopped, "opened": opened, "asked": asked}), flush=True)


# Measurement


@dataclass
class Measured:
    """The figures of one size."""

    nodes: int
    connected_s: float
    formed_s: float  # first generation: from the last agent ready to the last order to start
    restarted_s: float  # a killed worker: from its report to the last order of the next generation
    stopped_s: float  # a killed worker: from its report to the last order to stop
    ended_s: float  # a killed worker: from the first order to stop to the last confirmation
    detected_s: float  # a lost node: from the cut to its loss in the journal
    ordered_s: float  # a lost node: from its loss in the journal to the last order of the next generation
    recovered_s: float  # a lost node: from the cut to the last order of the next generation
    queries_per_s: float  # queries for the activity of ranks, to all agents together
    restart_cpu_s: float  # CPU time of the coordinator from the killed worker to the next generation
    cpu_percent: float
    memory_mib: float
    kbytes_per_s: float
    false_alarms: int  # lost nodes in the journal, without the one that was cut off
    node_timeout_s: float
    hang_detection: bool
    steps: bool  # whether agents report steps


class Stage:
    """A coordinator and its players."""

    def __init__(self, nodes: int, players: int, node_timeout_s: float) -> None:
        self.nodes, self.root = nodes, Path(tempfile.mkdtemp(prefix="dalsegno-scale-"))
        self.folder = RunFolder(self.root / "scale-1")
        self.folder.root.mkdir()
        everyone = nodes + SPARES
        log = (self.root / "coordinator.log").open("wb")
        size = ["--nodes", str(nodes), "--node-timeout", str(node_timeout_s)]
        self.coordinator = subprocess.Popen(
            [sys.executable, __file__, "--coordinate", str(self.folder.root), *size], stderr=log
        )
        self.until(self.folder.connect.exists)
        connect = self.folder.connect.read_text()
        share = -(-everyone // players)
        self.players = [
            subprocess.Popen(
                [sys.executable, __file__, "--play", f"{first},{min(share, everyone - first)}", connect],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for first in range(0, everyone, share)
        ]  # fmt: skip

    def until(self, true: Any, longest_s: float = LONGEST_S) -> None:
        end = time.monotonic() + longest_s
        while not true():
            if self.coordinator.poll() is not None:
                raise SystemExit("the coordinator ended: " + (self.root / "coordinator.log").read_text()[-2000:])
            if time.monotonic() > end:
                raise SystemExit(f"nothing happened for {longest_s:.0f} s; {self.status()}")
            time.sleep(0.02)

    def tell(self, command: str) -> None:
        for player in self.players:
            assert player.stdin
            player.stdin.write(command + "\n")
            player.stdin.flush()

    def times(self, generation: int) -> dict[str, list[float]]:
        self.tell(f"times={generation}")
        found: dict[str, list[float]] = {"started": [], "stopped": [], "opened": [], "asked": []}
        for player in self.players:
            assert player.stdout
            for key, values in json.loads(player.stdout.readline()).items():
                found[key] += values
        return found

    def wait_for(self, generation: int, longest_s: float = LONGEST_S) -> dict[str, list[float]]:
        """Wait until all nodes of a generation have their order to start."""
        found: dict[str, list[float]] = {}

        def whole() -> bool:
            time.sleep(0.1)
            found.update(self.times(generation))
            return len(found["started"]) >= self.nodes

        self.until(whole, longest_s)
        return found

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.folder.journal.read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.folder.status.read_text())) if self.folder.status.exists() else {}

    def connections(self) -> int:
        with open(f"/proc/{self.coordinator.pid}/net/tcp") as lines:
            port = json.loads(self.folder.connect.read_text())["port"]
            return sum(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)

    def close(self) -> None:
        for process in (*self.players, self.coordinator):
            process.kill()
            process.wait()
        shutil.rmtree(self.root)


def measure(nodes: int, players: int, seconds: float, steps: bool, node_timeout_s: float) -> Measured:
    stage = Stage(nodes, players, node_timeout_s)
    try:
        began = time.time()
        stage.until(lambda: stage.connections() >= nodes + SPARES)
        connected_s = time.time() - began
        time.sleep(1)
        if not steps:
            stage.tell("mute")
        ready = time.time()
        stage.tell("ready")
        formed_s = max(stage.wait_for(1)["started"]) - ready
        time.sleep(2)
        pid = stage.coordinator.pid
        asked, before, since = sum(stage.times(1)["asked"]), usage(pid), time.monotonic()
        time.sleep(seconds)
        after, took = usage(pid), time.monotonic() - since
        queries = (sum(stage.times(1)["asked"]) - asked) / took
        cpu_percent = 100 * (after.cpu_s - before.cpu_s) / took
        kbytes = (after.sent_bytes - before.sent_bytes) / took / 1000
        crashed = time.time()
        stage.tell(f"crash={CRASHED}")
        again = stage.wait_for(2)
        restart_cpu_s = usage(pid).cpu_s - after.cpu_s
        cut = time.time()
        subprocess.run(["ip", "route", "replace", "blackhole", address(LOST), "table", "local"], check=True)
        stage.tell(f"cut={LOST}")
        next_one = stage.wait_for(3)
        losses = {entry["node"]: entry["at"] for entry in stage.journal() if entry["event"] == "lost"}
        lost = losses.pop(f"n{LOST:04d}")
        # The coordinator orders the next store once it has the last confirmation.
        return Measured(
            nodes, connected_s, formed_s, max(again["started"]) - crashed, max(again["stopped"]) - crashed,
            max(again["opened"]) - min(again["stopped"]), lost - cut, max(next_one["started"]) - lost,
            max(next_one["started"]) - cut, queries, restart_cpu_s, cpu_percent, usage(pid).memory_mib, kbytes,
            len(losses), node_timeout_s, ScaleTerms.hang_timeout_s is None, steps,
        )  # fmt: skip
    finally:
        stage.close()


@dataclass(frozen=True)
class Usage:
    """The CPU time and the peak memory of a process, and all bytes sent in the private network, so far."""

    cpu_s: float
    memory_mib: float
    sent_bytes: int


def usage(pid: int) -> Usage:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    lo = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return Usage(cpu_s, int(peak.split()[1]) / 1024, int(lo.split()[9]))


def main() -> int:
    options = parse_options()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    if options.coordinate:
        coordinate(Path(options.coordinate), options.nodes[0], options.node_timeout)
        return 0
    if options.play:
        first, count = map(int, options.play[0].split(","))
        play(first, count, json.loads(options.play[1]))
        return 0
    if options.control:
        return control(Path(options.control))
    if options.play_nodes:
        first, count = map(int, options.play_nodes.split(","))
        agents.play(range(first, first + count), PORT)
    if not options.inside:
        if os.geteuid() != 0:
            print("a private network needs root", file=sys.stderr)
            return 1
        command = ["unshare", "--net", sys.executable, __file__, "--inside", *sys.argv[1:]]
        return subprocess.run(command).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for network in ("10.98.0.0/16", "10.99.0.0/16"):
        subprocess.run(["ip", "route", "add", "local", network, "dev", "lo"], check=True)
    if all([is_good(one) for one in run_parts(options)]):
        return 0
    limits = f"{MAX_ORDER_S:g} s to order a generation, {MAX_CPU_PERCENT:g} % of a core, {MAX_MIB:g} MiB"
    print(f"a limit is exceeded: {limits}, no false alarm", file=sys.stderr)
    return 1


def run_parts(options: argparse.Namespace) -> Iterator[Measured | ControllerFigures]:
    """Measure, print and yield each part and size."""
    for nodes in options.nodes or SIZES:
        if options.part != "controller":
            one = measure(nodes, options.players, options.seconds, not options.no_steps, options.node_timeout)
            subprocess.run(["ip", "route", "del", "blackhole", address(LOST), "table", "local"], check=True)
            print(json.dumps(asdict(one)) if options.json else describe(one), flush=True)
            yield one
        if options.part != "coordinator":
            figures = measure_controller(__file__, nodes, options.players, options.seconds, usage)
            subprocess.run(["iptables", "-w", "-F", "INPUT"], check=True)
            print(json.dumps(asdict(figures)) if options.json else figures.describe(), flush=True)
            yield figures


def is_good(one: Measured | ControllerFigures) -> bool:
    if one.nodes > SIZES[-1]:
        return True  # larger sizes have no limits
    cheap = one.cpu_percent <= MAX_CPU_PERCENT and one.memory_mib <= MAX_MIB
    return cheap and not one.false_alarms and (not isinstance(one, Measured) or one.ordered_s <= MAX_ORDER_S)


def describe(one: Measured) -> str:
    return (
        f"coordinator, {one.nodes} agents: connected {one.connected_s:.1f} s; first generation {one.formed_s:.2f} s; "
        f"killed worker: stopped {one.stopped_s:.2f} s, all confirmed in {one.ended_s:.2f} s, restarted "
        f"{one.restarted_s:.2f} s, CPU time {one.restart_cpu_s:.2f} s; node timeout {one.node_timeout_s:g} s: lost "
        f"node detected {one.detected_s:.2f} s, next generation ordered {one.ordered_s:.2f} s later; "
        f"{one.false_alarms} false alarms; {one.queries_per_s:.0f} queries for activity per second; "
        f"{one.cpu_percent:.0f} % of a core, {one.memory_mib:.0f} MiB, {one.kbytes_per_s:.0f} kB/s"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append", help="number of agents; may be repeated")
    parser.add_argument("--players", type=int, default=4, help="processes that play the agents")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the idle load is measured")
    parser.add_argument(
        "--no-steps", action="store_true", help="the script reports no steps, so agents are asked for its activity"
    )
    parser.add_argument("--node-timeout", type=float, default=DEFAULT_GONE_S, help="the run's node timeout in seconds")
    parser.add_argument("--part", choices=("coordinator", "controller"), help="measure only one of the programs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--coordinate", default="", help=argparse.SUPPRESS)
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--control", default="", help=argparse.SUPPRESS)
    parser.add_argument("--play-nodes", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not MIN_GONE_S <= options.node_timeout <= MAX_GONE_S:
        parser.error(f"a node timeout is between {MIN_GONE_S:g} and {MAX_GONE_S:g} s")
    return options


if __name__ == "__main__":
    sys.exit(main())
