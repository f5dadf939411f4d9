"""Explain panels without data: which metric is missing, and which exporter or source should have provided it. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dalsegno.observe.panels import Dashboard
from dalsegno.observe.prometheus_client import ScrapeHealth, ScrapeState

# Prometheus' job for slurm-exporter, which is used only if the observer does not export Slurm's metrics
SLURM_JOB = "slurm"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_METRIC = re.compile(r"\b(?:slurm|dalsegno|training|node|DCGM)_\w+")


class MetricOrigin(Enum):
    """The program that provides a metric."""

    NODE_EXPORTER = "node_exporter"
    NODE_AGENT = "node agent, through node_exporter"
    SLURM = "observer, from Slurm"
    RUNS = "observer, from runs"
    RECOVERY = "observer, from the controller"
    OBSERVER = "observer"


class OriginState(Enum):
    """The state of a provider of metrics."""

    FAILING = "failing"  # the provider does not answer, or reports a failure
    QUIET = "nothing to report"  # the provider works, but has no data for this metric


_ORIGINS = (  # the first prefix that matches a metric gives the metric's origin
    ("DCGM_", MetricOrigin.NODE_AGENT),
    ("node_amazonefa_", MetricOrigin.NODE_AGENT),
    ("dalsegno_fabric_", MetricOrigin.NODE_AGENT),
    ("dalsegno_node_metrics_", MetricOrigin.NODE_AGENT),
    ("node_", MetricOrigin.NODE_EXPORTER),
    ("training_", MetricOrigin.RUNS),
    ("dalsegno_recovery_resume_", MetricOrigin.RUNS),
    ("dalsegno_recovery_", MetricOrigin.RECOVERY),
    ("dalsegno_collector_", MetricOrigin.OBSERVER),
    ("dalsegno_build_", MetricOrigin.OBSERVER),
    ("slurm_", MetricOrigin.SLURM),
    ("dalsegno_", MetricOrigin.SLURM),
)
_SOURCES = {  # the observer's names for its sources, in dalsegno_collector_success
    MetricOrigin.SLURM: ("sinfo", "squeue", "sdiag", "sshare"),
    MetricOrigin.RUNS: ("runs",),
    MetricOrigin.RECOVERY: ("recovery",),
}
_QUIET = {
    MetricOrigin.NODE_EXPORTER: "node_exporter answers; this kernel has no such data",
    MetricOrigin.NODE_AGENT: "node_exporter and the node agents answer; the nodes have no such hardware",
    MetricOrigin.SLURM: "Slurm answers; no job has used what this shows yet",
    MetricOrigin.RUNS: "no run has reported this yet: `dalsegno run` starts one",
    MetricOrigin.RECOVERY: "the controller answers; nothing of this kind has happened yet",
    MetricOrigin.OBSERVER: "the observer answers",
}


@dataclass(frozen=True)
class MissingMetric:
    """A metric that panels query and Prometheus does not have."""

    name: str
    origin: MetricOrigin
    state: OriginState
    why: str
    panels: tuple[str, ...]


def origin_of(metric: str) -> MetricOrigin:
    """Return the program that provides a metric."""
    return next(origin for prefix, origin in _ORIGINS if metric.startswith(prefix))


def metrics_in(expr: str) -> list[str]:
    """Return the metrics that an expression reads, each once."""
    return list(dict.fromkeys(_METRIC.findall(_QUOTED.sub('""', expr))))


def panels_by_metric(dashboards: Sequence[Dashboard]) -> dict[str, list[str]]:
    """Return the panels that query each metric, as `Dashboard: panel`."""
    found: dict[str, list[str]] = {}
    for dashboard in dashboards:
        for panel in dashboard.panels:
            for query in panel.queries:
                for metric in metrics_in(query.expr):
                    title = f"{dashboard.title.rpartition(' / ')[2]}: {panel.title}"
                    if title not in found.setdefault(metric, []):
                        found[metric].append(title)
    return found


def explain_missing(
    dashboards: Sequence[Dashboard],
    present: Collection[str],
    targets: Sequence[ScrapeHealth],
    collected: Mapping[str, bool],
    agents: Collection[str],
) -> list[MissingMetric]:
    """Return the metrics without data and why.

    `present` are the metrics that Prometheus has, `collected` maps each source of the observer to its success, and
    `agents` are the nodes with an agent that writes metrics.
    """
    missing = []
    for metric, panels in panels_by_metric(dashboards).items():
        if metric not in present:
            origin = origin_of(metric)
            fault = _fault(origin, targets, collected, agents)
            state = OriginState.FAILING if fault else OriginState.QUIET
            missing.append(MissingMetric(metric, origin, state, fault or _QUIET[origin], tuple(panels)))
    return missing


def _fault(
    origin: MetricOrigin, targets: Sequence[ScrapeHealth], collected: Mapping[str, bool], agents: Collection[str]
) -> str:
    """Return why a provider fails; "" if it works."""
    if origin in (MetricOrigin.NODE_EXPORTER, MetricOrigin.NODE_AGENT):
        return _job_fault("node", "node_exporter", targets) or (
            "no node agent writes metrics: are they running, with `monitoring.enabled`?"
            if origin is MetricOrigin.NODE_AGENT and not agents
            else ""
        )
    if origin is MetricOrigin.SLURM and any(target.job == SLURM_JOB for target in targets):
        job, name = SLURM_JOB, "slurm-exporter"
    else:
        job, name = "dalsegno", "observer"
    if fault := _job_fault(job, f"the {name}", targets):
        return fault
    failed = [source for source in _SOURCES.get(origin, ()) if collected.get(source) is False]
    if failed:
        return f"the {name} could not collect {', '.join(failed)}: `dalsegno logs --daemon {name}` shows why"
    return ""


def _job_fault(job: str, name: str, targets: Sequence[ScrapeHealth]) -> str:
    """Return why no target of a job answers; "" if one does."""
    own = [target for target in targets if target.job == job]
    if not own:
        return f"Prometheus has no target for {name}"
    if any(target.state is ScrapeState.UP for target in own):
        return ""
    error = next((target.error for target in own if target.error), "not scraped yet")
    return f"{name} does not answer: {error}"
