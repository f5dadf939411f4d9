"""Tests of `dalsegno exporter` with stand-ins for Slurm's commands that print a generated cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cluster.conftest import SOURCE
from tests.conftest import Command
from tests.observe.text_format import read_families
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put stand-ins for the commands of a Slurm with 20 nodes and 100 jobs on the PATH."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from generated_slurm import write_commands

    folder = tmp_path / "bin"
    folder.mkdir()
    write_commands(folder, 20, 100)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    return folder


def exporter(*words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    argv = [sys.executable, "-m", "dalsegno", "exporter", "--listen", "127.0.0.1:0", *words]
    return subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def test_exporter_serves_metrics_to_those_with_the_token(slurm, tmp_path):
    process = exporter("--interval", "1s", "--token-file", str(tmp_path / "token"))
    try:
        assert process.stderr
        address = re.search(r"http://\S+/metrics", process.stderr.readline())
        assert address
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address[0], timeout=30)
        assert refused.value.code == 401
        refused.value.close()
        token = (tmp_path / "token").read_text().strip()
        request = urllib.request.Request(address[0], headers={"Authorization": f"Bearer {token}"})

        def nodes() -> float:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return read_families(answer.read())["dalsegno_nodes"].value(partition="train", state="mix")

        assert eventually(nodes) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, "this is the usual end of a server"
    finally:
        process.kill()
        process.communicate()


def test_once_prints_the_metrics(slurm):
    done = subprocess.run(
        [sys.executable, "-m", "dalsegno", "exporter", "--once", "--compat", "sckyzo"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert read_families(done.stdout)["slurm_nodes_total"].value() == 20


def test_once_without_an_answer_is_an_error(slurm):
    for name in ("sinfo", "squeue", "sdiag", "scontrol"):
        (slurm / name).write_text(
            "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
        )
    done = subprocess.run(
        [sys.executable, "-m", "dalsegno", "exporter", "--once"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("error: ")


def test_port_in_use_is_an_error_with_a_hint(slurm, command: Command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = command("exporter", "--open", "--listen", f"127.0.0.1:{port}")
    assert answer.returncode == 1 and f"cannot listen on 127.0.0.1:{port}: the port is in use" in answer.stderr
    assert "--listen" in answer.stderr


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--open", "--token-file", "x"),
        ("--open", "--listen", "nowhere"),
        ("--open", "--interval", "0.1s"),
        ("--compat", "other"),
    ],
)
def test_wrong_usage_exits_with_2(slurm, command: Command, words):
    assert command("exporter", *words).returncode == 2


def test_missing_commands_are_reported(command: Command, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    answer = command("exporter", "--open")
    assert answer.returncode == 1 and "not on the PATH" in answer.stderr
