"""Alert and recording rules: promtool accepts them, alerts fire on bad data only, names are those of the dialects."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dalsegno.observe.alert_rules import ALERTS, AlertRule
from dalsegno.observe.prometheus import alert_groups, yaml_text
from tests.observe.alert_cases import CASES, GPU, RECENT, Series, fault

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part

NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in the package prometheus")


def promtool(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def case_file(rule: AlertRule) -> dict[str, object]:
    """Return the input of `promtool test rules` for one alert."""
    case = CASES[rule.name]
    return {
        "rule_files": [f"{rule.name}.rules.yml"],
        "evaluation_interval": "1m",
        "tests": [_test("fires", case.bad, rule, case.at), _test("is quiet", case.good, rule, case.at)],
    }


def _test(name: str, series: Series, rule: AlertRule, at: str) -> dict[str, object]:
    # Count the alert with an expression, because promtool would otherwise compare the text of all annotations.
    count = f'count(ALERTS{{alertname="{rule.name}", alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if name == "fires" else []
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [{"expr": count, "eval_time": at, "exp_samples": expected}],
    }


def test_every_alert_has_a_case():
    assert {rule.name for rule in ALERTS} == set(CASES)


@NEEDS_PROMTOOL
def test_every_alert_fires_on_bad_data_and_is_quiet_on_good_data(tmp_path):
    for rule in ALERTS:
        (tmp_path / f"{rule.name}.rules.yml").write_text(yaml_text(alert_groups([rule], "demo"), "demo"))
        (tmp_path / f"{rule.name}.yml").write_text(yaml.safe_dump(case_file(rule)))
    promtool("test", "rules", *(f"{rule.name}.yml" for rule in ALERTS), cwd=tmp_path)


REPAIRED = {  # alert -> series of a fault that was repaired within a few seconds, in several ways
    "GpuXid": (
        {'DCGM_EXP_XID_ERRORS_COUNT{instance="n1", gpu="0", xid="79"}': "_x64 1 stale"},  # one scrape saw it
        {fault("xid", "79"): RECENT},  # no scrape saw it
        {'DCGM_EXP_XID_ERRORS_COUNT{instance="n1", gpu="0", xid="79"}': "_x64 1 stale", fault("xid", "79"): RECENT},
        {'DCGM_EXP_XID_ERRORS_COUNT{instance="n1", gpu="0", xid="79"}': "1x30 stale", fault("xid", "79"): RECENT},
    ),
    "GpuEcc": (
        {f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{GPU}": "0x64 1 0x20"},
        {fault("gpu-ecc"): RECENT},
        {f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{GPU}": "0x64 1 0x20", fault("gpu-rows"): RECENT},
    ),
}


@NEEDS_PROMTOOL
@pytest.mark.parametrize("name", REPAIRED)
def test_alert_of_a_fault_that_was_repaired_at_once_lasts_and_ends(tmp_path, name):
    rule = next(each for each in ALERTS if each.name == name)
    during = [_test("fires", series, rule, at) for series in REPAIRED[name] for at in ("70m", "78m")]
    after = [_test("is quiet", series, rule, "85m") for series in REPAIRED[name]]
    (tmp_path / "rules.yml").write_text(yaml_text(alert_groups([rule], "demo"), "demo"))
    file = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [*during, *after]}
    (tmp_path / "case.yml").write_text(yaml.safe_dump(file))
    promtool("test", "rules", "case.yml", cwd=tmp_path)


@NEEDS_PROMTOOL
def test_an_alert_that_does_not_fire_fails_its_case(tmp_path):
    rule = AlertRule("GpuHot", "gpus", "DCGM_FI_DEV_GPU_TEMP > 1000", "", "")
    (tmp_path / "GpuHot.rules.yml").write_text(yaml_text(alert_groups([rule], "demo"), "demo"))
    (tmp_path / "GpuHot.yml").write_text(yaml.safe_dump(case_file(rule)))
    with pytest.raises(AssertionError, match="FAILED"):
        promtool("test", "rules", "GpuHot.yml", cwd=tmp_path)


def test_alerts_have_a_next_step_and_name_only_remaining_labels():
    for rule in ALERTS:
        assert rule.summary and rule.action
        for label in re.findall(r"\$labels\.(\w+)", rule.summary + rule.action):
            assert label in "".join(CASES[rule.name].bad), (rule.name, label)


def test_the_page_lists_every_alert():
    page = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| .+ \| (?:\d+ (?:min|h)|at once) \|$", page, re.MULTILINE)
    assert listed == [rule.name for rule in ALERTS]
