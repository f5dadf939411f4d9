"""Tests that a Slurm that does not answer is distinguished from one that refuses a request."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.cli.cluster.cluster_sources import ClusterSources
from dalsegno.cli.controller_requests import is_silence, meaning_of
from dalsegno.cluster import SlurmHere
from dalsegno.errors import CommandFailed, CommandTimedOut, NotThere
from dalsegno.system.processes import LocalRunner

NO_CONTROLLER = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def failed(stderr: str) -> CommandFailed:
    return CommandFailed(["squeue"], 1, stderr)


def test_timeout_counts_as_no_answer():
    with pytest.raises(CommandTimedOut) as late:
        LocalRunner().run(["sleep", "10"], timeout_s=0.01)
    assert is_silence(late.value) and late.value.hint


def test_refusal_is_not_a_missing_answer():
    assert is_silence(failed(NO_CONTROLLER))
    assert not is_silence(failed("slurm_load_jobs error: Invalid job id specified"))


def test_command_without_slurm_conf_means_no_cluster():
    fault = failed(f"squeue: error: fetch_config: DNS SRV lookup failed\n{NO_CONTROLLER}")
    assert isinstance(meaning_of(fault), NotThere)
    assert not isinstance(meaning_of(failed(NO_CONTROLLER)), NotThere)


def test_view_of_a_machine_without_a_cluster_says_so(tmp_path: Path):
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\necho 'sinfo: fatal: Could not establish a configuration source' >&2\nexit 1\n")
    sinfo.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with pytest.raises(NotThere, match="there is no cluster yet"):
        ClusterSources("Slurm", None, SlurmHere(env, None), None).status()
