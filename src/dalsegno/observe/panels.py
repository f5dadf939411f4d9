"""Dashboards of Grafana as values, and their JSON. No library is used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

DATASOURCE_UID = "dalsegno-prometheus"
DATASOURCE: Mapping[str, str] = {"type": "prometheus", "uid": DATASOURCE_UID}
SCHEMA_VERSION = 39
COLUMNS = 24
CLUSTER = "cluster"
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
# Matches the names of metrics, but not of labels.
_SELECTOR = re.compile(r"\b((?:slurm|dalsegno|training|node|DCGM)_\w+|up|ALERTS)\b(\{)?")


class PanelKind(Enum):
    """The types of panels, as Grafana names them."""

    GRAPH = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"
    TABLE = "table"


@dataclass(frozen=True)
class PanelQuery:
    """A query of a panel, and the template for the names of the series that the query returns."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class GrafanaPanel:
    """A panel of a dashboard. `unit` is Grafana's id of a unit. `stacked` graphs show the parts of a whole."""

    title: str
    queries: tuple[PanelQuery, ...]
    kind: PanelKind = PanelKind.GRAPH
    unit: str = "short"
    about: str = ""
    width: int = 12
    height: int = 8
    stacked: bool = False
    largest: float | None = None  # maximum of the axis


@dataclass(frozen=True)
class Variable:
    """A drop-down list at the top of a Grafana dashboard, with all values of a label. It filters the panels."""

    name: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """A dashboard: panels in rows from left to right."""

    uid: str
    title: str
    panels: tuple[GrafanaPanel, ...]
    variables: tuple[Variable, ...] = ()


def graph(
    title: str,
    *queries: tuple[str, str],
    unit: str = "short",
    about: str = "",
    stacked: bool = False,
    largest: float | None = None,
) -> GrafanaPanel:
    """Return a panel with curves. Each query is an expression and its legend."""
    asked = tuple(PanelQuery(*each) for each in queries)
    return GrafanaPanel(title, asked, unit=unit, about=about, stacked=stacked, largest=largest)


def number(
    title: str, expr: str, legend: str = "", *, unit: str = "short", about: str = "", width: int = 4
) -> GrafanaPanel:
    """Return a small panel with the present values of one query."""
    asked = (PanelQuery(expr, legend),)
    return GrafanaPanel(title, asked, PanelKind.NUMBER, unit, about, width, height=4)


def of_cluster(expr: str) -> str:
    """Return the expression with a selector added to each metric, for the clusters chosen in the drop-down list."""
    parts, end = [], 0
    for quoted in _QUOTED.finditer(expr):
        parts += [_selected(expr[end : quoted.start()]), quoted[0]]
        end = quoted.end()
    return "".join([*parts, _selected(expr[end:])])


def _selected(text: str) -> str:
    chosen = f'{CLUSTER}=~"$cluster"'
    return _SELECTOR.sub(lambda found: f"{found[1]}{{{chosen}{',' if found[2] else '}'}", text)


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return the JSON of a dashboard, as Grafana reads it from a file."""
    variables = (Variable(CLUSTER, "label_values(up, cluster)"), *dashboard.variables)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["dalsegno"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "tags": ["dalsegno"], "asDropdown": True, "title": "Dal Segno"}],
        "annotations": {"list": []},
        "templating": {"list": [_variable(each) for each in variables]},
        "panels": list(_panels(dashboard.panels)),
    }


def _variable(variable: Variable) -> dict[str, Any]:
    query = variable.query if variable.name == CLUSTER else of_cluster(variable.query)
    return {
        "name": variable.name,
        "label": variable.name,
        "type": "query",
        "datasource": dict(DATASOURCE),
        "query": {"query": query, "refId": variable.name},
        "definition": query,
        "refresh": 2,  # Grafana updates the list when the time range changes, so that new runs and nodes appear
        "sort": 7,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels(panels: Sequence[GrafanaPanel]) -> Iterator[dict[str, Any]]:
    x = y = tallest = 0
    for index, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        yield _panel(index, panel, x, y)
        x, tallest = x + panel.width, max(tallest, panel.height)


def _panel(index: int, panel: GrafanaPanel, x: int, y: int) -> dict[str, Any]:
    instant = panel.kind is not PanelKind.GRAPH
    targets = [
        {
            "refId": chr(ord("A") + at),
            "datasource": dict(DATASOURCE),
            "expr": of_cluster(query.expr),
            "legendFormat": query.legend or "__auto",
            "instant": instant,
            "range": not instant,
            "format": "table" if panel.kind is PanelKind.TABLE else "time_series",
        }
        for at, query in enumerate(panel.queries)
    ]
    return {
        "id": index,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.about,
        "datasource": dict(DATASOURCE),
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "targets": targets,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel.kind),
    }


def _field_defaults(panel: GrafanaPanel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit, "min": 0, "noValue": "no data: dalsegno monitor check"}
    if panel.largest is not None:
        found["max"] = panel.largest
    if panel.kind is PanelKind.GRAPH:
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        found["custom"] = {"fillOpacity": 30 if panel.stacked else 5, "showPoints": "never", "stacking": stacking}
    return found


def _options(kind: PanelKind) -> dict[str, Any]:
    latest = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if kind is PanelKind.GRAPH:
        return {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if kind is PanelKind.NUMBER:
        return {"reduceOptions": latest, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
    return {"reduceOptions": latest, "orientation": "horizontal"} if kind is PanelKind.BARS else {"showHeader": True}
