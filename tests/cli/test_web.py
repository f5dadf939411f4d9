"""Tests of `dalsegno web` without an observer; tests/cluster/test_web.py has one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.cluster.web import command, tunnel_command
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.spec.facts import Cluster, Monitoring, facts_to_json
from dalsegno.web.login import LoginAddress, LoginServer
from dalsegno.web.own_page import page_folder
from dalsegno.web.sessions import Sessions, WebRole

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


@pytest.fixture
def foreign() -> Iterator[dict[str, str]]:
    """Yield the environment of a shell on a cluster that Dal Segno did not create, where the user serves the page."""
    with tempfile.TemporaryDirectory(prefix="ds-", dir="/tmp") as name:  # short enough for a socket
        root = Path(name)
        config = "echo Configuration data as of 0; echo ClusterName = other"
        for program in ("srun", "scontrol"):
            (root / program).write_text(f"#!/bin/sh\n{config}\n")
            (root / program).chmod(0o755)
        (root / "slurm.conf").write_text("ClusterName=other\n")
        folder = page_folder(root, "other").root
        (folder / "run").mkdir(parents=True)
        server = LoginServer(folder, Sessions(root / "sessions.json"), "127.0.0.1:6820", lambda uid: WebRole.OPERATOR)
        server.start()
        yield {
            "DALSEGNO_HOME": name,
            "DALSEGNO_CLUSTER": "",
            "DALSEGNO_CONTROLLER": "",
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{name}:/usr/bin:/bin",
        }
        server.close()


def test_revoke_on_a_cluster_of_others_prints_json(foreign: dict[str, str]):
    done = CliRunner(env=foreign).invoke(command, ["--revoke", "--json"])
    assert json.loads(done.stdout) == {"revoked": 0}


def test_login_and_tunnel_have_the_address_of_the_page():
    assert LOGIN.url() == "http://10.216.0.2:6820/login?token=secret"
    assert LOGIN.url("localhost") == "http://localhost:6820/login?token=secret"
    assert "-L 6820:10.216.0.2:6820" in tunnel_command(LOGIN)
    six = LoginAddress("secret", WebRole.USER, "fd00::1", 6820, 60.0)
    assert six.url() == "http://[fd00::1]:6820/login?token=secret"
