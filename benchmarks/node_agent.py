#!/usr/bin/env python3
"""Measure the memory and CPU share of a node agent on this machine, with its real GPUs.

    benchmarks/node_agent.py                  one minute; prints figures, exits 1 if they exceed the limits
    benchmarks/node_agent.py --seconds 20

The agent is started as on a node, with a controller that never answers; it runs its checks anyway. PSS is shown too,
because other processes share the pages of Python and NVIDIA's library.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dalsegno.programs import launcher
from dalsegno.system.children import descendants

MOST_MB, MOST_CPU_PERCENT = 30.0, 1.0
SETTLE_S = 10.0  # after this time, every check has run once
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text("a secret that is long enough for all\n")
        secret.chmod(0o600)
        argv = [*launcher(), "node-agent", "--node", "here", "--controller", "127.0.0.1:9", "--secret", str(secret)]
        agent = subprocess.Popen([*argv, "--boot-id", "boot-1"], stderr=subprocess.DEVNULL)
        try:
            time.sleep(SETTLE_S)
            before = spent_s(agent.pid)
            time.sleep(seconds)
            after = spent_s(agent.pid)
            used = [memory_mb(pid) for pid in [agent.pid, *descendants(agent.pid)]]
        finally:
            agent.terminate()
            agent.wait()
    for number, figures in enumerate(used):
        shown = ", ".join(f"{name} {mb:.1f} MB" for name, mb in figures.items())
        print(f"{'agent' if number == 0 else 'checks'}: {shown}")
    parts = {name: (after[name] - before[name]) / seconds * 100 for name in after}
    percent = sum(parts.values())
    shown = ", ".join(f"{name} {share:.2f} %" for name, share in parts.items())
    print(f"CPU: {shown}; together {percent:.2f} % of a core (limit: < {MOST_CPU_PERCENT:g} %)")
    print(f"limit of memory: <= {MOST_MB:g} MB resident")
    return 0 if percent < MOST_CPU_PERCENT and all(each["resident"] <= MOST_MB for each in used) else 1


def spent_s(agent: int) -> dict[str, float]:
    """Return the CPU time so far of the agent, its checks, and their finished commands."""
    own, ended = cpu_s(agent)
    spent = {"agent": own, "checks": 0.0, "their commands": ended}
    for pid in descendants(agent):
        own, ended = cpu_s(pid)
        spent["checks"] += own
        spent["their commands"] += ended
    return spent


def cpu_s(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of the process, and of its finished children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    user, system, ended_user, ended_system = (int(each) / TICKS for each in fields[11:15])
    return user + system, ended_user + ended_system


def memory_mb(pid: int) -> dict[str, float]:
    """Return the resident, proportional and anonymous memory of a process in MB, as the kernel counts it."""
    rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M))
    figures = {"resident": "Rss", "proportional": "Pss", "its own": "Anonymous"}
    return {name: int(rollup[key]) * 1024 / 1e6 for name, key in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
