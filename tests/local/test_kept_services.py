"""A host restarts a service with `keep` when it dies, but not in a busy loop if it dies at once."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.system.children import MARK, end, marked
from dalsegno.system.hosts import HostPlan, Service, boot, reload, service_facts, write_plan
from dalsegno.system.processes import LocalRunner
from tests.waiting import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end(marked(str(tmp_path)))


def host(folder: Path, script: str) -> HostPlan:
    env = {MARK: str(folder), "PATH": os.defpath}
    kept = Service("kept", ("/bin/sh", "-c", script), env, str(folder / "log"), "1", keep=True)
    return HostPlan("box", str(folder), str(folder / "init.log"), isolate=False, services=(kept,))


def start(plan: HostPlan) -> None:
    write_plan(plan)
    boot(LocalRunner(), [plan], plan.dir)


def lines(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines() if (folder / "log").exists() else []


def test_killed_service_is_restarted(folder: Path):
    start(host(folder, "echo $$; exec sleep 60"))
    eventually(lambda: lines(folder))
    os.kill(int(lines(folder)[0]), signal.SIGKILL)
    eventually(lambda: len(lines(folder)) == 2 and (fact := service_facts(folder).get("kept")) and fact.running)


@pytest.mark.waits
def test_service_that_dies_early_is_restarted_after_a_pause(folder: Path):
    start(host(folder, "date +%s%N; exit 1"))
    eventually(lambda: len(lines(folder)) >= 3)
    first, second, third = (int(line) / 1e9 for line in lines(folder)[:3])
    assert second - first > 0.9 and third - second > 0.9


def test_service_removed_from_the_plan_is_not_restarted(folder: Path):
    plan = host(folder, "echo $$; exec sleep 60")
    start(plan)
    eventually(lambda: lines(folder))
    write_plan(replace(plan, services=()))
    reload(folder)
    eventually(lambda: service_facts(folder) == {})
    assert len(lines(folder)) == 1
