"""Tests of `nodes`, `events` and `automation` with a controller that answers from a real journal."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli.health.nodes import describe_event, describe_mode
from dalsegno.cli.main import cli
from dalsegno.health import GpuIdentity, Remedy
from dalsegno.recovery.controller import SOCKET, Controller
from dalsegno.recovery.decisions.actions import Drain
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.journal.store import Journal
from dalsegno.recovery.watch import JOURNAL

Invoke = Callable[..., Result]


@pytest.fixture
def invoke() -> Iterator[Invoke]:
    """Return a function that runs commands on a cluster whose controller knows one drained node."""
    root = Path(tempfile.mkdtemp(prefix="ds-", dir="/tmp"))
    (root / "controller").mkdir()
    (root / "run").mkdir()
    (root / "slurm.conf").touch()  # empty, so that Slurm's commands fail at once
    store, action = Journal(root / JOURNAL), Drain("gpu-2", NodeFault("xid", Remedy.REBOOT, "Xid 79", "79"))
    store.end(store.begin(action, 1e9), action, "drained: xid[79] Xid 79", "", 1e9, Policy(), ())
    store.record_gpus("gpu-2", [GpuIdentity(0, "GPU-abc", "17", "H100")], 1e9)
    store.close()
    stop, served = threading.Event(), threading.Thread(target=lambda: _serve(root, stop))
    served.start()
    env = {"SLURM_CONF": str(root / "slurm.conf"), "DALSEGNO_CONTROLLER": str(root / SOCKET)}
    yield lambda *words: CliRunner().invoke(cli, list(words), env=env)
    stop.set()
    served.join()
    shutil.rmtree(root)


def _serve(root: Path, stop: threading.Event) -> None:
    controller = Controller(root, (), {})
    while not stop.is_set():
        controller.turn(0.02)
    controller.close()


@pytest.fixture(autouse=True)
def there(invoke: Invoke) -> None:
    for _ in range(500):
        if invoke("automation", "status").exit_code == 0:
            return
    raise AssertionError("the controller does not answer")


def test_nodes_lists_nodes_and_shows_gpus_and_history_of_one(invoke: Invoke):
    assert [line.split()[:2] for line in invoke("nodes").output.splitlines()] == [
        ["NODE", "PHASE"],
        ["gpu-2", "drained"],
    ]
    shown = invoke("nodes", "show", "gpu-2").output
    assert "gpu-2 is drained" in shown and "GPU-abc" in shown and "drained: xid[79] Xid 79" in shown
    assert json.loads(invoke("nodes", "show", "gpu-2", "--json").output)["gpus"][0]["serial"] == "17"
    assert "unknown node" in str(invoke("nodes", "show", "gpu-9").exception)


def test_events_prints_lines_or_json(invoke: Invoke):
    assert invoke("events").output.rstrip().endswith("gpu-2  drained: xid[79] Xid 79")
    assert [json.loads(each)["node"] for each in invoke("events", "--json").output.splitlines()] == ["gpu-2"]
    assert "unknown node" in str(invoke("events", "--node", "gpu-9").exception)


def test_events_without_a_node_are_aligned():
    nobodys, own = ({"at": 1e9, "node": node, "kind": "pause", "text": "so"} for node in ("", "gpu-2"))
    assert describe_event(nobodys, 5).index("pause so") == describe_event(own, 5).index("so")


def test_automation_pauses_and_resumes(invoke: Invoke):
    assert invoke("automation", "pause").output.startswith("automation is paused\nNODE")
    assert json.loads(invoke("automation", "status", "--json").output)["automation"] == "paused"
    assert invoke("automation", "resume").output.startswith("automation is on")
    assert invoke("automation", "fly").exit_code == 2


def test_automation_status_shows_observe_mode():
    assert describe_mode("on", "auto") == "automation is on"
    assert "only reports" in describe_mode("on", "observe") and "only watches" in describe_mode("on", "off")
    assert describe_mode("paused", "observe").startswith("automation is paused")
