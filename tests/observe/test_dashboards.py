"""Dashboards: their JSON, the files that start Grafana, and the explanation of panels without data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import get_args, get_type_hints

import pytest
import yaml
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as grafana
from grafana_foundation_sdk.models.timeseries import Options

from dalsegno.observe.dashboards import DASHBOARDS
from dalsegno.observe.grafana import ADMIN_PASSWORD, PASSWORD, grafana_files, workspace_files
from dalsegno.observe.missing_data import (
    MetricOrigin,
    OriginState,
    explain_missing,
    metrics_in,
    origin_of,
    panels_by_metric,
)
from dalsegno.observe.panels import DATASOURCE_UID, Dashboard, dashboard_json, of_cluster
from dalsegno.observe.prometheus_client import ScrapeHealth, ScrapeState
from tests.observe.metric_names import SERVED
from tests.observe.test_alert_rules import NEEDS_PROMTOOL, promtool

UP = (ScrapeHealth("dalsegno", "head", "a:1", ScrapeState.UP), ScrapeHealth("node", "n1", "b:1", ScrapeState.UP))


def test_dashboards_query_only_metrics_that_are_served():
    asked = set(panels_by_metric(DASHBOARDS))
    own = {name for name in asked if not name.startswith("node_") or name.startswith("node_amazonefa_")}
    assert own - SERVED == set()
    assert len(own) > 60


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_dashboard_has_a_fixed_datasource_and_panels_that_do_not_overlap(dashboard):
    made = dashboard_json(dashboard)
    taken = set()
    for panel in made["panels"]:
        assert panel["datasource"]["uid"] == DATASOURCE_UID
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {DATASOURCE_UID}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert made["templating"]["list"][0]["name"] == "cluster"


def read_by_grafanas_sdk(dashboard: Dashboard) -> grafana.Dashboard:
    """Return a dashboard as Grafana's own SDK reads its JSON, with the types of each kind of panel and query."""
    register_default_plugins()
    return grafana.Dashboard.from_json(json.loads(json.dumps(dashboard_json(dashboard))))


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_grafanas_own_sdk_reads_the_dashboard_without_loss(dashboard):
    read = read_by_grafanas_sdk(dashboard)
    again = json.loads(json.dumps(read, default=lambda each: each.to_json()))
    lost = {re.sub(r"\[\d+\]", "[]", each) for each in differences(dashboard_json(dashboard), again)}
    assert lost <= {".templating.list[].definition"}, "the SDK leaves out only what Grafana's editor shows"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)
def test_dashboard_has_only_values_that_grafana_accepts(dashboard):
    read = read_by_grafanas_sdk(dashboard)
    assert list(unknown_words(read)) == []
    options = next(panel.options for panel in read.panels or [] if isinstance(panel.options, Options))
    options.tooltip.mode = "loud"  # type: ignore[assignment]
    assert list(unknown_words(read)) == ["mode: loud"]


