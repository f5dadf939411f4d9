"""Test of many agents on one controller: the short form of benchmarks/agents.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks/agents.py"
AGENTS = 256 if os.environ.get("DALSEGNO_LONG") else 32  # the limits are the same


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.skipif(os.geteuid() != 0, reason="its own network needs root")
def test_many_agents_cost_little_and_a_lost_host_is_detected_within_two_seconds():
    argv = [sys.executable, str(BENCHMARK), "--nodes", str(AGENTS), "--seconds", "2", "--deaths", "2", "--json"]
    env = {**os.environ, "PYTHONPATH": str(BENCHMARK.parents[1] / "src")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    held = json.loads(done.stdout)
    assert held["cpu_percent"] <= 10 and held["memory_mib"] <= 150 and held["false_alarms"] == 0
    assert len(held["seen_s"]) == 2 and max(held["seen_s"]) <= 2.0
