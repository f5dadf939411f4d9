"""Tests of a host's first process, without namespaces, so that any user can run them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

from dalsegno.log import rotate
from dalsegno.system.children import MARK, Process, descendants, end, marked, send, start_ticks
from dalsegno.system.guest.kernel import LINK_WAIT_S
from dalsegno.system.hanging_calls import MAX_SLOWNESS
from dalsegno.system.hosts import (
    HostPlan,
    Service,
    ServiceFact,
    boot,
    boot_limit_s,
    host_process,
    reload,
    service_facts,
    write_plan,
)
from dalsegno.system.processes import LocalRunner

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part


def service(name: str, folder: Path, *argv: str, revision: str = "1", hold: bool = False) -> Service:
    return Service(name, argv, {MARK: str(folder), "PATH": os.defpath}, str(folder / f"{name}.log"), revision, hold)


def plan(folder: Path, *services: Service) -> HostPlan:
    return HostPlan("box", str(folder), str(folder / "init.log"), isolate=False, services=services)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end(marked(str(tmp_path)))


def start(folder: Path, *services: Service) -> Process:
    write_plan(plan(folder, *services))
    return boot(LocalRunner(), [plan(folder, *services)], str(folder))["box"]


def change(folder: Path, *services: Service) -> None:
    write_plan(plan(folder, *services))
    reload(folder)


def fact(folder: Path, name: str) -> ServiceFact:
    """Return a service's entry as the host last wrote it; not running if there is none yet."""
    return service_facts(folder).get(name) or ServiceFact(name, running=False)


def running(folder: Path, name: str) -> bool:
    return fact(folder, name).running


def test_services_run_and_their_output_is_kept(folder: Path):
    start(folder, service("talk", folder, "/bin/sh", "-c", "echo hello; exec sleep 60"))
    eventually(lambda: "hello" in (folder / "talk.log").read_text())
    eventually(lambda: running(folder, "talk"))  # its output may appear before its entry in services.json


def test_host_logs_at_the_level_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DALSEGNO_LOG_LEVEL", "debug")
    start(folder)
    change(folder, service("new", folder, "/bin/sleep", "60"))
    eventually(lambda: "DEBUG init: plan read again: 1 services" in (folder / "init.log").read_text())


def test_a_service_that_ends_is_reported_with_its_code_and_not_restarted(folder: Path):
    start(folder, service("fails", folder, "/bin/sh", "-c", "exit 3"))
    eventually(lambda: fact(folder, "fails").exit_code == 3)
    assert not running(folder, "fails")


def test_missing_program_is_reported(folder: Path):
    start(folder, service("ghost", folder, "/no/such/program"))
    eventually(lambda: "ghost" in service_facts(folder))
    assert "No such file" in fact(folder, "ghost").error


def test_new_revision_restarts_only_its_service(folder: Path):
    start(folder, service("a", folder, "/bin/sleep", "60"), service("b", folder, "/bin/sleep", "60"))
    eventually(lambda: running(folder, "b"))
    before = set(descendants(host_process(folder).pid))  # type: ignore[union-attr]
    change(folder, service("a", folder, "/bin/sleep", "61", revision="2"), service("b", folder, "/bin/sleep", "60"))
    eventually(lambda: fact(folder, "a").revision == "2" and running(folder, "a"))
    after = set(descendants(host_process(folder).pid))  # type: ignore[union-attr]
    assert len(before & after) == 1 and len(after) == 2


def test_service_on_hold_is_not_changed(folder: Path):
    start(folder, service("on", folder, "/bin/sleep", "60"), service("off", folder, "/bin/sleep", "60", hold=True))
    eventually(lambda: running(folder, "on"))
    change(
        folder,
        service("on", folder, "/bin/sleep", "60", revision="2", hold=True),
        service("off", folder, "/bin/sleep", "60", hold=True),
        service("new", folder, "/bin/sleep", "60"),
    )
    eventually(lambda: running(folder, "new"))
    assert fact(folder, "on").revision == "1" and running(folder, "on") and not running(folder, "off")


