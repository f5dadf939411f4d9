"""Tests of `dalsegno containers check` without a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from dalsegno.cli.containers_hosts import others
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState
from tests.cluster.conftest import SOURCE
from tests.waiting import PATIENCE_S

FILE = """
name: far
target: ssh
ssh: {hosts: {head: 192.0.2.1, "n-[1-3]": "192.0.2.[2-4]"}}
partitions: [{name: n, nodes: 3}]
"""


def words(*args: str) -> list[str]:
    return [sys.executable, "-m", "dalsegno", "containers", "check", *args]


def env(home: Path) -> dict[str, str]:
    return {**os.environ, "DALSEGNO_HOME": str(home), "PYTHONPATH": str(SOURCE)}


def check(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words(*args), env=env(home), capture_output=True, text=True, timeout=60, check=False)


def test_cluster_file_without_ssh_hosts_is_refused(tmp_path: Path):
    (tmp_path / "c.yaml").write_text("name: one\ntarget: local\npartitions: [{name: n, nodes: 1}]\n")
    refused = check(tmp_path, str(tmp_path / "c.yaml"))
    assert refused.returncode == 2 and "its target is `local`" in refused.stderr and "needs no file" in refused.stderr
    both = check(tmp_path, str(tmp_path / "c.yaml"), "-M", "one")
    assert both.returncode == 2 and "cannot be combined" in both.stderr


def test_wrong_usage_exits_2_with_a_hint(tmp_path: Path):
    (tmp_path / "far.yaml").write_text(FILE)
    (tmp_path / "bad.yaml").write_text("name: far\ntarget: ssh\nnonsense: 1\n")
    far, bad = str(tmp_path / "far.yaml"), str(tmp_path / "bad.yaml")
    for args, message in (
        ([f"{far}x"], "the file does not exist"),
        ([bad], "nonsense"),
        (["-M", "nope"], "there is no cluster `nope`"),
        ([far, "-o", "Nonsense"], "invalid ssh option 'Nonsense'"),
        (["-o", "Foo"], "invalid ssh option 'Foo'"),
        (["--folder", "rel"], "from `/` on"),
        (["--folder", "/a b"], "without blanks"),
        (["--repair"], "error: `--repair` was removed"),
        ([far, "--dry-run"], "error: `--dry-run` was removed"),
    ):
        refused = check(tmp_path, *args)
        assert refused.returncode == 2 and message in refused.stderr and "hint: " in refused.stderr, refused


def test_node_that_runs_the_check_is_counted_once():
    nodes = [NodeInfo(name, NodeState.IDLE) for name in ("n1", "n2")]
    nodes.append(NodeInfo("n3", NodeState.IDLE, frozenset({NodeFlag.POWERED_DOWN})))
    assert (others(nodes, "n1"), others(nodes, "login")) == (("n2",), ("n1", "n2"))


def test_missing_slurm_conf_is_reported_at_once(tmp_path: Path):
    done = subprocess.run(
        words(), env={**env(tmp_path), "SLURM_CONF": "/nowhere/slurm.conf"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "SLURM_CONF names /nowhere/slurm.conf, which is not there" in done.stderr


def test_slurm_without_slurm_conf_is_reported(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(
        "#!/bin/sh\necho 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1\n"
    )
    for name in ("scontrol", "sinfo"):
        (tmp_path / "bin" / name).write_bytes((tmp_path / "bin/scontrol").read_bytes())
        (tmp_path / "bin" / name).chmod(0o755)
    here = {**env(tmp_path / "home"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    here.pop("SLURM_CONF", None)
    done = subprocess.run(words(), env=here, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (
        done.returncode == 1
        and "error: Slurm's commands are installed here, but they find no slurm.conf" in done.stderr
    )
    assert "set SLURM_CONF" in done.stderr and "containers check FILE" in done.stderr


def test_bad_ssh_option_is_reported_once_for_all_hosts(tmp_path: Path):
    (tmp_path / "far.yaml").write_text(FILE)
    done = check(tmp_path, str(tmp_path / "far.yaml"), "-o", "Nonsense=1")
    assert done.returncode == 1 and "head,n-[1-3]: could not be asked: ssh: " in done.stdout
    assert "Bad configuration option: nonsense" in done.stdout and "man ssh_config" in done.stdout


def test_ctrl_c_ends_the_check(tmp_path: Path):
    (tmp_path / "far.yaml").write_text(FILE)
    argv = words(str(tmp_path / "far.yaml"), "-o", "ProxyCommand=sleep 10")
    with subprocess.Popen(
        argv, env=env(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        assert running.stderr and running.stderr.readline() == "asking head,n-[1-3]\n"
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(60) == 130
        assert "interrupted" in running.stderr.read()
