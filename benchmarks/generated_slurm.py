"""Commands that print a large, made-up cluster as sinfo, squeue and sdiag would: `squeue` of 100,000 jobs.

The commands are shell scripts that copy files. The client chooses squeue's record separator in an environment variable,
and `sed` inserts it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dalsegno.slurm.parse.text import PLAIN

NOW = 1_794_800_000
REASONS = ("Priority", "Resources", "Dependency", "QOSMaxJobsPerUserLimit", "ReqNodeNotAvail, UnavailableNodes:g[1-9]")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
STATES = ("mixed", "allocated", "idle", "drained", "down*", "completing", "planned")
COMPLETE = ("mixed", "allocated", "idle", "idle+drain", "down+not_responding", "idle+completing", "idle+planned")
SDIAG = Path(__file__).resolve().parents[1] / "tests/recorded/slurm-24.11.5/sdiag.txt"
CONFIG = """Configuration data as of 2026-11-17T00:00:00
AccountingStorageType   = accounting_storage/slurmdbd
PriorityType            = priority/multifactor
"""
SCRIPT = """#!/bin/sh
echo >>"{folder}/asked-{name}"
{print}
"""


def write_commands(folder: Path, nodes: int, jobs: int) -> None:
    """Write the commands and their answers to a folder for PATH."""
    (folder / "sinfo.txt").write_text("".join(node_rows(nodes)))
    (folder / "squeue.txt").write_text("".join(job_rows(jobs, nodes)))
    (folder / "sdiag.txt").write_text(SDIAG.read_text())
    (folder / "config.txt").write_text(CONFIG)
    (folder / "sshare.txt").write_text("".join(f"team{at}|user{at}|0.5\n" for at in range(60)))
    (folder / "slurm.conf").write_text("ClusterName=generated\n")
    shells = {
        "sinfo": f'[ "$1" = --version ] && exec echo "slurm-wlm 24.11.5"; exec cat "{folder}/sinfo.txt"',
        "squeue": f'exec sed "s/\x1e$/${{SQUEUE_FORMAT2##*:}}/" "{folder}/squeue.txt"',
        "sdiag": f'exec cat "{folder}/sdiag.txt"',
        "sshare": f'exec cat "{folder}/sshare.txt"',
        "scontrol": f'[ "$2" = config ] && exec cat "{folder}/config.txt"; echo "No reservations in the system"',
    }
    for name, shell in shells.items():
        script = folder / name
        script.write_text(SCRIPT.format(folder=folder, name=name, print=shell))
        script.chmod(0o755)


def times_asked(folder: Path, name: str) -> int:
    asked = folder / f"asked-{name}"
    return len(asked.read_bytes()) if asked.exists() else 0


def node_rows(nodes: int) -> Iterator[str]:
    """Yield sinfo's rows: every node is in two partitions, a few in a third one."""
    chosen = random.Random(14)
    for at in range(nodes):
        kind = chosen.choices(range(len(STATES)), (50, 20, 20, 4, 2, 2, 2))[0]
        used = chosen.randrange(9) if kind < 2 else 0
        cpus = f"{used * 12}/{96 - used * 12}/0/96" if kind < 4 else "0/0/96/96"
        gres = f"gpu:h100:{used}(IDX:0,{used})" if used else "gpu:h100:0(IDX:N/A)"
        for partition in ("train*", "long", *(("debug",) if at < 200 else ())):
            fields = (
                f"gpu-{at + 1:05}", partition, STATES[kind], COMPLETE[kind], cpus, str(used * 200_000), "2000000",
                "gpu:h100:8(S:0-1)", gres, f"h100,efa,rack{at % 40}",
            )  # fmt: skip
            yield PLAIN.field.join(fields) + f"{PLAIN.record}\n"


def job_rows(jobs: int, nodes: int) -> Iterator[str]:
    """Yield squeue's rows: 12 % run, 8 % have ended, and 80 % are pending; most of these are tasks of arrays."""
    chosen = random.Random(14)
    for at in range(jobs):
        kind = "RUNNING" if at % 25 < 3 else chosen.choice(ENDED) if at % 25 < 5 else "PENDING"
        person = chosen.randrange(500)
        user, team = f"user{person}", f"team{(person + chosen.choice((0, 0, 0, 1))) % 60}"
        partition = chosen.choice(("train", "long", "train,long", "debug", "train"))
        gpus, first = chosen.choice((1, 2, 4, 8)), chosen.randrange(nodes - 4) + 1
        where = f"gpu-{first:05}" if chosen.random() < 0.9 else f"gpu-[{first:05}-{first + 3:05}]"
        started = NOW - chosen.randrange(86_400)
        if kind == "PENDING":
            tail = (f"cpu={gpus * 12},mem=64G,node=1,billing={gpus},gres/gpu={gpus}", str(started), "N/A", "N/A")
            reason, where = chosen.choice(REASONS), ""
        else:
            partition, reason = partition.partition(",")[0], "None"
            tres = f"cpu={gpus * 12},mem={gpus * 200}G,node=1,billing={gpus},gres/gpu={gpus},gres/gpu:h100={gpus}"
            tail = (tres, str(started - chosen.randrange(9000)), str(started), str(started + 90_000))
        fields = (str(1_000_000 + at), user, partition, kind, where, str(gpus * 12), *tail, reason, team)
        yield PLAIN.field.join(fields) + f"{PLAIN.record}\n"
