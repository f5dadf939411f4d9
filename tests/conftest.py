"""Shared by all tests: the golden-file comparison, `dalsegno` in this process, and the time limit of cluster tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from dalsegno.cli.main import main
from dalsegno.system.hanging_calls import slowness
from tests.waiting import PATIENCE

TESTS = Path(__file__).parent
CLUSTER_TIMEOUT_S = 600
LONG = bool(os.environ.get("DALSEGNO_LONG"))  # more examples for hypothesis

# There is no deadline, because other tests run at the same time. The examples are the same every time, so that a
# failure is due to a change. Only the long profile tries new examples.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("long" if LONG else "suite")

# A background shell may have set SIGINT to ignored, which processes started by tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup sets this
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Tests train on the CPU with more ranks than a machine has GPUs. `./test` runs tests/train/test_gpu.py by itself.
if not os.environ.get("DALSEGNO_GPU_TESTS"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below tests/cluster as a cluster test, and give cluster tests more time on a slow machine."""
    for item in items:
        below = TESTS / "cluster" in item.path.parents
        if below:
            item.add_marker(pytest.mark.cluster)
        own = item.get_closest_marker("timeout")
        if below or (own and item.get_closest_marker("cluster")):
            limit_s = own.args[0] if own else CLUSTER_TIMEOUT_S
            item.add_marker(pytest.mark.timeout(limit_s * slowness() * PATIENCE), append=False)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Return a function that compares a text with a file in tests/golden; UPDATE_GOLDEN=1 writes it instead."""

    def compare(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no {path.relative_to(TESTS.parent)}; write it with UPDATE_GOLDEN=1 ./test"
        assert text == path.read_text()

    return compare


class CommandResult(NamedTuple):
    """The exit code and the output of a command that was run in this process."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., CommandResult]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return a function that runs `dalsegno` with these arguments in this process.

    A separate process would import all modules again.
    """

    def run(*words: str | Path) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["dalsegno", *map(str, words)])
        before = signal.getsignal(signal.SIGINT)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        signal.signal(signal.SIGINT, before)
        assert isinstance(ended.value.code, int)
        return CommandResult(ended.value.code, *capsys.readouterr())

    return run
