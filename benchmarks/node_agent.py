#!/usr/bin/env python3
"""What the node agent costs its node: memory and a share of a core, on the machine at hand and with its real GPUs.

    benchmarks/node_agent.py                  one minute; prints figures, and exits 1 if they are more than was asked
    benchmarks/node_agent.py --seconds 20

The agent is started as on a node, with a controller that never answers: it looks at its checks all the same. Shared
pages are counted by share (PSS) too: Python and NVIDIA's library are mapped by others as well.
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
SETTLE_S = 10.0  # every check has been asked once
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is watched")
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
        told = ", ".join(f"{word} {mb:.1f} MB" for word, mb in figures.items())
        print(f"{'agent' if number == 0 else 'checks'}: {told}")
    parts = {who: (after[who] - before[who]) / seconds * 100 for who in after}
    percent = sum(parts.values())
    told = ", ".join(f"{who} {share:.2f} %" for who, share in parts.items())
    print(f"CPU: {told}; together {percent:.2f} % of a core (asked: < {MOST_CPU_PERCENT:g} %)")
    print(f"asked of memory: <= {MOST_MB:g} MB resident")
    return 0 if percent < MOST_CPU_PERCENT and all(each["resident"] <= MOST_MB for each in used) else 1


def spent_s(agent: int) -> dict[str, float]:
    """So far, by whom: the agent, its checks, and the commands that they have run to their end."""
    own, ended = cpu_s(agent)
    spent = {"agent": own, "checks": 0.0, "their commands": ended}
    for pid in descendants(agent):
        own, ended = cpu_s(pid)
        spent["checks"] += own
        spent["their commands"] += ended
    return spent


def cpu_s(pid: int) -> tuple[float, float]:
    """Seconds of its own, and of children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    user, system, ended_user, ended_system = (int(each) / TICKS for each in fields[11:15])
    return user + system, ended_user + ended_system


def memory_mb(pid: int) -> dict[str, float]:
    """As the kernel counts it, in kB of 1024 bytes."""
    rollup = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M))
    figures = {"resident": "Rss", "by share": "Pss", "its own": "Anonymous"}
    return {word: int(rollup[key]) * 1024 / 1e6 for word, key in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
