"""What is kept of a node before it is reset, rebooted or replaced: text files, each the end of something, none long."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dalsegno.health.here import slurm_conf
from dalsegno.health.report import Finding, Report, report_message
from dalsegno.health.telemetry import telemetry_path
from dalsegno.system.apart import NoAnswer, ask

MOST_BYTES = 256 << 10  # of one file: its end is what matters
COMMAND_S = 5.0
COMMANDS: Mapping[str, Sequence[str]] = {
    "dmesg.txt": ("dmesg", "--time-format=iso"),
    "ps.txt": ("ps", "-eo", "pid,ppid,user,stat,wchan:24,rss,etimes,args", "--sort=-rss"),
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "nvlink.txt": ("nvidia-smi", "nvlink", "-e"),
    "ip.txt": ("ip", "-s", "address"),
    "df.txt": ("df", "-P", "-l"),
    "free.txt": ("free", "-m"),
    "mounts.txt": ("cat", "/proc/self/mounts"),
}
SLURMD_LOGS = ("/var/log/slurm/slurmd.log", "/var/log/slurmd.log", "/var/log/slurm-llnl/slurmd.log")

Ask = Callable[[Sequence[str]], str]


def gather(
    node: str, boot: str, findings: tuple[Finding, ...], env: Mapping[str, str], ask: Ask | None = None
) -> Iterator[tuple[str, str]]:
    """Name and text of each file; of what cannot be had, why."""
    ask = ask or _ask
    yield "findings.json", json.dumps(report_message(Report(node, boot, findings)), indent=1)
    if telemetry := telemetry_path(env):
        yield "telemetry.json", _tail(telemetry)
    for name, argv in COMMANDS.items():
        yield name, ask(argv)[-MOST_BYTES:]
    if log := slurmd_log(node, env):
        yield "slurmd.log", _tail(log)


def slurmd_log(node: str, env: Mapping[str, str]) -> Path | None:
    """Where slurmd writes: as slurm.conf says, else where it usually is; on a simulated node, beside its telemetry."""
    told, telemetry = _configured_log(node, env), telemetry_path(env)
    candidates = [told] if told else [str(telemetry.with_name("slurmd.log"))] if telemetry else SLURMD_LOGS
    return next((Path(path) for path in candidates if os.path.isfile(path)), None)


def _configured_log(node: str, env: Mapping[str, str]) -> str:
    try:
        lines = slurm_conf(env).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.partition("=")[2].strip() for line in lines if line.lower().lstrip().startswith("slurmdlogfile")]
    return said[-1].replace("%n", node).replace("%h", os.uname().nodename) if said else ""


def _ask(argv: Sequence[str]) -> str:
    try:
        done = ask(argv, env={**os.environ, "LC_ALL": "C.UTF-8"}, timeout_s=COMMAND_S)
    except NoAnswer as error:
        return f"{error}\n"
    return f"{done.stdout}{done.stderr}" or f"(nothing; exit code {done.exit_code})\n"


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - MOST_BYTES, 0))
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError as error:
        return f"{path}: {error.strerror}\n"
