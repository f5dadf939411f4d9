"""A client of Prometheus' HTTP API: queries, the health of targets, firing alerts."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlencode

from dalsegno.errors import DalsegnoError
from dalsegno.observe.monitor_layout import USER

TIMEOUT_S = 10.0
MAX_ANSWER = 64 << 20


@dataclass(frozen=True)
class QuerySample:
    """A value of an instant query, with its labels."""

    labels: Mapping[str, str]
    value: float


class ScrapeState(Enum):
    """The result of the last scrape of a target."""

    UP = "up"
    DOWN = "down"
    UNKNOWN = "unknown"  # the target was not scraped yet

    @classmethod
    def _missing_(cls, value: object) -> ScrapeState:
        return cls.UNKNOWN


@dataclass(frozen=True)
class ScrapeHealth:
    """The health of a target of Prometheus. `error` says why the last scrape failed; "" if it did not fail."""

    job: str
    host: str
    address: str
    state: ScrapeState
    error: str = ""


@dataclass(frozen=True)
class FiringAlert:
    """An alert that fires now."""

    name: str
    severity: str
    summary: str
    action: str
    since: str
    labels: Mapping[str, str]


class PrometheusClient:
    """Queries one Prometheus. It ignores proxy settings, because a proxy cannot reach the cluster's network."""

    def __init__(self, address: str, password: str, timeout_s: float = TIMEOUT_S) -> None:
        self.address, self._timeout_s = address, timeout_s
        login = base64.b64encode(f"{USER}:{password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {login}"} if password else {}

    def query(self, expr: str) -> list[QuerySample]:
        """Return the present values of an expression. Raise DalsegnoError if Prometheus refuses it."""
        data = self._ask("query", {"query": expr})
        if data.get("resultType") == "scalar":
            return [QuerySample({}, float(data["result"][1]))]
        return [QuerySample(each["metric"], float(each["value"][1])) for each in data.get("result", ())]

    def targets(self) -> list[ScrapeHealth]:
        """Return the health of all targets that Prometheus scrapes."""
        active = self._ask("targets", {"state": "active"}).get("activeTargets", [])
        return [
            ScrapeHealth(
                job=each["labels"].get("job", ""),
                host=each["labels"].get("instance", ""),
                address=each.get("discoveredLabels", {}).get("__address__", ""),
                state=ScrapeState(each.get("health")),
                error=str(each.get("lastError", "")),
            )
            for each in active
        ]

    def alerts(self) -> list[FiringAlert]:
        """Return the alerts that fire now."""
        found = self._ask("alerts", {}).get("alerts", [])
        return [_alert(each) for each in found if each.get("state") == "firing"]

    def ready(self) -> bool:
        """Return whether Prometheus answers queries."""
        try:
            self.query("vector(1)")
        except DalsegnoError:
            return False
        return True

    def _ask(self, what: str, parameters: Mapping[str, str]) -> Any:
        connection = http.client.HTTPConnection(self.address, timeout=self._timeout_s)
        try:
            connection.request("GET", f"/api/v1/{what}?{urlencode(parameters)}", headers=self._headers)
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER)
            parsed = json.loads(body) if body[:1] == b"{" else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            hint = "`dalsegno monitor up` starts it; `dalsegno logs --daemon prometheus` shows its log"
            raise DalsegnoError(f"Prometheus at {self.address} does not answer: {error}", hint=hint) from error
        finally:
            connection.close()
        if parsed.get("status") != "success":
            why = parsed.get("error") or f"HTTP status {answer.status}"
            hint = "`dalsegno logs --daemon prometheus` shows its log"
            raise DalsegnoError(f"Prometheus at {self.address} refused a request: {why}", hint=hint)
        return parsed["data"]


def _alert(found: Mapping[str, Any]) -> FiringAlert:
    labels, texts = found.get("labels", {}), found.get("annotations", {})
    return FiringAlert(
        name=labels.get("alertname", ""),
        severity=labels.get("severity", ""),
        summary=texts.get("summary", ""),
        action=texts.get("action", ""),
        since=found.get("activeAt", ""),
        labels=labels,
    )
