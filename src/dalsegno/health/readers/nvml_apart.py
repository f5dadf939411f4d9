"""`gpu-facts`: NVML asked in a process of its own, for those who must not hang with a GPU that does."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dalsegno.health.facts import GpuFacts
from dalsegno.health.readers.nvml import Nvml
from dalsegno.health.telemetry import BadTelemetry, Telemetry, parse_telemetry, telemetry_text
from dalsegno.programs import launcher
from dalsegno.system.apart import NoAnswer, ask

TIMEOUT_S = 5.0
NOT_HERE = 3  # the exit code where there is no NVML


def main(arguments: Sequence[str]) -> int:
    gpus = Nvml().read()
    if gpus is None:
        return NOT_HERE
    sys.stdout.write(telemetry_text(Telemetry("", gpus)))
    return 0


def read_nvml_apart() -> tuple[GpuFacts, ...] | None:
    done = ask([*launcher(), "gpu-facts"], timeout_s=TIMEOUT_S)
    if done.exit_code == NOT_HERE:
        return None
    try:
        return parse_telemetry(done.stdout).gpus
    except BadTelemetry as error:
        raise NoAnswer(f"NVML: {done.stderr.strip()[-200:] or error}") from error
