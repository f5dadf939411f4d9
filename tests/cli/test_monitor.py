"""Tests of what `dalsegno monitor` prints and writes. Prometheus itself is tested on a real cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from dalsegno.cli.cluster.status import daemon_rows
from dalsegno.cli.measure.dashboards import command as dashboards
from dalsegno.cli.measure.monitor import command, describe_missing, show_status, write_private
from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.inject.records import record
from dalsegno.observe.grafana import PASSWORD, grafana_files
from dalsegno.observe.missing_data import MetricOrigin, MissingMetric, OriginState
from dalsegno.observe.prometheus import monitor_files
from dalsegno.observe.prometheus_client import ScrapeHealth, ScrapeState
from dalsegno.observe.remote_write import RemoteWriteHealth, WriteState
from dalsegno.spec.facts import Cluster, Monitoring, facts_to_json
from dalsegno.targets.base import ClusterPhase, ClusterStatus, DaemonStatus
from dalsegno.targets.folder import ClusterRole
from dalsegno.targets.hyperpod.folder import HyperPodStage, HyperPodState
from dalsegno.targets.hyperpod.head import HyperPodHead
from dalsegno.targets.local.fault_access import only_in_hardware
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.target import LocalTarget
from tests.observe.layouts import layout


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home with a cluster whose file turns monitoring off."""
    folder = tmp_path / "clusters/one"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    cluster = Cluster("one", "local", (), (), monitoring=Monitoring(enabled=False))
    (folder / "cluster.json").write_text(json.dumps(facts_to_json(cluster)))
    return tmp_path


def test_up_is_refused_where_monitoring_is_turned_off(home: Path):
    env = {"DALSEGNO_HOME": str(home), "DALSEGNO_CLUSTER": "", "SLURM_CONF": ""}
    error = CliRunner(env=env).invoke(command, ["up"]).exception
    assert isinstance(error, TargetError)
    assert error.what == "monitoring of one is turned off" and "enabled: false" in error.hint
    assert not (home / "clusters/one/monitor.json").exists()
    with pytest.raises(TargetError, match="turned off"):
        LocalTarget(home / "clusters/one", home / "cache").switch_monitor(True)


def test_only_faults_that_disturb_a_change_are_undone_by_it(tmp_path: Path):
    folder = Folder(tmp_path / "clusters/one")
    assert only_in_hardware(folder, "n1")
    record(folder.faults("n1"), "xid", "n1", {})
    record(folder.faults("n1"), "ecc", "n1", {})
    assert only_in_hardware(folder, "n1")
    record(folder.faults("n1"), "net-cut", "n1", {})
    assert not only_in_hardware(folder, "n1")


# Status


def target(state: ScrapeState) -> ScrapeHealth:
    return ScrapeHealth("node", "n1", "10.0.0.1:9100", state)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "no targets yet"),
        ([target(ScrapeState.UNKNOWN), target(ScrapeState.UP)], "1 of 2 targets were not read yet"),
        ([target(ScrapeState.UP)], "no alert fires"),
    ],
)
def test_status_says_what_is_not_known_yet(capsys: pytest.CaptureFixture[str], targets: list[ScrapeHealth], said: str):
    show_status(layout(), targets, [])
    shown = capsys.readouterr()
    assert said in shown.err and ("no alert fires" in shown.err) == (said == "no alert fires")
    assert bool(targets) == ("JOB" in shown.out)


def test_status_names_a_server_that_does_not_get_the_metrics(capsys: pytest.CaptureFixture[str]):
    fails = RemoteWriteHealth("https://example.org/write", WriteState.FAILING, 5, "the server refused 3 samples")
    show_status(layout(), [target(ScrapeState.UP)], [], [fails])
    shown = capsys.readouterr()
    assert "the server refused 3 samples" in shown.out and "dalsegno logs --daemon prometheus" in shown.err
    show_status(replace(layout(), alertmanager=""), [target(ScrapeState.UP)], [])
    shown = capsys.readouterr()
    assert "REMOTE WRITE" not in shown.out and "Alertmanager" not in shown.err


