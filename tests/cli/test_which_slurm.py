"""Tests of how the environment determines a run's Slurm and its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.cluster import find_slurm, is_gone, runs_home, slurm_of
from dalsegno.errors import NotThere


def test_shell_with_slurm_conf_keeps_its_slurm(tmp_path: Path) -> None:
    env = {"SLURM_CONF": "/etc/slurm/slurm.conf", "DALSEGNO_HOME": str(tmp_path), "PATH": ""}
    assert (find_slurm(env=env).env, find_slurm(env=env).controller) == (env, None)
    ours = find_slurm(env={**env, "DALSEGNO_CONTROLLER": "/run/controller"})
    assert ours.controller == Path("/run/controller")


def test_slurm_of_the_machine_is_the_last_choice(tmp_path: Path) -> None:
    env = {"DALSEGNO_HOME": str(tmp_path), "PATH": str(tmp_path)}
    with pytest.raises(NotThere, match="there is no cluster yet"):
        find_slurm(env=env)
    (tmp_path / "sinfo").touch(0o755)
    assert find_slurm(env=env).env == env
    with pytest.raises(NotThere, match="there is no cluster `mine`"):
        find_slurm("mine", env)
    with pytest.raises(NotThere, match="there is no cluster `mine`"):
        find_slurm(env={**env, "DALSEGNO_CLUSTER": "mine"})


def test_run_keeps_its_slurm_in_any_shell() -> None:
    here = {"SLURM_CONF": "/here", "PATH": "/bin", "HOME": "/root", "DALSEGNO_CONTROLLER": "/other"}
    found = slurm_of({"SLURM_CONF": "/there", "PATH": "/there/bin", "TOKEN": "secret"}, here)
    assert found.env == {"SLURM_CONF": "/there", "PATH": "/there/bin", "HOME": "/root"}
    assert found.controller is None


def test_cluster_is_identified_by_its_random_id(tmp_path: Path) -> None:
    saved = {"SLURM_CONF": str(tmp_path / "etc" / "slurm.conf")}
    assert is_gone(saved, "a1b2"), "removed"
    assert not is_gone(saved, ""), "not created by Dal Segno: unknown"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "cluster-id").write_text("a1b2")
    assert not is_gone(saved, "a1b2")
    assert is_gone(saved, "c3d4"), "recreated under the same name"


def test_runs_folder_is_the_users_choice_else_beside_the_clusters(tmp_path: Path) -> None:
    assert runs_home({"DALSEGNO_RUNS": str(tmp_path / "mine")}) == tmp_path / "mine"
    assert runs_home({"DALSEGNO_HOME": str(tmp_path / "h")}) == tmp_path / "h" / "runs"
    assert not (tmp_path / "h").exists(), "a query creates nothing"
