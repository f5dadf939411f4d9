"""The configuration of Prometheus and Alertmanager: values in, YAML out; promtool and amtool accept it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dalsegno.errors import DalsegnoError
from dalsegno.observe.alertmanager import render_alertmanager, secret_files, with_webhook_urls
from dalsegno.observe.prometheus import IAM_POLICY, monitor_files, render_prometheus, render_targets
from dalsegno.spec.facts import Monitoring, WebhookAlerts
from tests.observe.layouts import EVERYTHING, layout
from tests.observe.test_alert_rules import NEEDS_PROMTOOL, promtool


@NEEDS_PROMTOOL
@pytest.mark.parametrize("settings", [Monitoring(), EVERYTHING], ids=["plain", "everything"])
def test_promtool_and_amtool_accept_the_configuration(tmp_path, settings):
    (tmp_path / "secret").write_text("https://example.org\n")
    made = layout(settings)
    made = replace(made, token_file=str(tmp_path / "secret"), password_file=str(tmp_path / "secret"))
    made = replace(made, exporter_password_file=str(tmp_path / "secret"))
    for name, text in monitor_files(made).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("/secret/", f"{tmp_path}/secret-"))
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml", cwd=tmp_path)
    if shutil.which("amtool"):
        done = subprocess.run(["amtool", "check-config", "alertmanager.yml"], cwd=tmp_path, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_observer_is_scraped_with_its_token_and_nodes_with_the_password():
    scrapes = {each["job_name"]: each for each in yaml.safe_load(render_prometheus(layout()))["scrape_configs"]}
    assert scrapes["dalsegno"]["authorization"] == {"credentials_file": "/secret/token"}
    assert scrapes["node"]["basic_auth"] == {"username": "dalsegno", "password_file": "/secret/exporter-password"}
    assert scrapes["node"]["file_sd_configs"] == [{"files": ["targets/nodes.json"]}]


def test_open_metrics_are_scraped_without_a_token():
    scrapes = yaml.safe_load(render_prometheus(layout(Monitoring(open_metrics=True))))["scrape_configs"]
    assert "authorization" not in scrapes[0]


def test_short_interval_limits_the_timeout():
    settings = yaml.safe_load(render_prometheus(layout(Monitoring(interval_s=3))))["global"]
    assert (settings["scrape_interval"], settings["scrape_timeout"]) == ("3s", "3s")


def test_targets_have_labels_of_their_place_and_no_empty_ones():
    assert json.loads(render_targets(layout())) == [
        {"targets": ["10.0.0.2:9100"], "labels": {"instance": "head", "cluster": "demo"}},
        {
            "targets": ["10.0.0.3:9100"],
            "labels": {"instance": "train-1", "cluster": "demo", "partition": "train", "rack": "leaf-1"},
        },
        {
            "targets": ["10.0.0.4:9100"],
            "labels": {
                "instance": "spare-1", "cluster": "demo", "partition": "train", "rack": "leaf-2", "spare": "yes",
            },
        },
    ]  # fmt: skip


def test_remote_write_is_signed_and_its_policy_names_the_workspace():
    files = monitor_files(layout(EVERYTHING))
    write = yaml.safe_load(files["prometheus.yml"])["remote_write"]
    assert write[0]["sigv4"] == {"region": "eu-west-1", "role_arn": "arn:aws:iam::123456789012:role/writer"}
    statement = json.loads(files[IAM_POLICY])["Statement"][0]
    assert statement["Action"] == ["aps:RemoteWrite"]
    assert statement["Resource"] == "arn:aws:aps:eu-west-1:*:workspace/ws-12"
    assert IAM_POLICY not in monitor_files(layout())


def test_every_receiver_gets_all_alerts():
    config = render_alertmanager(EVERYTHING)
    (receiver,) = config["receivers"]
    assert config["route"]["receiver"] == receiver["name"]
    assert [each["to"] for each in receiver["email_configs"]] == ["a@example.org, b@example.org"]
    assert [each.get("channel") for each in receiver["slack_configs"]] == ["#ops", None]
    assert [each["url"] for each in receiver["webhook_configs"]] == ["https://example.org/hook"]
    assert render_alertmanager(Monitoring())["receivers"] == [{"name": receiver["name"]}]


def test_secrets_are_named_by_file_and_not_in_the_configuration():
    assert secret_files(EVERYTHING) == ["/secret/smtp", "/secret/slack"]
    email = render_alertmanager(EVERYTHING)["receivers"][0]["email_configs"][0]
    assert email["auth_password_file"] == "/secret/smtp" and "auth_password" not in email


def test_webhook_address_is_read_from_its_file(tmp_path):
    file = tmp_path / "url"
    file.write_text("https://example.org/s3cret\n")
    settings = with_webhook_urls(Monitoring(webhook=(WebhookAlerts(url_file=str(file)),)))
    assert settings.webhook[0].url == "https://example.org/s3cret"


@pytest.mark.parametrize("text", ["", "ftp://x", "https://a\nhttps://b"])
def test_webhook_file_without_an_address_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "url"
    file.write_text(text)
    with pytest.raises(DalsegnoError, match="holds no address"):
        with_webhook_urls(Monitoring(webhook=(WebhookAlerts(url_file=str(file)),)))