def unknown_words(value: object) -> Iterator[str]:
    """Yield the values that are not members of their enum. The SDK itself accepts any text."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from unknown_words(each)
    elif isinstance(value, dict):
        yield from unknown_words(list(value.values()))
    elif hasattr(value, "to_json"):
        for name, hint in get_type_hints(type(value)).items():
            own = getattr(value, name, None)
            enums = [each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, Enum)]
            if isinstance(own, str) and enums and not any(own in {one.value for one in each} for each in enums):
                yield f"{name}: {own}"
            yield from unknown_words(own)


def refusals(dashboards: list[dict[str, object]]) -> list[str]:
    """Return the reasons for which Grafana's provisioning would refuse these files in one folder."""
    found = []
    for key in ("uid", "title"):
        values = [str(each.get(key) or "") for each in dashboards]
        found += [f"{key} {each!r} twice" for each in set(values) if values.count(each) > 1]
        found += [f"no {key}" for each in values if not each]
    uids = [str(each["uid"]) for each in dashboards]
    found += [f"invalid uid {each}" for each in uids if not re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", each)]
    found += [f"{each['uid']} has an id of another database" for each in dashboards if each.get("id") is not None]
    return found


def test_grafana_can_load_all_dashboards_into_one_folder():
    made = [dashboard_json(each) for each in DASHBOARDS]
    assert refusals(made) == []
    assert len(refusals([*made, dashboard_json(replace(DASHBOARDS[0], uid="not allowed"))])) == 2


def differences(made: object, read: object, path: str = "") -> Iterator[str]:
    """Yield the paths whose values the reader dropped or changed."""
    if isinstance(made, dict) and isinstance(read, dict):
        for key, value in made.items():
            yield from differences(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
    elif isinstance(made, list) and isinstance(read, list) and len(made) == len(read):
        for number, (one, other) in enumerate(zip(made, read, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif made != read:
        yield path


def test_every_metric_of_a_query_is_of_the_chosen_cluster():
    assert of_cluster('up{job="node"} + on (node) sum(slurm_x) / dalsegno_y') == (
        'up{cluster=~"$cluster",job="node"} + on (node) sum(slurm_x{cluster=~"$cluster"})'
        ' / dalsegno_y{cluster=~"$cluster"}'
    )
    assert (
        of_cluster('label_replace(DCGM_A, "node_x", "up")')
        == 'label_replace(DCGM_A{cluster=~"$cluster"}, "node_x", "up")'
    )


@NEEDS_PROMTOOL
def test_promtool_accepts_every_query(tmp_path):
    exprs = [t["expr"] for each in DASHBOARDS for panel in dashboard_json(each)["panels"] for t in panel["targets"]]
    plain = [re.sub(r"\$__\w+", "5m", expr) for expr in exprs]
    rules = [{"record": f"q{number}", "expr": expr} for number, expr in enumerate(plain)]
    (tmp_path / "q.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(exprs)} rules found" in promtool("check", "rules", "q.yml", cwd=tmp_path)


def test_grafana_gets_the_password_from_a_secret():
    files = grafana_files("demo", "10.0.0.2:9090", login=True)
    source = yaml.safe_load(files["provisioning/datasources/prometheus.yml"])["datasources"][0]
    assert (source["uid"], source["url"], source["basicAuthUser"]) == (
        DATASOURCE_UID,
        "http://10.0.0.2:9090",
        "dalsegno",
    )
    assert source["secureJsonData"] == {"basicAuthPassword": f"$__file{{/run/secrets/{PASSWORD}}}"}
    compose = yaml.safe_load(files["compose.yml"])
    assert compose["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert compose["secrets"][PASSWORD] == {"file": f"./{PASSWORD}"}
    assert sum(path.startswith("dashboards/") for path in files) == 6
    assert all(json.loads(text) for path, text in files.items() if path.endswith(".json"))


def test_other_prometheus_needs_no_password():
    files = grafana_files("any", "prom:9090", login=False)
    assert "basicAuth" not in files["provisioning/datasources/prometheus.yml"] and PASSWORD not in files["compose.yml"]


def test_grafanas_admin_never_has_the_default_password():
    url = "https://aps-workspaces.us-east-1.amazonaws.com/workspaces/ws-1/api/v1/remote_write"
    exports = [grafana_files("demo", "prom:9090", login=login) for login in (False, True)]
    for files in [*exports, workspace_files("demo", url, "us-east-1")]:
        compose = yaml.safe_load(files["compose.yml"])
        grafana = compose["services"]["grafana"]
        assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == f"/run/secrets/{ADMIN_PASSWORD}"
        assert ADMIN_PASSWORD in grafana["secrets"] and compose["secrets"].keys() == {*grafana["secrets"]}


def test_metrics_of_an_expression_are_found_without_label_values():
    assert metrics_in('sum(slurm_a{x="dalsegno_b"}) / node_c') == ["slurm_a", "node_c"]


def test_every_panel_metric_has_an_origin():
    origins = {origin_of(metric) for metric in panels_by_metric(DASHBOARDS)}
    assert origins == set(MetricOrigin)


def missing(present=(), targets=UP, collected=None, agents=("n1",)):
    found = explain_missing(DASHBOARDS, present, targets, {"squeue": True} if collected is None else collected, agents)
    return {each.name: each for each in found}


def test_absent_metrics_of_working_exporters_are_not_failures():
    found = missing()
    assert {each.state for each in found.values()} == {OriginState.QUIET}
    assert found["training_loss"].panels == ("Runs and goodput: Loss",)
    assert missing(present=set(panels_by_metric(DASHBOARDS))) == {}


def test_exporter_that_does_not_answer_is_named_with_its_error():
    down = (UP[0], ScrapeHealth("node", "n1", "b:1", ScrapeState.DOWN, "connection refused"))
    found = missing(targets=down)
    assert found["node_load1"].state is OriginState.FAILING
    assert "connection refused" in found["DCGM_FI_DEV_GPU_TEMP"].why
    assert found["slurm_queue_running"].state is OriginState.QUIET


def test_one_node_that_is_off_is_not_the_reason():
    some = (*UP, ScrapeHealth("node", "n2", "c:1", ScrapeState.DOWN, "no route to host"))
    assert missing(targets=some)["node_load1"].state is OriginState.QUIET


def test_failed_source_of_the_observer_is_named():
    found = missing(collected={"squeue": False, "runs": True})
    assert found["slurm_queue_running"].state is OriginState.FAILING
    assert found["training_loss"].state is OriginState.QUIET


def test_separate_exporter_of_slurm_is_named_where_there_is_one():
    slurm = ScrapeHealth("slurm", "head", "c:1", ScrapeState.DOWN, "connection refused")
    found = missing(targets=(*UP, slurm))
    assert found["slurm_queue_running"].why == "the slurm-exporter does not answer: connection refused"
    assert found["training_loss"].state is OriginState.QUIET, "the observer provides it"
    works = (*UP, replace(slurm, state=ScrapeState.UP))
    assert "daemon slurm-exporter`" in missing(targets=works, collected={"squeue": False})["slurm_queue_running"].why


def test_node_agents_without_metrics_are_named():
    found = missing(agents=())
    assert found["DCGM_FI_DEV_GPU_TEMP"].state is OriginState.FAILING
    assert found["node_load1"].state is OriginState.QUIET
