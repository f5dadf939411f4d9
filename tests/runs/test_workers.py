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

from dalsegno.runs.agent.orders import StartOrder, WorkerOrder, read_setup
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
        self.told: list[Message] = []
        self.workers = Workers("n1", "door", self.selector, self.told.append)
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
            assert time.monotonic() < end, self.told
            for key, _ in self.selector.select(0.05):
                key.data()

    def hear(self, word: str) -> Message:
        self.until(lambda: any(word in message for message in self.told))
        message = next(message for message in self.told if word in message)
        self.told.remove(message)
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


# Tests that kill run in a separate process, because an agent kills all its descendants.


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
    with os.fdopen(read) as told:
        text = told.read()
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
        told = node.hear("stopped"), left, len(node.workers.current.workers)
        node.workers.end_everything()
        return [*told, below()]

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
