#!/usr/bin/env python3
"""Measure the cost of many node agents for the controller, and how soon it detects a lost host.

    sudo benchmarks/agents.py                       256 agents, about a minute; prints figures
    sudo benchmarks/agents.py --nodes 64 --seconds 3 --deaths 2 --json

One process simulates the agents, each with its own address in a private network. A rule that drops all packets of
a host simulates its loss, like a cut cable.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dalsegno.health.messages import BEAT, Finding
from dalsegno.health.result import passed
from dalsegno.health.wire import BEAT_S, NodeHello
from dalsegno.node_agent.agent import AgentAddress, ControllerLink
from dalsegno.node_agent.findings import Findings
from dalsegno.recovery.agents.probes import NodeAddress
from dalsegno.recovery.agents.table import AgentTable
from dalsegno.recovery.agents.view import Presence

HEAD = "10.99.255.1"
CHECKS = 24  # number of checks on a node with GPUs
CHANGE_S = 10.0  # seconds between two changes of a finding on each node
DIALS_PER_S = 250  # connections that one process opens per second
MOST_CPU_PERCENT, MOST_MIB, MOST_SEEN_S = 10.0, 150.0, 2.0


def address(number: int) -> str:
    return f"10.99.{number // 250}.{number % 250 + 1}"


def secret(node: str) -> bytes:
    return f"the secret of {node}, long enough for all".encode()


# Agents


@dataclass(eq=False)
class Player:
    """One simulated agent."""

    number: int
    selector: selectors.BaseSelector
    port: int
    beat_at: float = 0.0
    change_at: float = 0.0
    link: ControllerLink = field(init=False)
    findings: Findings = field(init=False)

    def __post_init__(self) -> None:
        node = f"n{self.number}"
        self.findings = Findings(node, "boot-1")
        address = AgentAddress(HEAD, self.port, secret(node), NodeHello(node, "boot-1", 1.0))
        self.link = ControllerLink(address, self.selector, lambda message: None, self.turned)
        for check in range(CHECKS):
            self.findings.note(Finding(f"check-{check}", passed("no fault"), time.time()))

    def turned(self, up: bool) -> None:
        self.findings.begin_again()
        self.beat_at = time.monotonic() + random.random() * BEAT_S

    def wake(self, now: float) -> float:
        due = self.link.wake(now)
        if not self.link.can_send():
            return due if due is not None else now + BEAT_S
        if now >= self.change_at:
            self.change_at = now + CHANGE_S * (0.5 + random.random())
            self.findings.note(Finding("check-0", passed(f"at {now}"), time.time()))
        if now >= self.beat_at:
            self.beat_at = now + BEAT_S
            for message in self.findings.messages(now):
                self.link.send(message, now)
            self.link.send(BEAT, now)
        return self.beat_at


def play(numbers: range, port: int) -> None:
    selector = selectors.DefaultSelector()
    dial_from_own_address()
    players = [Player(number, selector, port) for number in numbers]
    due = {player: time.monotonic() + place / DIALS_PER_S for place, player in enumerate(players)}
    while True:
        now = time.monotonic()
        for player, at in due.items():
            if at <= now:
                Source.address = address(player.number)
                due[player] = player.wake(now)
        for key, events in selector.select(max(min(min(due.values()) - time.monotonic(), 0.01), 0.002)):
            key.data(events, time.monotonic())


class Source(socket.socket):
    """A socket that connects from the address of the current agent."""

    address = ""

    def connect_ex(self, to: object) -> int:
        self.bind((Source.address, 0))
        return super().connect_ex(to)  # type: ignore[arg-type]


def dial_from_own_address() -> None:
    socket.socket = Source  # type: ignore[misc]


# Controller


@dataclass
class Held:
    """The figures that are measured with one number of nodes."""

    nodes: int
    connected_s: float
    cpu_percent: float
    memory_mib: float
    seen_s: list[float]
    false_alarms: int

    @property
    def good(self) -> bool:
        within = self.cpu_percent <= MOST_CPU_PERCENT and self.memory_mib <= MOST_MIB
        return within and max(self.seen_s, default=0.0) <= MOST_SEEN_S and self.false_alarms == 0


class Controller:
    """The part of the controller that serves the agents, in an event loop of its own."""

    def __init__(self, nodes: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.agents = AgentTable(self.selector, secret)
        self.port = self.agents.open(HEAD, 0)
        self.agents.expect({f"n{number}": NodeAddress(address(number), 6818) for number in range(nodes)})

    def until(self, true: Callable[[], bool], most_s: float) -> float:
        began = time.monotonic()
        while not true() and time.monotonic() - began < most_s:
            due = self.agents.wake() or 0.0
            for key, events in self.selector.select(max(min(due - time.monotonic(), 0.5), 0.0)):
                key.data(events)
        return time.monotonic() - began

    def all_connected(self) -> bool:
        return all(view.presence is Presence.CONNECTED for view in self.agents.views().values())

    def lost(self) -> int:
        """Count lost agents. Silence alone does not count, because the agents share one process that may be delayed."""
        return sum(view.presence in (Presence.GONE, Presence.AGENT_DEAD) for view in self.agents.views().values())


def measure(nodes: int, seconds: float, deaths: int) -> Held:
    controller = Controller(nodes)
    players = subprocess.Popen([sys.executable, __file__, "--play", str(controller.port), "--nodes", str(nodes)])
    try:
        connected_s = controller.until(controller.all_connected, 60)
        if not controller.all_connected():
            raise SystemExit(f"not all agents have connected within {connected_s:.0f} s")
        controller.until(lambda: False, 2)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        controller.until(lambda: False, seconds)
        after, took = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
        cpu = 100 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / took
        alarms = controller.lost()
        seen = [kill(controller, number * 7 % nodes) for number in range(deaths)]
        alarms += controller.lost() - deaths
        return Held(nodes, connected_s, cpu, memory_mib(), seen, alarms)
    finally:
        players.kill()
        players.wait()


def kill(controller: Controller, number: int) -> float:
    """Cut off a host, and return the seconds until the controller declares it gone; about 10 if it does not."""
    controller.until(lambda: False, random.random())
    node = f"n{number}"
    cut_off(number)
    return controller.until(lambda: controller.agents.view(node).presence is Presence.GONE, 10)


def cut_off(number: int) -> None:
    """Drop all packets from and to a host."""
    for way in ("-s", "-d"):
        subprocess.run(["iptables", "-w", "-I", "INPUT", way, address(number), "-j", "DROP"], check=True)


def memory_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> int:
    options = parse_options()
    if options.play:
        play(range(options.nodes), options.play)
    if not options.inside:
        if os.geteuid() != 0:
            print("a private network needs root", file=sys.stderr)
            return 1
        return subprocess.run(["unshare", "--net", sys.executable, __file__, "--inside", *sys.argv[1:]]).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "route", "add", "local", "10.99.0.0/16", "dev", "lo"], check=True)
    held = measure(options.nodes, options.seconds, options.deaths)
    print(json.dumps(vars(held)) if options.json else describe(held))
    return 0 if held.good else 1


def describe(held: Held) -> str:
    seen = ", ".join(f"{each:.2f}" for each in held.seen_s)
    return (
        f"{held.nodes} agents: all connected after {held.connected_s:.1f} s; {held.cpu_percent:.1f} % of a core "
        f"(at most {MOST_CPU_PERCENT:g}), {held.memory_mib:.0f} MiB (at most {MOST_MIB:g})\n"
        f"a lost host is detected after {seen} s (at most {MOST_SEEN_S:g}); {held.false_alarms} false alarms"
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the load is measured")
    parser.add_argument("--deaths", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--play", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