def test_service_removed_from_the_plan_is_stopped(folder: Path):
    start(folder, service("a", folder, "/bin/sleep", "60"))
    eventually(lambda: running(folder, "a"))
    change(folder)
    eventually(lambda: "a" not in service_facts(folder))
    assert descendants(host_process(folder).pid) == []  # type: ignore[union-attr]


def test_orphans_are_adopted_and_reaped(folder: Path):
    host = start(folder, service("leaver", folder, "/bin/sh", "-c", "(sleep 0.2; echo gone) & exit 0"))
    eventually(lambda: "gone" in (folder / "leaver.log").read_text())
    eventually(lambda: descendants(host.pid) == [])


def test_terminated_host_stops_its_services(folder: Path):
    host = start(folder, service("a", folder, "/bin/sleep", "60"))
    eventually(lambda: running(folder, "a"))
    send(host, signal.SIGTERM)
    eventually(lambda: not host.alive())
    assert marked(str(folder)) == [] and not running(folder, "a")


def test_damaged_plan_is_ignored(folder: Path):
    start(folder, service("a", folder, "/bin/sleep", "60"))
    eventually(lambda: running(folder, "a"))
    (folder / "plan.json").write_text("{")
    reload(folder)
    eventually(lambda: "plan not read again" in (folder / "init.log").read_text())
    assert running(folder, "a")


def test_process_is_identified_by_pid_and_start_time():
    here = Process(os.getpid(), start_ticks(os.getpid()) or 0)
    assert here.alive() and not Process(here.pid, here.start + 1).alive()


def test_long_log_is_rotated_while_the_service_writes(folder: Path):
    """The service never reopens its log: it appends to an open file."""
    talk = "while read line < go; do head -c $line /dev/zero | tr '\\0' x; echo end-$line; done"
    os.mkfifo(folder / "go")
    start(folder, service("talk", folder, "/bin/sh", "-c", f"cd {folder}; {talk}"))
    for size in (17_000_000, 18_000_000, 19_000_000, 20):
        (folder / "go").write_text(f"{size}\n")
        eventually(lambda size=size: (folder / "talk.log").read_bytes()[-30:].endswith(b"end-%d\n" % size))
        reload(folder)
        if size > 20:
            eventually(lambda: (folder / "talk.log").stat().st_size == 0)
    assert (folder / "talk.log").read_text().endswith("x" * 20 + "end-20\n")
    old = {path.name: path.stat().st_size for path in folder.glob("talk.log*")}
    assert sorted(old) == ["talk.log", "talk.log.1", "talk.log.2"] and max(old.values()) < 17_000_000
    assert (folder / "talk.log.1").read_bytes()[-30:].endswith(b"end-19000000\n"), "the newest part was kept"


def test_linked_log_is_not_rotated(tmp_path: Path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * 100)
    (tmp_path / "a.log").symlink_to(foreign)
    os.link(foreign, tmp_path / "b.log")
    for name in ("a.log", "b.log"):
        rotate(str(tmp_path / name), most_bytes=10)
    assert foreign.stat().st_size == 100 and not list(tmp_path.glob("*.1"))


def test_link_at_the_rotated_log_is_replaced(tmp_path: Path):
    foreign = tmp_path / "foreign"
    foreign.write_text("precious")
    (tmp_path / "a.log").write_bytes(b"x" * 100)
    (tmp_path / "a.log.1").symlink_to(foreign)
    rotate(str(tmp_path / "a.log"), most_bytes=10, old=1)
    assert foreign.read_text() == "precious" and not (tmp_path / "a.log.1").is_symlink()
    assert (tmp_path / "a.log").stat().st_size == 0


def test_link_wait_exceeds_boot_limit_on_the_slowest_machine():
    assert boot_limit_s(128, MAX_SLOWNESS) < LINK_WAIT_S
