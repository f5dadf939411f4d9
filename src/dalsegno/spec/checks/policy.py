"""QOS and preemption: who may push whom aside."""

from __future__ import annotations

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.slurm import Qos

BUILT_IN_QOS = "normal"  # Slurm makes it; everyone has it


def known_qos(spec: ClusterSpec) -> list[str]:
    """QOS that may be named: those of the file and Slurm's own."""
    return [*(qos.name for qos in spec.slurm.qos), BUILT_IN_QOS]


def check_policy(spec: ClusterSpec, report: Report) -> None:
    """QOS that preempt, and partitions with a preempt mode."""
    for qos in spec.slurm.qos:
        _preempts(qos, spec, report)
    for partition in spec.partitions:
        if partition.preempt_mode not in ("", "OFF") and not preempts(spec) and report.whole("slurm"):
            what = f"partition `{partition.name}` has a `preempt_mode`, but nothing preempts on this cluster"
            report.add(partition, "preempt_mode", what, "add `slurm: {preemption: {by: partition}}`")


def preempts(spec: ClusterSpec) -> bool:
    """Preemption is on: asked for, or because a QOS preempts another."""
    return spec.slurm.preemption is not None or any(qos.preempts for qos in spec.slurm.qos)


def _preempts(qos: Qos, spec: ClusterSpec, report: Report) -> None:
    known = known_qos(spec)
    for other in qos.preempts:
        if other == qos.name:
            report.add(qos, "preempts", f"qos `{qos.name}` preempts itself", "name another QOS")
        elif other not in known and report.unnamed(other, "slurm", "qos"):
            what = f"qos `{qos.name}` preempts `{other}`, which is no QOS"
            report.add(qos, "preempts", what, did_you_mean(other, known, "add it under `slurm: qos:`"))
    by_partition = spec.slurm.preemption is not None and spec.slurm.preemption.by == "partition"
    if qos.preempts and by_partition and report.whole("slurm", "preemption"):
        what = f"qos `{qos.name}` preempts others, but preemption goes by partition"
        report.add(qos, "preempts", what, "set `slurm: {preemption: {by: qos}}`, or leave `preempts` out")
