"""What all tests share: the golden-file comparison, and the mark and time limit of tests on the real cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from dalsegno.system.apart import slowness

TESTS = Path(__file__).parent
CLUSTER_TIMEOUT_S = 600

# Other tests are at work beside: no example is judged by its time. The same examples each time: what fails, fails of a
# change and not by chance. The long form looks for others.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("long" if os.environ.get("DALSEGNO_LONG") else "suite")

# Whoever starts the suite in the background may have interrupts ignored, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Tests train on the CPU with more ranks than a machine has GPUs. `./test` runs tests/train/test_gpu.py by itself.
if not os.environ.get("DALSEGNO_GPU_TESTS"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything below tests/cluster is a cluster test, without saying so in each file."""
    for item in items:
        if TESTS / "cluster" in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S * slowness()))


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """`golden("slurm/minimal.conf", text)` compares with tests/golden; UPDATE_GOLDEN=1 writes it instead."""

    def compare(name: str, text: str) -> None:
        path = TESTS / "golden" / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no {path.relative_to(TESTS.parent)}; write it with UPDATE_GOLDEN=1 ./test"
        assert text == path.read_text()

    return compare
