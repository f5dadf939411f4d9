"""All processes that an agent starts: its warm parent, and the workers of each generation."""

import json
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.runs.agent.orders import StandbyOrder, StartOrder, WorkerOrder, read_setup
from dalsegno.runs.agent.warm import adopt_orphans
from dalsegno.runs.agent.workers import Workers
from dalsegno.runs.folder import RunFolder
from dalsegno.system import children
from dalsegno.wire.frames import Message
from tests.runs.small_site import SmallSite


class Node:
    """An agent without a coordinator: the test gives its orders and receives its messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.selector = selectors.DefaultSelector()
        self.messages: list[Message] = []
        self.workers = Workers("n1", "door", self.selector, self.messages.append)
        self.script = folder / "train.py"

    def set_up(self, script: str, **more: object) -> None:
        self.script.write_text(script)
        self.workers.set_up(read_setup({**SmallSite(self.folder, script=str(self.script)).setup(), **more}))

    def start(self, generation: int, ranks: int = 1) -> None:
        workers = tuple(WorkerOrder(rank, {"RANK": str(rank)}) for rank in range(ranks))
        self.workers.start(StartOrder(generation, workers))

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end, self.messages
            for key, _ in self.selector.select(0.05):
                key.data()

    def hear(self, word: str) -> Message:
        self.until(lambda: any(word in message for message in self.messages))
        message = next(message for message in self.messages if word in message)
        self.messages.remove(message)
        return message

    def pids(self) -> list[int]:
        self.until(lambda: all(worker.pid for worker in self.workers.current.workers.values()))
        return [worker.pid for worker in self.workers.current.workers.values()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Yield a node, then kill its parent and workers. Other processes below this one may belong to another test."""
    node = Node(tmp_path)
    yield node
    if node.workers.parent is not None:
        node.workers.parent.end()


SLEEP = "import time\nprint('runs', flush=True)\ntime.sleep(60)"


def test_workers_start_and_their_ends_are_reported(node: Node):
    node.set_up("import os; print('rank', os.environ['RANK'])")
    assert node.hear("ready")["ready"]["warm"]
    node.start(1, ranks=2)
    ended = [node.hear("ended")["ended"] for _ in range(2)]
    assert sorted((report["rank"], report["code"]) for report in ended) == [(0, 0), (1, 0)]
    assert node.folder.log(1, 1).read_text() == "rank 1\n"


def test_order_waits_until_the_parent_is_ready(node: Node):
    node.set_up("pass")
    node.start(1)
    assert node.hear("ended")["ended"]["code"] == 0


def test_repeated_order_is_executed_once(node: Node):
    node.set_up(SLEEP)
    node.hear("ready")
    node.start(1)
    pids = node.pids()
    node.start(1)
    assert node.pids() == pids


def test_missing_python_is_reported_and_workers_start_as_programs(node: Node):
    node.set_up("print('x')", python="/no/such/python")
    assert "modules are not preloaded on n1" in node.hear("note")["note"]
    assert not node.hear("ready")["ready"]["warm"]


def test_failed_import_starts_workers_as_programs(node: Node):
    node.set_up("import sys; print(sys.stdout.write_through)", modules=["no_such_module_here"])
    assert "no_such_module_here" in node.hear("note")["note"]
    assert not node.hear("ready")["ready"]["warm"]
    node.start(1)
    assert node.hear("ended")["ended"]["code"] == 0 and node.folder.log(1, 0).read_text() == "True\n"


def test_missing_folder_makes_the_node_unusable(node: Node):
    node.set_up("pass", cwd="/no/such/folder")
    assert "folder /no/such/folder does not exist on this node" in node.hear("broken")["broken"]


