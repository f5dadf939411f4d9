"""The daemons of one machine, run by systemd, or by Dal Segno's own init where there is no systemd.

Like `applier.py`, this module uses only the standard library of Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable

from dalsegno.setup.machine_record import (
    CODE,
    ENV,
    SETUP,
    Call,
    Change,
    Json,
    Record,
    Refused,
    checked,
    emit,
    read,
    run,
    tail,
    write,
)

START_TIMEOUT_S = 90.0
UNITS = "/etc/systemd/system"
LOG_FILE = "DALSEGNO_LOG_FILE"  # the variable that `log.py` reads
INIT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from dalsegno.system.guest.init import main; sys.exit(main(sys.argv[1:]))"
)


class MachineServices:
    """Compares the services of a plan with those that run. If the root folder is not /, there is nothing to compare."""

    def __init__(self, plan: Json, record: Record, root: str) -> None:
        self.plan, self.record = plan, record
        self.wanted: list[Json] = [] if root else list(plan["services"])
        self.kept: Json = record.part("services")  # name -> {unit, own, revision, was_enabled, was_active}
        self.supervisor = Systemd(self) if os.path.isdir("/run/systemd/system") else OwnInit(self)

    def runs(self, name: str) -> bool:
        return name in self.kept and self.supervisor.runs(name)

    def changes(self) -> list[Change]:
        found = [("service", name, "stop") for name in self.stale()]
        return found + [("service", each["name"], what) for each in self.wanted if (what := self.differs(each))]

    def stale(self) -> list[str]:
        names = {each["name"] for each in self.wanted}
        return [name for name in self.kept if name not in names]

    def differs(self, service: Json) -> str:
        if not self.runs(service["name"]):
            return "start"
        return "" if self.kept[service["name"]].get("revision") == service["revision"] else "restart"

    def apply(self, then: Callable[[str], None]) -> None:
        """Stop the services that are no longer planned, then start or restart the planned ones in order.

        Call `then` with the name of each planned service when it is ready.
        """
        for name in self.stale():
            emit(step=f"stopping {name}")
            self.supervisor.stop(name)
            del self.kept[name]
            self.record.save()
        for service in self.wanted:
            if what := self.differs(service):
                emit(step=f"{what}ing {service['name']}")
                self.supervisor.start(service)
                self.wait(service)
                self.kept[service["name"]]["revision"] = service["revision"]
                self.record.save()
            then(service["name"])

    def wait(self, service: Json) -> None:
        """Wait until a service answers. If it dies or does not answer in time, raise an error that quotes its log."""
        until, name = time.monotonic() + START_TIMEOUT_S, service["name"]
        running_for = 0
        while True:
            dead = self.supervisor.death(name)
            running_for = running_for + 1 if self.supervisor.runs(name) else 0
            if running_for and (run(service["ready"], 20.0)[0] == 0 if service["ready"] else running_for > 2):
                return
            if dead or time.monotonic() > until:
                why = dead or f"does not answer after {START_TIMEOUT_S:.0f} s"
                raise Refused(
                    f"{name} {why}; the end of its log:\n{tail(self.supervisor.log(service))}",
                    "fix what the log complains about, then run `dalsegno up` again",
                )
            time.sleep(0.1)

    def stop_all(self) -> None:
        if self.kept:
            emit(step=f"stopping {', '.join(self.kept)}")
        self.supervisor.stop_all()

    def restore(self) -> None:
        """Enable and start the services that were enabled or running before this cluster was set up.

        Call this when their files have been restored.
        """
        for name, entry in self.kept.items():
            if entry.get("was_enabled"):
                run(["systemctl", "enable", "--quiet", entry["unit"]])
            if entry.get("was_active"):
                run(["systemctl", "start", entry["unit"]])
                emit(step=f"started {name} as before")

    def status(self) -> Json:
        return {name: {"running": self.supervisor.runs(name)} for name in self.kept}


def end_marked(entry: str) -> None:
    """Kill all processes with this entry in their environment. Some of them, such as coordinators, outlive our
    services."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(pid) != os.getpid() and entry.encode() in (read(f"/proc/{pid}/environ") or b"").split(b"\0"):
                os.kill(int(pid), signal.SIGKILL)


