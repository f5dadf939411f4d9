"""Tests of `dalsegno web` without an observer; tests/cluster/test_web.py has one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.cluster.web import command, tunnel_command
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.spec.facts import Cluster, Monitoring, facts_to_json
from dalsegno.web.login import LoginAddress
from dalsegno.web.sessions import WebRole

LOGIN = LoginAddress("secret", WebRole.OPERATOR, "10.216.0.2", 6820, 60.0)


def invoke(home: Path, *arguments: str) -> BaseException | None:
    return CliRunner(env={"DALSEGNO_HOME": str(home), "DALSEGNO_CLUSTER": "", "SLURM_CONF": ""}).invoke(
        command, arguments
    ).exception  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "clusters/one"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    return tmp_path


def apply(home: Path, monitoring: Monitoring) -> None:
    cluster = Cluster("one", "local", (), (), monitoring=monitoring)
    (home / "clusters/one/cluster.json").write_text(json.dumps(facts_to_json(cluster)))


def test_cluster_without_a_web_page_says_so(home: Path):
    apply(home, Monitoring(enabled=False))
    error = invoke(home)
    assert isinstance(error, DalsegnoError)
    assert "turned off" in error.what and "monitoring" in error.hint


def test_observer_that_does_not_answer_is_named(home: Path):
    apply(home, Monitoring())
    error = invoke(home, "--json")
    assert isinstance(error, DalsegnoError)
    assert error.what == "the web page of this cluster does not answer"
    assert "dalsegno status" in error.hint


def test_revoke_is_not_combined(home: Path):
    assert isinstance(invoke(home, "--revoke", "--tunnel"), UsageError)


def test_login_and_tunnel_have_the_address_of_the_page():
    assert LOGIN.url() == "http://10.216.0.2:6820/login?token=secret"
    assert LOGIN.url("localhost") == "http://localhost:6820/login?token=secret"
    assert "-L 6820:10.216.0.2:6820" in tunnel_command(LOGIN)
    six = LoginAddress("secret", WebRole.USER, "fd00::1", 6820, 60.0)
    assert six.url() == "http://[fd00::1]:6820/login?token=secret"
