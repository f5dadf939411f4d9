"""Monitoring of a local cluster: its files and services, its ports, its switch, its secrets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Monitoring, SlackAlerts, Slurm, Switch
from dalsegno.system.files import make_folder
from dalsegno.targets.folder import has_prometheus, write_monitor_switch
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.monitoring import check_secret_files, make_monitor_folders, monitor_layout
from dalsegno.targets.local.plan import make_plan
from tests.local.test_desired import FOLDER, USER, cluster, put, running, want

ON = Monitoring(prometheus=True)
WATCHED = cluster(2, monitoring=ON)


def names(host):
    return [service.name for service in host.services]


def test_prometheus_runs_on_the_head_and_node_exporter_on_every_host():
    hosts = want(WATCHED).hosts
    assert names(hosts["head"])[-3:] == ["prometheus", "alertmanager", "node-exporter"]
    assert names(hosts["train-1"]) == ["slurmd", "node-agent", "node-exporter"]
    assert not any("exporter" in name for host in want(cluster(2)).hosts.values() for name in names(host))


def test_node_exporter_reads_the_metrics_of_its_own_node():
    hosts = want(WATCHED).hosts
    for node in ("train-1", "train-2"):
        argv = next(service.argv for service in hosts[node].services if service.name == "node-exporter")
        assert f"--collector.textfile.directory={FOLDER.node_metrics(node)}" in argv


def test_all_programs_ask_for_the_password():
    for host in want(WATCHED).hosts.values():
        for service in host.services:
            if service.name in ("prometheus", "alertmanager"):
                assert f"--web.config.file={FOLDER.monitor_web_config}" in service.argv
            if service.name == "node-exporter":
                assert f"--web.config.file={FOLDER.exporter_web_config}" in service.argv


def test_configuration_is_private_and_targets_have_partition_and_rack():
    slurm = Slurm(topology=(Switch("leaf-1", ("train-1",)), Switch("leaf-2", ("train-2",))))
    files = want(cluster(2, monitoring=ON, slurm=slurm)).files
    own = {name: file for name, file in files.items() if name.startswith("monitor/")}
    assert {file.mode for file in own.values()} == {0o600}
    targets = json.loads(own["monitor/targets/nodes.json"].text)
    assert [(each["labels"].get("partition"), each["labels"].get("rack")) for each in targets] == [
        (None, None), ("train", "leaf-1"), ("train", "leaf-2"),
    ]  # fmt: skip


def test_added_node_changes_the_targets_and_restarts_nothing_of_prometheus():
    plan = make_plan(cluster(3, monitoring=ON), put(cluster(3)), want(cluster(3, monitoring=ON)), running(WATCHED))
    assert "monitor/targets/nodes.json" in plan.write
    assert [name for _, name in plan.restart if name in ("prometheus", "alertmanager", "node-exporter")] == []


def test_changed_settings_restart_prometheus():
    changed = cluster(2, monitoring=replace(ON, retention_s=3600))
    plan = make_plan(changed, put(changed), want(changed), running(WATCHED))
    assert plan.restart == (("head", "prometheus"),)


def test_services_that_are_no_longer_wanted_are_stopped():
    plan = make_plan(cluster(2), put(cluster(2)), want(cluster(2)), running(WATCHED))
    assert set(plan.stop) == {
        ("head", "prometheus"), ("head", "alertmanager"), ("head", "node-exporter"),
        ("train-1", "node-exporter"), ("train-2", "node-exporter"),
    }  # fmt: skip
    assert plan.changes and any(line.startswith("stops prometheus on head") for line in plan.sentences())


def test_loopback_cluster_gets_a_port_for_each_program():
    placed = put(WATCHED, USER)
    made = monitor_layout(WATCHED, FOLDER, placed)
    addresses = [made.observer, made.prometheus, made.alertmanager, *(node.address for node in made.nodes)]
    assert len(set(addresses)) == 6 and {each.partition(":")[0] for each in addresses} == {"127.0.0.1"}
    head = want(WATCHED, USER).hosts["head"]
    assert names(head).count("node-exporter") == 1 and "node-exporter:train-1" in names(head)
    alone = next(service.argv for service in head.services if service.name == "node-exporter:train-1")
    assert "--collector.disable-defaults" in alone


# The switch


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("on", [True, False])
def test_switch_counts_until_the_file_changes(tmp_path: Path, in_file: bool, on: bool):
    folder = Folder(tmp_path / "clusters/demo")
    make_folder(folder.root)
    before = cluster(1, monitoring=Monitoring(prometheus=in_file))
    after = cluster(1, monitoring=Monitoring(prometheus=not in_file))
    assert has_prometheus(before, folder) is in_file
    write_monitor_switch(before, folder, on)
    assert has_prometheus(before, folder) is on
    assert has_prometheus(after, folder) is not in_file


# Secrets


def test_password_is_private_and_kept(tmp_path: Path):
    folder = Folder(tmp_path / "clusters/demo")
    make_monitor_folders(folder)
    password, users = folder.monitor_password.read_text(), folder.monitor_web_config.read_text()
    assert {path.stat().st_mode & 0o777 for path in (folder.monitor_password, folder.monitor_web_config)} == {0o600}
    assert folder.monitor.stat().st_mode & 0o777 == 0o700
    assert json.loads(users)["basic_auth_users"]["dalsegno"].startswith("$2b$")
    make_monitor_folders(folder)
    assert folder.monitor_password.read_text() == password


def test_password_that_is_sent_to_nodes_opens_neither_prometheus_nor_alertmanager(tmp_path: Path):
    folder = Folder(tmp_path / "clusters/demo")
    make_monitor_folders(folder)
    assert folder.exporter_password.read_text() != folder.monitor_password.read_text()
    assert {path.stat().st_mode & 0o777 for path in (folder.exporter_password, folder.exporter_web_config)} == {0o600}
    scrapes = yaml.safe_load(want(WATCHED).files["monitor/prometheus.yml"].text)["scrape_configs"]
    sent = {job["job_name"]: job["basic_auth"]["password_file"] for job in scrapes if "basic_auth" in job}
    assert sent == {"node": str(FOLDER.exporter_password)}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660])
def test_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int):
    file = tmp_path / "slack"
    file.write_text("https://hooks.slack.com/x")
    file.chmod(mode)
    settings = replace(ON, slack=(SlackAlerts(str(file)),))
    with pytest.raises(TargetError, match="other users may read or own"):
        check_secret_files(cluster(1, monitoring=settings))
    file.chmod(0o600)
    check_secret_files(cluster(1, monitoring=settings))


def test_hint_quotes_the_path_of_a_secret(tmp_path: Path):
    file = tmp_path / "my slack"
    file.write_text("https://hooks.slack.com/x")
    file.chmod(0o644)
    with pytest.raises(TargetError) as refused:
        check_secret_files(cluster(1, monitoring=replace(ON, slack=(SlackAlerts(str(file)),))))
    assert f"chmod 600 '{file}'" in refused.value.hint


def test_missing_secret_is_refused(tmp_path: Path):
    settings = replace(ON, slack=(SlackAlerts(str(tmp_path / "none")),))
    with pytest.raises(TargetError, match="cannot be read"):
        check_secret_files(cluster(1, monitoring=settings))