class Systemd:
    """Runs services as systemd units: the distribution's, or units that this program writes."""

    def __init__(self, services: MachineServices, call: Call = run, units: str = UNITS) -> None:
        self.services, self.call, self.units = services, call, units

    def unit(self, name: str) -> str:
        return str(self.services.kept[name]["unit"])

    def runs(self, name: str) -> bool:
        return self.call(["systemctl", "is-active", "--quiet", self.unit(name)])[0] == 0

    def start(self, service: Json) -> None:
        name, own = service["name"], not service["unit"]
        unit = service["unit"] or f"dalsegno-{name}.service"
        if name in self.services.kept and self.unit(name) != unit:
            self.stop(name)  # an earlier version used another unit, which holds the service's port
            del self.services.kept[name]
        if name not in self.services.kept:
            # For our own unit, both values are False. The unit may already be enabled, if an earlier version of Dal
            # Segno enabled it but recorded another unit.
            enabled = not own and self.call(["systemctl", "is-enabled", "--quiet", unit])[0] == 0
            active = not own and self.call(["systemctl", "is-active", "--quiet", unit])[0] == 0
            self.services.kept[name] = {"unit": unit, "own": own, "was_enabled": enabled, "was_active": active}
            self.services.record.save()
        if own:
            write(f"{self.units}/{unit}", unit_text(service, self.services.plan["cluster"]).encode(), 0o644)
            checked(["systemctl", "daemon-reload"], call=self.call)
        checked(["systemctl", "enable", "--quiet", unit], call=self.call)
        self.call(["systemctl", "reset-failed", unit])
        checked(["systemctl", "restart", unit], "`journalctl -u UNIT` on that machine has more", call=self.call)

    def death(self, name: str) -> str:
        return "failed" if self.call(["systemctl", "is-failed", "--quiet", self.unit(name)])[0] == 0 else ""

    def log(self, service: Json) -> str:
        journal = self.call(["journalctl", "--no-pager", "-n", "12", "-o", "cat", "-u", self.unit(service["name"])])[1]
        return journal + (read(service["log"]) or b"").decode(errors="replace")[-2000:]

    def stop(self, name: str) -> None:
        entry = self.services.kept[name]
        self.call(["systemctl", "disable", "--quiet", "--now", entry["unit"]])
        if scopes := step_scopes(entry["unit"], self.services.record.data.get("host", "")):
            self.call(["systemctl", "stop", *scopes])  # only one of the two scopes exists, so this fails for the other
        if entry["own"]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.units}/{entry['unit']}")
            self.call(["systemctl", "daemon-reload"])

    def stop_all(self) -> None:
        for name in reversed(list(self.services.kept)):
            self.stop(name)


def step_scopes(unit: str, host: str) -> list[str]:
    """Return the possible names of the scope in which slurmd starts job steps; [] if the unit is not that of slurmd.

    A process of slurmd waits in this scope forever (`slurmstepd infinity`), even after slurmd has stopped.
    """
    return [f"{host}_slurmstepd.scope", "slurmstepd.scope"] if unit == "slurmd.service" else []


