"""Counts of GPUs and memory in Slurm's two spellings: gres (`gpu:h100:8(S:0-1)`) and TRES (`gres/gpu=8`)."""

from __future__ import annotations

import re

_GPU = re.compile(r"gpu(?::([^:()]+))?:(\d{1,9})(?:\(.*\))?$")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)", re.ASCII)
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


def gpus_in_gres(gres: str) -> int:
    """`gpu:h100:8(S:0-1),nic:2` → 8."""
    found = (_GPU.match(entry.removeprefix("gres:").replace("gres/", "")) for entry in _entries(gres))
    return sum(int(match[2]) for match in found if match)


def gpu_type_in_gres(gres: str) -> str:
    found = (_GPU.match(entry) for entry in _entries(gres))
    return next((match[1] for match in found if match and match[1]), "")


def parse_tres(tres: str) -> dict[str, str]:
    """`cpu=8,gres/gpu=2` as a table."""
    entries = (entry.partition("=") for entry in tres.split(","))
    return {name.strip(): count.strip() for name, equals, count in entries if equals}


def gpus_in_tres(tres: str) -> int:
    """All GPUs: the plain count includes the typed ones."""
    counts = parse_tres(tres)
    if "gres/gpu" in counts:
        return _count(counts["gres/gpu"])
    return sum(_count(count) for name, count in counts.items() if name.startswith("gres/gpu:"))


def memory_mib(text: str) -> int:
    """`62.50G`, `16000M`, or a bare number of MiB."""
    found = _MEMORY.match(text.strip())
    return round(float(found[1]) * _MIB[found[2]]) if found and len(found[1]) < 19 else 0


def _count(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else 0


def _entries(gres: str) -> list[str]:
    """Split at the commas outside parentheses: `gpu:2(IDX:0,3),nic:1` has two entries."""
    return [entry.strip() for entry in re.split(r",(?![^(]*\))", gres)]
