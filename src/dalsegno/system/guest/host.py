"""A host's life: it keeps the services its plan names, and reaps everything else that ends here."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Collection
from typing import Any

from dalsegno.system.guest.links import give_address, link_exists

Plan = dict[str, Any]  # as `HostPlan` was written, read back without its class: this program stays small
Fact = dict[str, Any]

SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGINT}
STOP_GRACE_S = 5.0
SHORT_LIFE_S, PAUSE_S = 5.0, 1.0  # a kept service that dies young must not keep the machine busy
LOOK_AT_LOGS_S = 30.0
MOST_LOG_BYTES, OLD_LOGS = 16 << 20, 2  # of each log: what a host writes stays bounded, however long it lives


class Host:
    """SIGHUP: read the plan again and follow it. SIGTERM: stop the services and end."""

    def __init__(self, plan_path: str, plan: Plan) -> None:
        self.plan_path = plan_path
        self.plan = plan
        self.running: dict[str, tuple[int, str]] = {}  # name -> (pid, revision)
        self.facts: dict[str, Fact] = {}  # name -> what services.json says of it
        self.due: dict[str, float] = {}  # kept services that have died -> when to start them again (monotonic)
        self.look_at_logs = time.monotonic() + LOOK_AT_LOGS_S

    def live(self) -> None:
        self.reconcile()
        while True:
            number = self.wait()
            self.reap()
            if number == signal.SIGHUP:
                self.reload()
            if number == signal.SIGHUP or time.monotonic() >= self.look_at_logs:
                self.rotate_logs()
            if number in (signal.SIGTERM, signal.SIGINT):
                self.stop(list(self.running))
                return
            self.revive()

    def wait(self) -> int:
        """The next signal, or 0 when a service is to be started again or logs are to be looked at."""
        until = min([*self.due.values(), self.look_at_logs])
        caught = signal.sigtimedwait(SIGNALS, max(until - time.monotonic(), 0.0))
        return caught.si_signo if caught else 0

    def rotate_logs(self) -> None:
        """Set aside logs that have grown too long: those of the services, and what lies beside them."""
        self.look_at_logs = time.monotonic() + LOOK_AT_LOGS_S
        for folder in {
            os.path.dirname(path) for path in (self.plan["log"], *(s["log"] for s in self.plan["services"]))
        }:
            try:
                names = os.listdir(folder)
            except OSError:
                continue  # a node that was removed a moment ago
            for name in names:
                if name.endswith(".log"):
                    rotate(os.path.join(folder, name))

    def revive(self) -> None:
        """Start those kept services again whose time has come and that are still wanted."""
        ready = {name for name, at in self.due.items() if at <= time.monotonic()}
        self.due = {name: at for name, at in self.due.items() if name not in ready}
        for service in self.plan["services"]:
            if service["name"] in ready and service["name"] not in self.running and not service["hold"]:
                self.start(service)
        if ready:
            self.write()

    def reload(self) -> None:
        try:
            with open(self.plan_path) as file:
                self.plan = json.load(file)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"plan not read again: {error}\n")
            return
        self.reconnect()
        self.reconcile()

    def reconnect(self) -> None:
        """After the switch was replaced there is a new cable, and it has no address yet."""
        if not self.plan["address"] or not link_exists(self.plan["interface"]):
            return
        try:
            give_address(self.plan["interface"], self.plan["address"])
        except OSError as error:  # the cable was pulled again meanwhile: that must not end the host
            sys.stderr.write(f"address not set: {error}\n")

    def reconcile(self) -> None:
        """Stop what is not wanted or wanted otherwise, start what is missing; leave alone what is on hold."""
        wanted = {service["name"]: service for service in self.plan["services"]}
        self.stop([name for name, (_, revision) in self.running.items() if _is_stale(wanted.get(name), revision)])
        self.facts = {name: fact for name, fact in self.facts.items() if name in wanted}
        for name, service in wanted.items():
            if name not in self.running and not service["hold"]:
                self.start(service)
        self.write()

    def start(self, service: Fact) -> None:
        name, revision = service["name"], service["revision"]
        try:
            pid = spawn(service)
        except OSError as error:
            self.facts[name] = {"exit_code": 127, "error": str(error), "revision": revision, "ended": time.time()}
            self.note_death(name)
            return
        self.running[name] = (pid, revision)
        self.facts[name] = {"pid": pid, "revision": revision, "started": time.time()}

    def stop(self, names: Collection[str]) -> None:
        """TERM, a grace, KILL. Only the service itself: what it launched (a job's steps) lives on."""
        self._signal(names, signal.SIGTERM)
        until = time.monotonic() + STOP_GRACE_S
        while any(name in self.running for name in names):
            left = until - time.monotonic()
            if left <= 0:
                self._signal(names, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, max(left, 1.0))
            self.reap()

    def _signal(self, names: Collection[str], number: signal.Signals) -> None:
        for name in names:
            if name in self.running:
                os.kill(self.running[name][0], number)

    def reap(self) -> None:
        ended = False
        while (found := _next_ended()) is not None:
            pid, code = found
            for name in [name for name, (service, _) in self.running.items() if service == pid]:
                del self.running[name]
                self.facts[name] = {**self.facts[name], "pid": 0, "exit_code": code, "ended": time.time()}
                self.note_death(name)
                ended = True
        if ended:
            self.write()

    def note_death(self, name: str) -> None:
        """A kept service comes back: at once, or after a pause if it had hardly lived."""
        if any(service["name"] == name and service.get("keep") for service in self.plan["services"]):
            lived_s = time.time() - self.facts[name].get("started", time.time())
            self.due[name] = time.monotonic() + (0.0 if lived_s > SHORT_LIFE_S else PAUSE_S)

    def write(self) -> None:
        try:
            write_json(os.path.join(self.plan["dir"], "services.json"), self.facts)
        except OSError as error:  # a full disk must not end the host
            sys.stderr.write(f"services.json not written: {error}\n")


def _is_stale(wanted: Fact | None, revision: str) -> bool:
    return wanted is None or not (wanted["hold"] or wanted["revision"] == revision)


def _next_ended() -> tuple[int, int] | None:
    """A child that has ended, with its exit code, or None."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def spawn(service: Fact) -> int:
    log = os.open(service["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    streams = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
    argv = service["argv"]
    try:
        return os.posix_spawn(
            argv[0], argv, service["env"], file_actions=streams, setsid=True, setsigmask=[], setsigdef=[signal.SIGPIPE]
        )
    finally:
        os.close(log)
        os.close(null)


def rotate(path: str, most_bytes: int = MOST_LOG_BYTES, old: int = OLD_LOGS) -> None:
    """Copy a log that is too long to PATH.1 and empty it: daemons that append to it need not open it again.

    What is written between the last look and the cut is lost; that is a moment.
    """
    try:
        source = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size <= most_bytes:
            return
        for number in range(old, 1, -1):
            if os.path.exists(f"{path}.{number - 1}"):
                os.replace(f"{path}.{number - 1}", f"{path}.{number}")
        temp, at = f"{path}.{os.getpid()}.tmp", max(found.st_size - most_bytes, 0)
        target = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            while data := os.pread(source, 1 << 20, at):
                os.write(target, data)
                at += len(data)
        finally:
            os.close(target)
            os.replace(temp, f"{path}.1")
        os.ftruncate(source, 0)
    except OSError as error:  # a full disk: then what is old matters less than room for what is new
        sys.stderr.write(f"{path} not rotated: {error}\n")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(source, 0)
    finally:
        os.close(source)


def write_json(path: str, value: object) -> None:
    write_text(path, json.dumps(value))


def write_text(path: str, text: str) -> None:
    temp = f"{path}.{os.getpid()}.tmp"
    with open(temp, "w") as file:
        file.write(text)
    os.replace(temp, path)
