"""The queries of dashboards that were published on grafana.com, in `tests/recorded/dashboards`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "recorded" / "dashboards"
_CHOICE = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True)
class PublishedDashboard:
    """A dashboard: its number at grafana.com, its queries by panel, and the queries behind its menus."""

    id: int
    panels: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]

    def queries(self, values: Mapping[str, str]) -> list[str]:
        """Return all queries, each once, with these values in place of variables."""
        return list(dict.fromkeys(_filled(query, values) for _, query in self.panels))

    def choices(self, values: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Return what each menu offers: the values of a label in the answer to a query."""
        found = {name: _CHOICE.fullmatch(text) for name, text in self.variables.items()}
        return {name: (_filled(match[1], values), match[2]) for name, match in found.items() if match}


def _filled(query: str, values: Mapping[str, str]) -> str:
    for name in sorted(values, key=len, reverse=True):  # $nodename is replaced before $node
        query = query.replace(name, values[name])
    assert "$" not in query, query
    return query


def _read(path: Path) -> PublishedDashboard:
    value = json.loads(path.read_text())
    panels = tuple((each["panel"], each["expr"]) for each in value["queries"])
    return PublishedDashboard(value["id"], panels, value["variables"])


PUBLISHED = [_read(FOLDER / f"{number}.json") for number in (1860, 4323, 12239)]
# Metric -> why it has no data on a local cluster. The metric may have data if a path matches `unless`, which stands for
# other hardware or another kernel, or if node_exporter is at least as new as `since`.
WITHOUT_DATA: dict[str, dict[str, str]] = json.loads((FOLDER / "without_data.json").read_text())


@dataclass(frozen=True)
class ExpectedData:
    """Which queries must return data on this machine, and which must not, with the reason."""

    some: list[str]
    none: dict[str, str]


def expect_data(queries: Iterable[str], exporter_version: str) -> ExpectedData:
    found = ExpectedData([], {})
    for query in queries:
        known = [WITHOUT_DATA[name] for name in re.findall(r"[a-zA-Z_:][\w:]*", query) if name in WITHOUT_DATA]
        if not known:
            found.some.append(query)
        elif not any(_may_have(each, exporter_version) for each in known):
            found.none[query] = known[0]["why"]
    return found


def _may_have(known: Mapping[str, str], exporter_version: str) -> bool:
    newer = "since" in known and _numbers(exporter_version) >= _numbers(known["since"])
    return newer or ("unless" in known and bool(glob(known["unless"])))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
