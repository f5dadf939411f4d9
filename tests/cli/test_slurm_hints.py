"""Tests that Slurm commands in hints work in the user's shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.cli.controller_requests import prefix_command, prefix_commands, shell_prefix


def test_slurm_commands_get_a_shell_prefix_outside_a_cluster_shell(tmp_path: Path):
    env = {"DALSEGNO_HOME": str(tmp_path)}
    assert shell_prefix(env=env) == "", "no cluster of Dal Segno: the Slurm of the machine"
    made = tmp_path / "clusters" / "one"
    made.mkdir(parents=True)
    (made / "state.json").touch()
    assert shell_prefix(env=env) == "dalsegno shell -- "
    assert shell_prefix(env={**env, "SLURM_CONF": "/etc/slurm.conf"}) == "", "this shell has a Slurm"
    assert shell_prefix("two", env) == "dalsegno shell --cluster two -- "


def test_only_slurm_commands_get_a_prefix():
    assert prefix_command("squeue -j 5", "dalsegno shell -- ") == "dalsegno shell -- squeue -j 5"
    assert prefix_command("dalsegno why 5", "dalsegno shell -- ") == "dalsegno why 5"
    assert prefix_command("tail slurm-5.out", "dalsegno shell -- ") == "tail slurm-5.out"


def test_slurm_commands_in_hints_get_a_prefix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DALSEGNO_CLUSTER", "one")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert prefix_commands("`sinfo -N` lists nodes, `dalsegno status` shows them") == (
        "`dalsegno shell -- sinfo -N` lists nodes, `dalsegno status` shows them"
    )
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    assert prefix_commands("`sinfo -N` lists nodes") == "`sinfo -N` lists nodes"
