"""The load of a node's GPUs, from the metrics that its agent writes for node_exporter. Pure."""

from __future__ import annotations

import math
import re

from dalsegno.overview.facts import GpuFigures

STALE_S = 60.0  # older values are not shown: an agent that was killed leaves its file behind
MAX_GPUS = 64

_WRITTEN = re.compile(r"^dalsegno_node_metrics_timestamp_seconds (\S+)$", re.MULTILINE)
_SAMPLE = re.compile(
    r'^DCGM_FI_DEV_(GPU_UTIL|GPU_TEMP|FB_USED|FB_FREE|FB_RESERVED)\{(?:[^}]*,)?gpu="(\d{1,3})"[^\n]*\} (\S+)$',
    re.MULTILINE,
)


def parse_gpu_figures(text: str, now: float) -> tuple[GpuFigures, ...]:
    """Return the figures of each GPU; empty if the file is too old or contains none. `now` is a Unix time."""
    written = _WRITTEN.search(text)
    at = _number(written[1]) if written else None
    if at is None or now - at > STALE_S:
        return ()
    found: dict[int, dict[str, float]] = {}
    for name, gpu, word in _SAMPLE.findall(text):
        value = _number(word)
        if value is not None:
            found.setdefault(int(gpu), {})[name] = value
    return tuple(_figures(gpu, found[gpu]) for gpu in sorted(found)[:MAX_GPUS])


def _figures(gpu: int, values: dict[str, float]) -> GpuFigures:
    used, free = values.get("FB_USED"), values.get("FB_FREE")
    total = used + free + values.get("FB_RESERVED", 0.0) if used is not None and free is not None else None
    return GpuFigures(gpu, values.get("GPU_UTIL"), values.get("GPU_TEMP"), used, total)


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
