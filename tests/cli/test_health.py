"""Tests of `dalsegno health` on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dalsegno.cli.health.health import command
from dalsegno.errors import UsageError
from dalsegno.health.settings import settings_text
from dalsegno.health.telemetry import healthy, telemetry_text, with_gpu
from dalsegno.spec.facts import CheckSetting, Health

CONF = "NodeName=gpu-1 Port=1 Gres=gpu:h100:2\nAuthType=auth/none\n"
# Other checks depend on the machine that runs the tests.
ONLY_ECC = Health(checks={name: CheckSetting(enabled=False) for name in ("disk", "inodes", "memory", "slurmd")})


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this machine look like a node with simulated GPUs."""
    (tmp_path / "slurm.conf").write_text(CONF)
    (tmp_path / "health.json").write_text(settings_text(ONLY_ECC))
    (tmp_path / "telemetry.json").write_text(telemetry_text(healthy("gpu-1", 2, "h100")))
    for name, value in {"SLURM_CONF": "slurm.conf", "DALSEGNO_TELEMETRY": "telemetry.json"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), catch_exceptions=True)


def break_gpu(node: Path) -> None:
    (node / "telemetry.json").write_text(telemetry_text(with_gpu(healthy("gpu-1", 2, "h100"), 1, ecc_uncorrected=3)))


def test_healthy_machine_passes(node: Path) -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert re.search(r"^gpu-ecc +passed +- +no uncorrected memory errors$", done.output, re.MULTILINE)
    assert re.search(r"^HEALTH_CHECK_RESULT:gpu-1:Passed:none:\d+ checks$", done.output, re.MULTILINE)
    assert run("--reason").output == ""


def test_former_name_of_repaired_is_accepted_and_not_shown() -> None:
    assert command.make_context("health", ["--mended"]).params["formerly"] is True
    assert "--repaired" in run("--help").output and "mended" not in run("--help").output


def test_failed_check_exits_1(node: Path) -> None:
    break_gpu(node)
    done = run()
    assert done.exit_code == 1
    assert re.search(r"^gpu-ecc +failed +reset +uncorrected memory errors on GPU 1", done.output, re.MULTILINE)
    line = run("--line")
    assert line.output.startswith("HEALTH_CHECK_RESULT:gpu-1:Failed:reset:gpu-ecc ") and line.exit_code == 1
    assert run("--reason").output.startswith("dalsegno:reset:gpu-ecc uncorrected memory errors on GPU 1")
    report = json.loads(run("--json", "-x", "validation").output)
    assert [each["remedy"] for each in report["findings"] if each["verdict"] == "failed"] == ["reset"]


def test_damaged_telemetry_is_unknown_and_not_a_failure(node: Path) -> None:
    (node / "telemetry.json").write_text("{")
    done = run()
    assert done.exit_code == 0
    assert re.search(r"^gpu-ecc +unknown +- +the node's telemetry is damaged", done.output, re.MULTILINE)


def test_damaged_settings_file_warns_and_checks_use_defaults(node: Path) -> None:
    (node / "health.json").write_text("[]")
    assert "the checks use their default thresholds" in run("--list").output


def test_list_shows_settings_of_the_cluster_file(node: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("--list", "--json").output)}
    assert (rows["disk"]["on"], rows["gpu-ecc"]["on"]) == (False, True)
    assert rows["gpu-leftovers"]["contexts"] == ["idle", "prolog", "validation"]


@pytest.mark.parametrize("words", [("--line", "--json"), ("--cluster", "x")])
def test_exclusive_output_options_are_refused(node: Path, words: tuple[str, ...]) -> None:
    assert isinstance(run(*words).exception, UsageError)


def test_unknown_context_is_refused() -> None:
    assert run("--context", "sometimes").exit_code == 2
