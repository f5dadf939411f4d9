"""Tests that Slurm's own commands accept the files we write."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render import render_slurm_conf
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster, Slurm
from dalsegno.system.processes import Completed, LocalRunner
from tests.slurm.clusters import CLUSTERS

PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
pytestmark = pytest.mark.skipif(shutil.which("scontrol") is None, reason="no Slurm on this machine")


def read_by_scontrol(cluster: Cluster, layout: Layout, folder: Path) -> Completed:
    """Run `scontrol show hostnames`, which reads the whole slurm.conf first and contacts no daemon."""
    env = {"PATH": PATH}  # Slurm's commands print no version without a slurm.conf
    here = Version.parse(LocalRunner().run(["slurmd", "-V"], env=env).stdout)
    conf = folder / "slurm.conf"
    conf.write_text(render_slurm_conf(cluster, layout, here))
    return LocalRunner().run(["scontrol", "show", "hostnames", "n1"], env={**env, "SLURM_CONF": str(conf)})


@pytest.mark.parametrize("name", CLUSTERS)
def test_slurm_reads_our_files(name: str, tmp_path: Path) -> None:
    cluster, layout = CLUSTERS[name]
    here = replace(layout, slurm_user="root", slurmd_user="root")  # scontrol needs users that exist
    done = read_by_scontrol(cluster, here, tmp_path)
    assert (done.exit_code, done.stderr) == (0, "")


def test_invalid_raw_setting_fails_in_slurm(tmp_path: Path) -> None:
    cluster, layout = CLUSTERS["smallest"]
    done = read_by_scontrol(replace(cluster, slurm=Slurm(extra={"NoSuchSetting": "1"})), layout, tmp_path)
    assert done.exit_code != 0 and "NoSuchSetting" in done.stderr
