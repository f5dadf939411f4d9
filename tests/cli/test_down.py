"""Tests of `down` for a cluster that does not exist."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dalsegno.cli.main import cli
from dalsegno.errors import UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state folder with the cluster `hc`. The cluster.yaml of the working directory names `heal`."""
    (tmp_path / "home/clusters/hc").mkdir(parents=True)
    (tmp_path / "home/clusters/hc/state.json").write_text("{}")
    (tmp_path / "cluster.yaml").write_text("name: heal\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DALSEGNO_CLUSTER", raising=False)
    return tmp_path / "home"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may change every cluster")
def test_down_of_unknown_cluster_lists_existing_ones(home: Path) -> None:
    done = CliRunner().invoke(cli, ["down", "--yes"])
    assert (done.exit_code, done.stderr.splitlines()) == (
        0,
        [
            "there is no cluster heal: nothing to remove",
            "hint: that name is from ./cluster.yaml; existing clusters: hc; to remove one: `dalsegno down hc`",
        ],
    )
    named = CliRunner().invoke(cli, ["down", "other", "--yes"])
    assert named.stderr.splitlines()[1:] == ["hint: existing clusters: hc; to remove one: `dalsegno down hc`"]
    assert (home / "clusters/hc").is_dir()


def test_down_of_a_file_is_refused_with_the_name_of_its_cluster(home: Path) -> None:
    error = CliRunner().invoke(cli, ["down", "cluster.yaml", "--yes"]).exception
    assert isinstance(error, UsageError)
    assert error.what == "`down` takes the name of a cluster, and not a file: cluster.yaml"
    assert error.hint == "`dalsegno down heal`; `dalsegno ls` lists the clusters"
