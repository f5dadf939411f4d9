"""Tests of `break-worker` on processes that look like workers of a job."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dalsegno.inject.worker_program import CLEAR, HANG, LOOK, PROGRAM, SLOW, WantedWorker, main
from dalsegno.programs import launcher
from tests.waiting import eventually

JOB = f"test-{os.getpid()}"


@contextmanager
def process(*argv: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process of the job."""
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": JOB, **env}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def is_stopped(child: subprocess.Popen[str]) -> bool:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def ask(capsys: pytest.CaptureFixture[str], wanted: WantedWorker) -> Any:
    main([json.dumps(asdict(wanted))])
    return json.loads(capsys.readouterr().out)


def test_only_the_named_fault_is_cleared(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        hung, slow = (
            stack.enter_context(process("sleep", "600", RANK=str(rank), DALSEGNO_RUN="run-1")) for rank in (0, 1)
        )
        # The worker must be a `sleep` before it is stopped, not a copy of this process
        eventually(lambda: all("sleep" in Path(f"/proc/{one.pid}/comm").read_text() for one in (hung, slow)))
        assert ask(capsys, WantedWorker(JOB, HANG, rank=0))["pid"] == hung.pid
        holder = stack.enter_context(process(*launcher(), PROGRAM, json.dumps(asdict(WantedWorker(JOB, SLOW, gpu=1)))))
        assert holder.stdout is not None and json.loads(holder.stdout.readline())["pid"] == slow.pid
        eventually(lambda: is_stopped(hung))
        assert sorted(ask(capsys, WantedWorker(JOB, LOOK))["found"]) == [SLOW, HANG]

        assert ask(capsys, WantedWorker(JOB, CLEAR, fault=HANG)) == {"found": [HANG]}
        eventually(lambda: not is_stopped(hung))
        assert ask(capsys, WantedWorker(JOB, LOOK)) == {"found": [SLOW]} and holder.poll() is None

        assert ask(capsys, WantedWorker(JOB, CLEAR)) == {"found": [SLOW]}
        assert holder.wait(60) == 0
        eventually(lambda: not is_stopped(slow))
        assert ask(capsys, WantedWorker(JOB, LOOK)) == {"found": []}


def test_hint_tells_how_many_workers_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, WantedWorker(JOB, HANG, gpu=3))["hint"] == "number of your workers there: 0"
