"""Tests of many agents on one controller or coordinator: the short forms of benchmarks/agents.py and scale.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
AGENTS = 256 if os.environ.get("DALSEGNO_LONG") else 32  # the limits are the same


def run_benchmark(name: str, *options: str) -> list[dict[str, Any]]:
    """Run a benchmark and return its figures. It exits with 1 if they exceed its limits."""
    argv = [sys.executable, str(BENCHMARKS / name), *options, "--json"]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent / "src")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="its own network needs root")
def test_many_agents_cost_little_and_a_lost_host_is_detected_within_two_seconds():
    (held,) = run_benchmark("agents.py", "--nodes", str(AGENTS), "--seconds", "2", "--deaths", "2")
    assert held["cpu_percent"] <= 10 and held["memory_mib"] <= 150 and held["false_alarms"] == 0
    assert len(held["seen_s"]) == 2 and max(held["seen_s"]) <= 2.0


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="its own network needs root")
def test_coordinator_and_controller_replace_a_lost_node_of_many():
    coordinator, controller = run_benchmark("scale.py", "--nodes", "16", "--players", "1", "--seconds", "2")
    assert coordinator["detected_s"] <= 4.0 and coordinator["ordered_s"] <= 1.0
    assert 0 < controller["noticed_s"] <= controller["told_s"] <= 5.0 and controller["false_alarms"] == 0
