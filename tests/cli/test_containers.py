"""Tests of `dalsegno containers check` without a cluster, and of its report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dalsegno.cli.containers.containers import describe_steps, others, report_as_json, table_rows
from dalsegno.containers.plugstack import CommandStep, ContainerFinding, PluginFacts
from dalsegno.containers.plugstack.facts import StackLine
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState
from tests.cluster.conftest import SOURCE
from tests.conftest import Command

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


@pytest.fixture
def check(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    return partial(command, "containers", "check")


def test_cluster_file_without_ssh_hosts_is_refused(check: Command, tmp_path: Path):
    (tmp_path / "c.yaml").write_text("name: one\ntarget: local\npartitions: [{name: n, nodes: 1}]\n")
    refused = check(str(tmp_path / "c.yaml"))
    assert refused.returncode == 2 and "its target is `local`" in refused.stderr and "needs no file" in refused.stderr
    both = check(str(tmp_path / "c.yaml"), "-M", "one")
    assert both.returncode == 2 and "cannot be combined" in both.stderr


def test_wrong_usage_exits_2_with_a_hint(check: Command, tmp_path: Path):
    (tmp_path / "far.yaml").write_text(FILE)
    (tmp_path / "bad.yaml").write_text("name: far\ntarget: ssh\nnonsense: 1\n")
    far, bad = str(tmp_path / "far.yaml"), str(tmp_path / "bad.yaml")
    for args, message in (
        ([f"{far}x"], "the file does not exist"),
        ([bad], "nonsense"),
        (["-M", "nope"], "there is no cluster `nope`"),
        ([far, "-o", "Nonsense"], "invalid ssh option 'Nonsense'"),
        (["-o", "Foo"], "invalid ssh option 'Foo'"),
        (["--folder", "rel"], "use an absolute path"),
        (["--folder", "/a b"], "without blanks"),
        (["--repair"], "error: `--repair` was removed"),
        ([far, "--dry-run"], "error: `--dry-run` was removed"),
    ):
        refused = check(*args)
        assert refused.returncode == 2 and message in refused.stderr and "hint: " in refused.stderr, refused


def test_node_that_runs_the_check_is_counted_once():
    nodes = [NodeInfo(name, NodeState.IDLE) for name in ("n1", "n2")]
    nodes.append(NodeInfo("n3", NodeState.IDLE, frozenset({NodeFlag.POWERED_DOWN})))
    assert (others(nodes, "n1"), others(nodes, "login")) == (("n2",), ("n1", "n2"))


def test_missing_slurm_conf_is_reported_at_once(check: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    done = check()
    assert done.returncode == 2 and "SLURM_CONF names /nowhere/slurm.conf, which does not exist" in done.stderr


def test_slurm_without_slurm_conf_is_reported(check: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(
        "#!/bin/sh\necho 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1\n"
    )
    for name in ("scontrol", "sinfo"):
        (tmp_path / "bin" / name).write_bytes((tmp_path / "bin/scontrol").read_bytes())
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    done = check()
    assert (
        done.returncode == 1
        and "error: Slurm's commands are installed here, but they find no slurm.conf" in done.stderr
    )
    assert "set SLURM_CONF" in done.stderr and "containers check FILE" in done.stderr


def test_bad_ssh_option_is_reported_once_for_all_hosts(check: Command, tmp_path: Path):
    (tmp_path / "far.yaml").write_text(FILE)
    done = check(str(tmp_path / "far.yaml"), "-o", "Nonsense=1")
    assert done.returncode == 1 and "head,n-[1-3]: did not answer: ssh: " in done.stdout
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


LINE = StackLine("/etc/slurm/plugstack.conf", "required /lib/spank_pyxis.so")
KNOWS = {"lines": (LINE,), "plugins": ("/lib/spank_pyxis.so",), "knows": frozenset({"srun"}), "enroot": "3.5.0"}
HOSTS = [
    PluginFacts("n1", **KNOWS),  # type: ignore[arg-type]
    PluginFacts("n3"),
    PluginFacts("n2", **KNOWS),  # type: ignore[arg-type]
    PluginFacts("n4", silent="ssh: refused"),
]
STEP = CommandStep(("n1", "n2"), "load it", ("modprobe overlay", "true"), "Not at night.")


def test_hosts_with_the_same_result_share_a_row():
    assert table_rows(HOSTS) == [
        ["n[1-2]", "yes", "/lib/spank_pyxis.so", "3.5.0"],
        ["n3", "no", "-", "-"],
        ["n4", "?", "?", "?"],
    ]


def test_steps_are_numbered_text_for_a_shell():
    first, second = describe_steps([STEP, CommandStep(("n3",), "again", ("true",))])
    assert first == "# 1. on n[1-2]: load it\n# caution: Not at night.\nmodprobe overlay\ntrue"
    assert second == "# 2. on n3: again\ntrue"


def test_json_report_has_hosts_findings_commands_and_skipped_hosts():
    report = report_as_json(["n9"], HOSTS, [ContainerFinding("n3", "lacks it", "add it")], [STEP])
    assert report["ok"] is False and report["not_asked"] == ["n9"]
    assert [(host["host"], host["asked"]) for host in report["hosts"]] == [  # type: ignore[attr-defined]
        ("n1", True), ("n3", True), ("n2", True), ("n4", False)
    ]  # fmt: skip
    assert report["findings"] == [{"host": "n3", "what": "lacks it", "fix": "add it"}]
    assert report["commands"] == [
        {
            "hosts": ("n1", "n2"),
            "purpose": "load it",
            "commands": ("modprobe overlay", "true"),
            "caution": "Not at night.",
        }
    ]
