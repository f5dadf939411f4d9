"""Tests of an agent in its own process with the controller's side: everything is real except the checks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.health.messages import GpuReading
from dalsegno.health.result import Result, Verdict, passed
from dalsegno.recovery.agents.probes import NodeAddress
from dalsegno.recovery.agents.table import OrderAnswer
from dalsegno.recovery.agents.view import AgentView
from dalsegno.system.children import descendants, start_ticks
from dalsegno.wire.liveness import Presence
from tests.recovery.played_agents import Scene, secret_of

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part
ROOT = Path(__file__).parents[2]
RUN = """
import os, sys
from pathlib import Path
from dalsegno.node_agent.agent import NodeAgent, parse_options
from dalsegno.health.wire import read_secret
from tests.node_agent.played_duties import Played, do
options = parse_options(sys.argv[1:])
NodeAgent(options, read_secret(options.secret), Played, do, check_s=float(os.environ["CHECK_S"])).serve()
"""


class Stage(Scene):
    """The controller's side, and agents as processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.settings: dict[str, object] = {}

    def set(self, **settings: object) -> None:
        self.agents.expect({"gpu-1": NodeAddress("127.0.0.1")}, {"gpu-1": settings})

    def start(self, secret: bytes | None = None, check_s: float = 60.0) -> subprocess.Popen[bytes]:
        path = self.folder / "secret"
        path.write_bytes(secret or secret_of("gpu-1") or b"")
        options = {"node": "gpu-1", "controller": f"127.0.0.1:{self.port}", "secret": str(path), "boot-id": "boot-1"}
        argv = [word for name, value in options.items() for word in (f"--{name}", value)]
        env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": os.defpath, "CHECK_S": str(check_s)}
        with open(self.folder / "log", "ab") as log:
            self.processes.append(subprocess.Popen([sys.executable, "-c", RUN, *argv], env=env, stderr=log))
        return self.processes[-1]

    @property
    def view(self) -> AgentView:
        return self.agents.view("gpu-1")

    def result(self, check: str) -> Callable[[], Result | None]:
        def found() -> Result | None:
            findings = self.view.report.findings if self.view.report else ()
            return next((each.result for each in findings if each.check == check), None)

        return found

    def order(self, do: str, timeout_s: float = 60.0, **arguments: str) -> OrderAnswer:
        answers: list[OrderAnswer] = []
        self.agents.order("gpu-1", do, answers.append, timeout_s=timeout_s, arguments=arguments)
        return self.until(lambda: answers)[0]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        super().close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    one = Stage(tmp_path)
    one.set()
    yield one
    one.close()


@pytest.mark.waits
def test_the_agent_connects_reports_and_sends_heartbeats(stage: Stage):
    stage.start()
    stage.until(stage.result("good"))
    assert stage.result("good")() == passed("fine")
    assert stage.view.report is not None
    assert stage.view.boot == "boot-1" and [gpu.uuid for gpu in stage.view.report.gpus] == ["GPU-1"]
    assert stage.until(lambda: stage.view.readings) == (GpuReading(0, 41.0, 512, 81920, 95.0),)
    quiet_since = stage.view.last_seen
    stage.until(lambda: stage.view.last_seen > quiet_since + 1.5)
    assert stage.view.presence is Presence.CONNECTED and stage.log == []


@pytest.mark.waits
def test_a_hanging_check_stops_neither_heartbeats_nor_other_checks(stage: Stage):
    stage.set(bad="hangs")
    stage.start(check_s=2.0)
    stage.until(lambda: (found := stage.result("bad")()) and found.verdict is Verdict.UNKNOWN)
    assert stage.result("good")() == passed("fine")
    assert not any("silent" in line for line in stage.log) and stage.view.presence is Presence.CONNECTED


def test_settings_reach_the_checks_before_the_first_report(stage: Stage):
    stage.set(off=["bad"], word="well")
    stage.start()
    stage.until(stage.result("good"))
    assert stage.view.report is not None
    assert [(each.check, each.result) for each in stage.view.report.findings] == [("good", passed("well"))]
    stage.set(word="other")
    stage.until(lambda: stage.result("good")() == passed("other") and stage.result("bad")())


def test_a_killed_agent_is_detected_at_once_and_leaves_no_process(stage: Stage):
    stage.set(bad="sleeps")
    agent = stage.start()
    stage.until(lambda: stage.view.presence is Presence.CONNECTED)
    stage.until(lambda: len(descendants(agent.pid)) >= 2)  # the process of the checks, and its hanging command
    children = descendants(agent.pid)
    agent.send_signal(signal.SIGKILL)
    stage.until(lambda: stage.view.presence is Presence.AGENT_DEAD)
    agent.wait()
    stage.until(lambda: all(start_ticks(pid) is None for pid in children))


def test_the_agent_survives_without_a_controller_and_reports_to_the_next_one(stage: Stage, tmp_path: Path):
    agent = stage.start()
    stage.until(stage.result("good"))
    stage.agents.close()
    time.sleep(0.3)  # the agent tries to connect without success
    stage.begin(port=stage.port)
    assert stage.view.presence is Presence.NEVER
    stage.until(stage.result("bad"))
    assert agent.poll() is None and stage.result("good")() == passed("fine")


@pytest.mark.waits
def test_the_agent_reconnects_with_a_growing_pause(tmp_path: Path):
    """The port is closed first, then open to a server that does not know the secret."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stage = Stage(tmp_path)
        stage.port, real = server.getsockname()[1], stage.port
        server.settimeout(60)
        stage.start()
        times = []
        for _ in range(4):
            caller, _ = server.accept()
            times.append(time.monotonic())
            caller.close()
        stage.port = real
        assert times[-1] - times[0] >= 0.1 + 0.2 + 0.4, "half of the pauses at least"
        stage.close()
    assert "connection closed" in (tmp_path / "log").read_text()


def test_an_agent_with_another_secret_is_refused(stage: Stage, tmp_path: Path):
    stage.start(secret=b"another secret, which is long enough")
    stage.until(lambda: stage.log)
    assert stage.view.presence is Presence.NEVER


def test_orders_do_not_delay_heartbeats(stage: Stage):
    stage.start()
    stage.until(lambda: stage.view.presence is Presence.CONNECTED)
    assert stage.order("evidence").files == {"words.txt": "some words"}
    assert stage.order("dance").error == "unknown order dance"
    assert stage.order("check", context="fails").error == "ValueError: no such context"
    assert stage.order("check", context="dies").error == "it exited without an answer"
    big = stage.order("evidence", size=str(3 << 20))
    assert big.error == "" and len(big.files["words.txt"]) == 3 << 20
    assert stage.view.presence is Presence.CONNECTED


def test_an_order_of_a_lost_connection_is_stopped(stage: Stage):
    agent = stage.start()
    stage.until(stage.result("good"))
    before = set(descendants(agent.pid))
    stage.agents.order("gpu-1", "check", lambda answer: None, timeout_s=30, arguments={"context": "hangs"})
    stage.until(lambda: set(descendants(agent.pid)) - before)
    (process,) = set(descendants(agent.pid)) - before
    stage.agents.expect({})
    stage.until(lambda: start_ticks(process) is None)
    stage.set()


def test_a_resting_agent_releases_everything_but_sends_heartbeats(stage: Stage):
    agent = stage.start()
    stage.until(stage.result("good"))
    assert stage.order("rest", seconds="100").error == ""
    assert not descendants(agent.pid)
    assert stage.order("rest", seconds="0").error == ""
    stage.until(lambda: descendants(agent.pid))
    assert stage.view.presence is Presence.CONNECTED
