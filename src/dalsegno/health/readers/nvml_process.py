"""The program `gpu-facts`, which queries NVML in a separate process, so that a hanging GPU does not stop the caller."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dalsegno.health.facts import GpuFacts
from dalsegno.health.readers.nvml import Nvml
from dalsegno.health.telemetry import BadTelemetry, Telemetry, parse_telemetry, telemetry_text
from dalsegno.programs import launcher
from dalsegno.system.hanging_calls import NoAnswer, ask

TIMEOUT_S = 5.0
NOT_HERE = 3  # exit code if the machine has no NVML


def main(arguments: Sequence[str]) -> int:
    gpus = Nvml().read()
    if gpus is None:
        return NOT_HERE
    sys.stdout.write(telemetry_text(Telemetry("", gpus)))
    return 0


def read_nvml_in_process() -> tuple[GpuFacts, ...] | None:
    done = ask([*launcher(), "gpu-facts"], timeout_s=TIMEOUT_S)
    if done.exit_code == NOT_HERE:
        return None
    try:
        return parse_telemetry(done.stdout).gpus
    except BadTelemetry as error:
        raise NoAnswer(f"NVML: {done.stderr.strip()[-200:] or error}") from error
