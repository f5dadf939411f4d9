#!/usr/bin/env python3
"""Measure the CPU time that each node costs the coordinator and the controller, within one process.

    benchmarks/scale_costs.py                       256, 1,024, 4,096 and 10,000 nodes; half a minute
    benchmarks/scale_costs.py --nodes 256 --json

CPU time depends little on the load of the machine, so these figures can be compared where those of scale.py cannot.
The code is that of the real programs. Sending, and the work of the kernel for connections, is not included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from scale import NPROC, ScaleTerms
from scale_controller import ScaleSite, job_rows, node_lines

from dalsegno.health.messages import Finding, NodeReport
from dalsegno.health.result import passed
from dalsegno.recovery.act import ActionContext
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.facts import Validation, gather
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.watch import RecoveryLoop, _record_reports, pause_s
from dalsegno.runs.agent.link import Heartbeat, pack_beat
from dalsegno.runs.coordinator.agents.agents import Peer, StartMessages
from dalsegno.runs.coordinator.agents.liveness import BEATS_AT_ONCE, AgentLiveness, Timing
from dalsegno.runs.coordinator.agents.messages import read_hello
from dalsegno.runs.coordinator.generations.events import AgentGone, GenerationStopped, Start
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, advance, confirm_stops
from dalsegno.runs.coordinator.generations.group import Shape, form_group
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.parse.jobs import parse_jobs
from dalsegno.slurm.parse.nodes import NodeParser
from dalsegno.slurm.parse.text import PLAIN
from dalsegno.wire.handshake import Seal
from dalsegno.wire.liveness import Presence

SIZES = (256, 1024, 4096, 10_000)
CHECKS = 24  # number of findings of a node with GPUs
KEY = b"k" * 32
STOPS_AT_ONCE = 32  # confirmed stops that the coordinator handles together
TIMES = 3  # number of measurements, of which the fastest is printed


@dataclass(frozen=True)
class Costs:
    """CPU seconds with one number of nodes."""

    nodes: int
    start_s: float  # the orders that start a generation, sealed
    stop_s: float  # the orders that stop a generation, and all confirmations
    beats_s: float  # one heartbeat from each node, answered
    round_s: float  # one round of the controller: parse Slurm's answers, decide, with nothing to do

    def describe(self) -> str:
        return (
            f"{self.nodes} nodes: start orders {self.start_s:.3f} s, stop {self.stop_s:.3f} s, a heartbeat each "
            f"{self.beats_s:.3f} s, a round of the controller {self.round_s:.3f} s"
        )


def fastest(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of a few calls."""
    times = []
    for _ in range(TIMES):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def measure(nodes: int, folder: Path) -> Costs:
    names = [f"n{number}" for number in range(nodes)]
    shape = Shape(nodes, nodes, NPROC)
    group = form_group(1, shape, names)
    assert group is not None
    terms = ScaleTerms(RunFolder(folder / "scale-1"), shape)
    seals = {name: Seal(KEY, "coordinator", name) for name in names}
    hello = {"run": "scale-1", "probe": 1234, "pid": 1, "found": {"HOSTNAME": "host"}}
    peers = {
        name: Peer(name, read_hello({**hello, "agent": name}), "10.98.12.34", KEY, lambda message: None, lambda: None)
        for name in names
    }

    def start() -> None:
        messages = StartMessages(terms)
        for name in names:
            message = messages.message(Start(name, group, 29500, 0), peers)
            assert message is not None
            seals[name].close(message)

    def stop() -> None:
        run = Run(shape, 100, phase=GenerationPhase.RUNNING, generation=1, ready=tuple(names), group=group)
        run, _ = advance(run, AgentGone(names[0]))
        for name in names[1:]:
            seals[name].close({"stop": 1})
        for first in range(1, nodes, STOPS_AT_ONCE):
            run, _ = confirm_stops(run, [GenerationStopped(name, 1) for name in names[first : first + STOPS_AT_ONCE]])
        assert run.phase is GenerationPhase.GATHERING

    rounds = controller_round(nodes, names, folder)
    rounds()  # the first round records all nodes, so it is not measured
    return Costs(nodes, fastest(start), fastest(stop), min(beats(names) for _ in range(TIMES)), fastest(rounds))


def beats(names: list[str]) -> float:
    """Return the CPU seconds to read and answer a heartbeat of each agent."""
    liveness, spent = AgentLiveness(Timing(), lambda agent: None), 0.0
    liveness.open(0, "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for name in names:
            liveness.expect(name, KEY)
        for first in range(0, len(names), BEATS_AT_ONCE):
            for name in names[first : first + BEATS_AT_ONCE]:
                sender.sendto(pack_beat(KEY, Heartbeat(name, 1)), liveness._socket.getsockname())
            began = time.process_time()
            liveness._take_beats()
            spent += time.process_time() - began
    taken = sum(liveness._last.values())
    liveness.close()
    assert taken == len(names), f"{len(names) - taken} heartbeats were lost"
    return spent


@dataclass(frozen=True)
class CalmAgents:
    """The reports of agents that have found no fault."""

    found: Mapping[str, AgentView]

    def views(self) -> Mapping[str, AgentView]:
        return self.found

    def validations(self) -> Mapping[str, Validation]:
        return {}

    def validating(self) -> Mapping[str, str]:
        return {}


def controller_round(nodes: int, names: list[str], folder: Path) -> Callable[[], object]:
    now, site = time.time(), ScaleSite()
    findings = tuple(Finding(f"check-{check}", passed("no fault"), now) for check in range(CHECKS))
    views = {
        name: AgentView(name, Presence.CONNECTED, now, now, NodeReport(name, "boot-1", findings), "boot-1", True)
        for name in names
    }
    agents, printed, queued = CalmAgents(views), "".join(node_lines(nodes)), "".join(job_rows(nodes))
    store = Journal(folder / f"{nodes}.sqlite")
    context: Any = ActionContext(site.slurm, None, site.target, folder, site.slurm_users)  # type: ignore[arg-type]
    loop = RecoveryLoop(store, context, site.policy(), time.time, lambda work: None)

    parser = NodeParser()

    def one_round() -> None:
        facts = gather(parser.parse(printed), list(parse_jobs(queued, PLAIN).jobs), agents, time.time())
        _record_reports(loop, facts)
        assert loop.round(facts) == []
        pause_s(store.records, facts)

    return one_round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, action="append", help="number of nodes; may be repeated")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dalsegno-scale-"))
    try:
        for nodes in options.nodes or SIZES:
            costs = measure(nodes, folder)
            print(json.dumps(asdict(costs)) if options.json else costs.describe(), flush=True)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