def test_activity_of_workers_includes_their_children(node: Node):
    child = "open('/dev/zero', 'rb').read(4 << 20); print('read', flush=True); import time; time.sleep(60)"
    node.set_up(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    node.hear("ready")
    node.start(1)
    node.until(lambda: node.folder.log(1, 0).exists() and node.folder.log(1, 0).read_text())
    node.pids()
    node.workers.report_work(2)
    assert not any("worked" in message for message in node.messages), "another generation"
    node.workers.report_work(1)
    report = node.hear("worked")
    (cpu_s, moved) = report["ranks"]["0"]
    assert report["worked"] == 1 and cpu_s >= 0 and moved >= 4 << 20


def test_only_workers_with_a_handler_are_signalled(node: Node):
    """`python` has no handler for SIGTERM, so the signal would kill it."""
    node.set_up(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "print('runs', flush=True)\n"
        "time.sleep(60)"
    )
    node.hear("ready")
    node.start(1, ranks=2)
    node.until(lambda: all(path.exists() and path.read_text() for path in (node.folder.log(1, r) for r in (0, 1))))
    waiting, _ = node.pids()  # a worker may print before the parent has reported its PID
    node.workers.signal(signal.SIGTERM)
    report = node.hear("ended")["ended"]
    assert (report["rank"], report["code"]) == (1, 75) and children.start_ticks(waiting) is not None


def test_workers_of_the_current_generation_get_the_order_to_save(node: Node):
    node.set_up(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))\n"
        "print('runs', flush=True)\n"
        "time.sleep(60)"
    )
    node.hear("ready")
    node.start(2, ranks=1)
    node.until(lambda: node.folder.log(2, 0).exists() and node.folder.log(2, 0).read_text())
    node.pids()
    node.workers.save(1)
    assert node.workers._signalled == {}, "the order is late"
    node.workers.save(2)
    assert node.hear("ended")["ended"]["code"] == 75


def test_killed_standby_is_reported_and_a_forked_worker_runs_the_script(node: Node):
    node.set_up("print('ran')")
    node.hear("ready")
    node.workers.prepare_standbys(StandbyOrder(({},), gpu=False))
    node.hear("standby")
    node.until(lambda: node.workers.standbys.pids)
    (pid,) = node.workers.standbys.pids
    os.kill(pid, signal.SIGKILL)
    text = node.hear("standby")["standby"]["lost"]
    assert text == "standby worker 0 was killed by SIGKILL; the next worker is forked without it"
    node.start(1)
    assert node.pids() != [pid] and node.hear("ended")["ended"]["code"] == 0
    assert node.folder.log(1, 0).read_text() == "ran\n"


# These tests run their agent in a separate process, because it kills all its descendants.


def alone(work: Callable[[], object]) -> object:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            adopt_orphans()
            os.write(write, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as outcome:
        text = outcome.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def below() -> list[int]:
    return [pid for pid in children.descendants(os.getpid()) if children.start_ticks(pid) is not None]


@pytest.mark.parametrize("wait", [True, False])
def test_stopped_generation_does_not_start_again(tmp_path: Path, wait: bool):
    def stop() -> object:
        node = Node(tmp_path)
        node.set_up(SLEEP)
        node.hear("ready")
        node.start(1, ranks=2)
        if wait:
            node.pids()
        node.workers.stop(1)
        left = len(below())
        node.start(1, ranks=2)
        outcome = node.hear("stopped"), left, len(node.workers.current.workers)
        node.workers.end_everything()
        return [*outcome, below()]

    assert alone(stop) == [{"stopped": 1, "reports": [], "held": []}, 1, 0, []], (
        "only the parent is left, until the end"
    )


def test_error_before_the_stop_is_reported(tmp_path: Path):
    def stop() -> object:
        node = Node(tmp_path)
        node.set_up("import threading, time, sys\nthreading.Thread(target=time.sleep, args=(60,)).start()\n1 / 0")
        node.hear("ready")
        node.start(1)
        log = node.folder.log(1, 0)
        node.until(lambda: log.exists() and "ZeroDivisionError" in log.read_text())
        node.workers.stop(1)
        reports = node.hear("stopped")["reports"]
        node.workers.end_everything()
        return [(report["rank"], report["code"], report["traceback"].splitlines()[-1]) for report in reports]

    assert alone(stop) == [[0, 1, "ZeroDivisionError: division by zero"]]


def test_stop_of_an_older_generation_is_ignored(tmp_path: Path):
    def stop() -> object:
        node = Node(tmp_path)
        node.set_up(SLEEP)
        node.hear("ready")
        node.start(2)
        (pid,) = node.pids()
        node.workers.stop(1)
        lives = children.start_ticks(pid) is not None
        node.workers.end_everything()
        return lives

    assert alone(stop) is True


def test_reset_drops_orders_for_a_dead_parent(tmp_path: Path):
    """The coordinator has lost the node and started another generation without it.

    The old orders must never be executed.
    """

    def die() -> object:
        node = Node(tmp_path)
        node.set_up(SLEEP)
        node.hear("ready")
        assert node.workers.parent is not None
        os.kill(node.workers.parent.pid, signal.SIGKILL)
        node.until(lambda: not node.workers.ready)
        node.start(1)
        node.hear("cold")
        node.workers.reset()
        node.hear("ready")
        started = sorted(node.workers.current.workers)
        node.workers.end_everything()
        return started

    assert alone(die) == []