def unit_text(service: Json, cluster: str) -> str:
    """Return the systemd unit of one of our services. When the unit stops, child processes keep running, such as the
    coordinators of runs.

    systemd never rotates the log, so our daemons do (`log.py`).
    """
    known = {**service["env"], LOG_FILE: service["log"]}
    env = "".join(f"Environment={_quoted(f'{key}={value}')}\n" for key, value in sorted(known.items()))
    return (
        f"# Written by Dal Segno for cluster {cluster}.\n"
        f"[Unit]\nDescription=Dal Segno {service['name']}\n"
        "After=network-online.target munge.service\nWants=network-online.target\n\n"
        f"[Service]\nExecStart={' '.join(_quoted(word) for word in service['argv'])}\n{env}"
        f"Restart={'always' if service['keep'] else 'no'}\nRestartSec=1\nKillMode=process\n"
        "TasksMax=infinity\nLimitMEMLOCK=infinity\nLimitNOFILE=131072\n"
        f"StandardOutput=append:{service['log']}\nStandardError=inherit\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


class OwnInit:
    """Runs services as children of Dal Segno's init, on machines without systemd. They do not start at boot."""

    def __init__(self, services: MachineServices) -> None:
        self.services, self.folder = services, f"{SETUP}/services"
        self.started_at = 0.0

    def facts(self) -> Json:
        facts: Json = json.loads(read(f"{self.folder}/services.json") or b"{}")
        return facts if self.process() else {}

    def process(self) -> int:
        """Return the PID of Dal Segno's init; 0 if it does not run."""
        recorded = json.loads(read(f"{self.folder}/init.json") or b"{}")
        stat = read(f"/proc/{recorded.get('pid', 0)}/stat")
        alive = stat is not None and int(stat.rpartition(b")")[2].split()[19]) == recorded.get("start")
        return int(recorded["pid"]) if alive else 0

    def runs(self, name: str) -> bool:
        fact = self.facts().get(name, {})
        asked = self.services.kept.get(name, {}).get("asked", fact.get("revision"))
        return bool(fact.get("pid")) and fact.get("revision") == asked

    def start(self, service: Json) -> None:
        name = service["name"]
        entry = self.services.kept.setdefault(name, {"unit": "", "own": True})
        entry["asked"] = service["revision"]
        entry["argv"], entry["env"], entry["log"] = list(service["argv"]), service["env"], service["log"]
        entry["keep"] = service["keep"]
        self.services.record.save()
        self.started_at = time.time()
        self.load()

    def load(self) -> None:
        """Write the plan of Dal Segno's init. Then make the init read the plan again, or start the init if it does not
        run."""
        listed = [
            {"name": name, "argv": entry["argv"], "env": entry["env"], "log": entry["log"], "hold": False,
             "revision": entry["asked"], "keep": entry["keep"]}
            for name, entry in self.services.kept.items()
        ]  # fmt: skip
        plan = {
            "name": "setup", "dir": self.folder, "log": f"{self.folder}/init.log", "isolate": False, "interface": "",
            "address": "", "binds": [], "cgroups": {}, "unit": "", "services": listed,
        }  # fmt: skip
        os.makedirs(self.folder, mode=0o755, exist_ok=True)
        for each in listed:
            os.makedirs(os.path.dirname(each["log"]), exist_ok=True)
        write(f"{self.folder}/plan.json", json.dumps(plan).encode())
        if pid := self.process():
            os.kill(pid, signal.SIGHUP)
            return
        python = self.services.plan["python"]
        argv = [python, "-I", "-S", "-c", INIT, f"{CODE}/current", f"{self.folder}/plan.json"]
        code = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=ENV, timeout=60, check=False)
        if code.returncode != 0:
            raise Refused(f"the init of Dal Segno did not start:\n{tail(code.stderr.decode(errors='replace'))}")

    def death(self, name: str) -> str:
        """Return how the service ended after its last start; "" if it has not ended."""
        fact = self.facts().get(name, {})
        # The init may still report the end of an earlier revision.
        current = fact.get("revision") == self.services.kept.get(name, {}).get("asked")
        ended = current and fact.get("exit_code") is not None and float(fact.get("ended", 0.0)) >= self.started_at
        return fact.get("error") or f"ended with code {fact['exit_code']}" if ended and not fact.get("pid") else ""

    def log(self, service: Json) -> str:
        return (read(service["log"]) or b"").decode(errors="replace")

    def stop(self, name: str) -> None:
        """Stop one service by leaving it out of the init's plan."""
        if not self.process():
            return
        entry = self.services.kept.pop(name)
        self.load()
        until = time.monotonic() + 15
        while self.facts().get(name) and time.monotonic() < until:
            time.sleep(0.05)
        self.services.kept[name] = entry

    def stop_all(self) -> None:
        pid = self.process()
        if pid:
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 15
        while self.process() and time.monotonic() < until:
            time.sleep(0.05)
