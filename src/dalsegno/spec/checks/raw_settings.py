"""Raw Slurm settings: none that we write ourselves, none twice."""

from __future__ import annotations

from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.raw import OWNED, OWNED_IN_PARTITION
from dalsegno.spec.section import Section


def check_raw_settings(spec: ClusterSpec, report: Report) -> None:
    """`slurm.extra` and each partition's `extra`."""
    _extra(spec.slurm, spec.slurm.extra, OWNED, "`slurm.extra`", report)
    for partition in spec.partitions:
        _extra(partition, partition.extra, OWNED_IN_PARTITION, f"`extra` of partition `{partition.name}`", report)


def _extra(section: Section, extra: dict[str, str], owned: dict[str, str], whose: str, report: Report) -> None:
    ours = {key.lower(): key for key in owned}
    seen: dict[str, str] = {}
    for key in extra:
        lower = key.lower()
        if lower in ours:
            steer = owned[ours[lower]]
            hint = f"use `{steer}`" if steer else "leave it out"
            report.add(section, f"extra.{key}", f"{whose} sets `{key}`, which we write ourselves", hint)
        elif lower in seen:
            what = f"{whose} sets `{seen[lower]}` and `{key}`, which Slurm reads as the same"
            report.add(section, f"extra.{key}", what, "keep one")
        seen.setdefault(lower, key)
