"""The main loop of a host. It runs the services in the host's plan and reaps all other processes."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Collection
from typing import Any

from dalsegno.log import rotate_folder
from dalsegno.system.guest.kernel import MS_BIND, give_address, link_exists, mount, unmount

log = logging.getLogger("init")

Plan = dict[str, Any]  # a `HostPlan` parsed from JSON; the class is not imported, to keep this program small
Fact = dict[str, Any]

SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGIO}
STOP_GRACE_S = 5.0
BINDS_INTERVAL_S = 2.0  # how often mounts are checked if the kernel does not report changes
SHORT_LIFE_S, PAUSE_S = 5.0, 1.0  # a service that ends within SHORT_LIFE_S of its start is restarted after PAUSE_S
LOG_CHECK_INTERVAL_S = 30.0
MAX_LOG_BYTES, OLD_LOGS = 16 << 20, 2  # limit per log file, and number of old files kept


class GuestHost:
    """A running host. On SIGHUP it reads and applies its plan again; on SIGTERM it stops its services and ends."""

    def __init__(self, plan_path: str, plan: Plan) -> None:
        self.plan_path = plan_path
        self.plan = plan
        self.running: dict[str, tuple[int, str]] = {}  # name -> (pid, revision)
        self.facts: dict[str, Fact] = {}  # name -> its entry in services.json
        self.due: dict[str, float] = {}  # dead service that is restarted (`keep`) -> monotonic time of the restart
        self.look_at_logs = time.monotonic() + LOG_CHECK_INTERVAL_S
        self.watched = list[int]()  # descriptors of folders in which the kernel reports replaced files

    def live(self) -> None:
        notified = self.watch_binds()
        self.reconcile()
        while True:
            number = self.wait(LOG_CHECK_INTERVAL_S if notified else BINDS_INTERVAL_S)
            self.reap()
            if number in (signal.SIGIO, signal.SIGHUP, 0):
                self.bind_again()
            if number == signal.SIGHUP:
                self.reload()
            if number == signal.SIGHUP or time.monotonic() >= self.look_at_logs:
                self.rotate_logs()
            if number in (signal.SIGTERM, signal.SIGINT):
                self.stop(list(self.running))
                return
            self.revive()

    def wait(self, most_s: float) -> int:
        """Return the next signal. Return 0 if a restart or a log rotation is due, or after `most_s`."""
        until = min([*self.due.values(), self.look_at_logs, time.monotonic() + most_s])
        caught = signal.sigtimedwait(SIGNALS, max(until - time.monotonic(), 0.0))
        return caught.si_signo if caught else 0

    def rotate_logs(self) -> None:
        """Rotate logs that are too long: those of the services, and other logs in the same folders."""
        self.look_at_logs = time.monotonic() + LOG_CHECK_INTERVAL_S
        for folder in {
            os.path.dirname(path) for path in (self.plan["log"], *(s["log"] for s in self.plan["services"]))
        }:
            rotate_folder(folder, MAX_LOG_BYTES, OLD_LOGS)

    def watch_binds(self) -> bool:
        """Request a signal when a file that has a mount on it is replaced; return False if that is not possible.

        `useradd` on the machine writes a new /etc/passwd and renames it over the old one. The kernel then removes all
        mounts on the old file, also those in this host. Without a new mount, the cluster's users would disappear.
        """
        # dnotify is used, because inotify allows few instances per user and there may be hundreds of hosts.
        import fcntl

        changes = fcntl.DN_RENAME | fcntl.DN_CREATE | fcntl.DN_DELETE | fcntl.DN_MULTISHOT
        files = [target for _, target in self.plan["binds"] if not os.path.isdir(target)]
        try:
            for folder in {os.path.dirname(target) for target in files}:
                self.watched.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                fcntl.fcntl(self.watched[-1], fcntl.F_NOTIFY, changes)
        except OSError:
            return False
        return True

    def bind_again(self) -> None:
        """Mount files again that are no longer mounted or that were replaced."""
        for source, target in self.plan["binds"] if self.plan["isolate"] else ():
            try:
                if not os.path.samefile(source, target):
                    if not os.stat(target).st_nlink:  # a deleted file is mounted there, and cannot be mounted over
                        unmount(target)
                    mount(source, target, "", MS_BIND)
            except OSError as error:  # the file is missing for a moment; another signal follows when it exists again
                log.warning("%s not mounted again: %s", target, error)

    def change_binds(self, before: list[list[str]]) -> None:
        """Unmount paths that are no longer in the plan, and mount new ones. Open files stay usable."""
        for pair in before if self.plan["isolate"] else ():
            if pair not in self.plan["binds"]:
                try:
                    unmount(pair[1])
                except OSError as error:
                    log.warning("%s not unmounted: %s", pair[1], error)
        self.bind_again()

    def revive(self) -> None:
        """Restart dead services whose restart is due, if the plan still contains them."""
        ready = {name for name, at in self.due.items() if at <= time.monotonic()}
        self.due = {name: at for name, at in self.due.items() if name not in ready}
        for service in self.plan["services"]:
            if service["name"] in ready and service["name"] not in self.running and not service["hold"]:
                self.start(service)
        if ready:
            self.write()

    def reload(self) -> None:
        before = self.plan["binds"]
        try:
            with open(self.plan_path) as file:
                self.plan = json.load(file)
        except (OSError, ValueError) as error:
            log.warning("plan not read again: %s", error)
            return
        self.change_binds(before)
        log.debug("plan read again: %d services", len(self.plan["services"]))
        self.reconnect()
        self.reconcile()

    def reconnect(self) -> None:
        """Set the address of a new network link after the bridge was replaced."""
        if not self.plan["address"] or not link_exists(self.plan["interface"]):
            return
        try:
            give_address(self.plan["interface"], self.plan["address"])
        except OSError as error:  # the link was removed again, which must not end the host
            log.warning("address not set: %s", error)

    def reconcile(self) -> None:
        """Stop services that are not in the plan or have changed, and start missing services, except those on hold."""
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
            log.error("%s not started: %s", name, error)
            self.facts[name] = {"exit_code": 127, "error": str(error), "revision": revision, "ended": time.time()}
            self.note_death(name)
            return
        log.info("%s started, PID %d", name, pid)
        self.running[name] = (pid, revision)
        self.facts[name] = {"pid": pid, "revision": revision, "started": time.time()}

    def stop(self, names: Collection[str]) -> None:
        """Stop services by SIGTERM, then SIGKILL. Processes that they launched, such as job steps, keep running."""
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
                log.info("%s ended with code %d", name, code)
                self.facts[name] = {**self.facts[name], "pid": 0, "exit_code": code, "ended": time.time()}
                self.note_death(name)
                ended = True
        if ended:
            self.write()

    def note_death(self, name: str) -> None:
        """Schedule the restart of a dead service with `keep`: at once, or after a pause if it ended early."""
        if any(service["name"] == name and service.get("keep") for service in self.plan["services"]):
            lived_s = time.time() - self.facts[name].get("started", time.time())
            self.due[name] = time.monotonic() + (0.0 if lived_s > SHORT_LIFE_S else PAUSE_S)

    def write(self) -> None:
        try:
            write_json(os.path.join(self.plan["dir"], "services.json"), self.facts)
        except OSError as error:  # a full disk must not end the host
            log.warning("services.json not written: %s", error)


def _is_stale(wanted: Fact | None, revision: str) -> bool:
    return wanted is None or not (wanted["hold"] or wanted["revision"] == revision)


def _next_ended() -> tuple[int, int] | None:
    """Return the PID and exit code of a child that has ended; None if there is none."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def spawn(service: Fact) -> int:
    output = os.open(service["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    streams = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
    argv = service["argv"]
    try:
        return os.posix_spawn(
            argv[0], argv, service["env"], file_actions=streams, setsid=True, setsigmask=[], setsigdef=[signal.SIGPIPE]
        )
    finally:
        os.close(output)
        os.close(null)


def write_json(path: str, value: object) -> None:
    write_text(path, json.dumps(value))


def write_text(path: str, text: str) -> None:
    temp = f"{path}.{os.getpid()}.tmp"
    with open(temp, "w") as file:
        file.write(text)
    os.replace(temp, path)