def test_node_exporters_are_counted_by_host():
    daemons = tuple(DaemonStatus(host, "node-exporter", True) for host in ("head", "n1", "n2"))
    status = ClusterStatus("one", "local", ClusterPhase.UP, daemons=daemons)
    assert daemon_rows(status) == [["node-exporter", "3 hosts", "running"]]


def test_head_of_a_cloud_knows_its_prometheus_and_writes_no_configuration_for_another(tmp_path: Path):
    folder = tmp_path / "clusters/one"
    folder.mkdir(parents=True)
    state = HyperPodState(HyperPodStage.UP, "us-east-1", "b", "p", role=ClusterRole.HEAD)
    (folder / "state.json").write_text(json.dumps(facts_to_json(state)))
    for on in (False, True):
        cluster = Cluster("one", "hyperpod", (), (), monitoring=Monitoring(prometheus=on))
        (folder / "cluster.json").write_text(json.dumps(facts_to_json(cluster)))
        assert HyperPodHead(folder).has_monitor() is on
    assert HyperPodHead(folder).monitor_layout().prometheus == "127.0.0.1:9090"
    assert HyperPodHead(folder).monitor_layout().password_file == str(folder / "secret/monitor-password")
    env = {"DALSEGNO_HOME": str(tmp_path), "DALSEGNO_CLUSTER": "", "SLURM_CONF": ""}
    error = CliRunner(env=env).invoke(command, ["config", str(tmp_path / "out")]).exception
    assert isinstance(error, DalsegnoError) and "only on its own machines" in error.what
    assert f"{folder}/prometheus" in error.hint and not (tmp_path / "out").exists()
    exported = CliRunner(env=env).invoke(dashboards, ["export", str(tmp_path / "early")])
    assert isinstance(exported.exception, DalsegnoError) and not (tmp_path / "early").exists()
    (folder / "secret").mkdir()
    (folder / "secret/monitor-password").write_text("hidden")
    exported = CliRunner(env=env).invoke(dashboards, ["export", str(tmp_path / "grafana")])
    assert exported.exit_code == 0, exported.output
    assert (tmp_path / "grafana" / PASSWORD).read_text() == "hidden\n"
    error = CliRunner(env=env).invoke(command, ["up"]).exception
    assert isinstance(error, TargetError) and "was created from another machine" in error.what


# Panels without data


def test_missing_panels_fit_80_columns():
    why = "node_exporter does not answer: Get http://10.0.0.1:9100/metrics: context deadline exceeded"
    panels = tuple(f"GPUs: some panel with a long title {number}" for number in range(7))
    names = [f"DCGM_FI_DEV_SOME_RATHER_LONG_NAME_{number}" for number in range(5)]
    missing = [MissingMetric(name, MetricOrigin.NODE_AGENT, OriginState.FAILING, why, panels) for name in names]
    lines = describe_missing(missing, 80).splitlines()
    assert lines[0] == "node agent, through node_exporter: failing"
    assert max(map(len, lines)) <= 80 and "and 2 more" in " ".join(lines)
    assert [line.split()[0] for line in lines[1:] if line[2] != " "] == ["why:", "metrics:", "panels:"]


# Files


def test_files_that_cannot_be_written_leave_no_folder(tmp_path: Path):
    with pytest.raises(DalsegnoError):
        write_private(tmp_path / "new/config", {"rules/" + "x" * 300: "text"})
    assert list(tmp_path.iterdir()) == []


def test_files_name_the_command_that_writes_them():
    exported = {**monitor_files(layout(), "dalsegno monitor config"), **grafana_files("demo", "h:9090", login=True)}
    headings = {name: text.splitlines()[0] for name, text in exported.items() if name.endswith(".yml")}
    for name, heading in headings.items():
        own = "dashboards export" if name.startswith(("provisioning/", "compose")) else "monitor config"
        assert heading.endswith(f"`dalsegno {own}` writes it again."), name
        assert isinstance(yaml.safe_load(exported[name]), dict)
    assert "`dalsegno up` writes" in monitor_files(layout())["prometheus.yml"]
