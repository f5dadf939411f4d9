"""Hosts on this machine: boot them (see `guest/`) and read their status files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.log import LEVEL
from dalsegno.system.cgroups import scope_command, user_scope_command
from dalsegno.system.children import MARK, Process, send
from dalsegno.system.files import damaged, read_json, user_of, write_if_changed
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.processes import Runner

INIT = "from dalsegno.system.guest.init import main"
# Without the user's environment and site-packages, the interpreter starts in 20 ms, and the user cannot affect it.
_START = f"import sys; sys.path.append(sys.argv.pop(1)); {INIT}; sys.exit(main(sys.argv[1:]))"
PACKAGES = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Service:
    """A daemon of a host.

    A changed `revision` causes a restart. With `hold`, the host neither starts nor stops the service. With `keep`, the
    host restarts the service if it dies.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: str
    revision: str
    hold: bool = False
    keep: bool = False


def runs_inside_host() -> bool:
    """Return whether this process runs inside a virtual host, where PIDs differ from those of the machine."""
    try:
        return Path("/proc/1/comm").read_text(errors="replace").startswith("ds:")
    except OSError:
        return False


def revision(*parts: object) -> str:
    """Return a short hash of everything that a service depends on."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class HostPlan:
    """The configuration of a host."""

    name: str
    dir: str
    log: str
    isolate: bool
    interface: str = "eth0"
    address: str = ""  # such as "10.0.0.5/20"; "" if the host has no address of its own
    binds: tuple[tuple[str, str], ...] = ()
    # Mounted root of a hierarchy -> the host's folder that replaces it
    cgroups: Mapping[str, str] = field(default_factory=dict)
    unified: bool = False  # whether the host's folder is in cgroup v2, with its own namespace and controllers
    unit: str = ""  # the systemd scope of the whole cluster
    unit_folders: tuple[str, ...] = ()  # folders of `unit` in systemd's hierarchies
    # Folder -> size in MiB of the disk mounted there, which is empty after each boot
    disks: Mapping[str, int] = field(default_factory=dict)
    services: tuple[Service, ...] = ()

    @property
    def path(self) -> Path:
        return Path(self.dir) / "plan.json"


@dataclass(frozen=True)
class ServiceFact:
    """The last report of a host about one of its services."""

    name: str
    running: bool
    revision: str = ""
    exit_code: int | None = None
    error: str = ""
    ended_at: float = 0.0


def write_plan(plan: HostPlan) -> bool:
    """Write a host's plan to its folder; return whether it changed."""
    return write_if_changed(plan.path, json.dumps(asdict(plan), indent=1))


def read_plan(folder: Path) -> HostPlan | None:
    """Return the plan in a host's folder; None if there is none."""
    value = read_json(folder / "plan.json")
    if value is None:
        return None
    try:
        plan: dict[str, Any] = dict(value)  # type: ignore[arg-type]  # checked below
        services = tuple(Service(**{**each, "argv": tuple(each["argv"])}) for each in plan["services"])
        binds, folders = tuple((a, b) for a, b in plan["binds"]), tuple(plan.get("unit_folders", ()))
        return HostPlan(**{**plan, "services": services, "binds": binds, "unit_folders": folders})
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(folder / "plan.json", f"not the plan of a host ({error})") from error


def boot(runner: Runner, plans: Sequence[HostPlan], mark: str) -> dict[str, Process]:
    """Start hosts from their plan files. When this returns, each host is alive, and waits for its link if it has an
    address.
    """
    if not plans:
        return {}
    env = {"PATH": os.environ.get("PATH", os.defpath), MARK: mark}
    if LEVEL in os.environ:
        env[LEVEL] = os.environ[LEVEL]
    argv = [sys.executable, "-I", "-S", "-c", _START, PACKAGES, *(str(plan.path) for plan in plans)]
    first = plans[0]
    if first.unit and not all(Path(folder).is_dir() for folder in first.unit_folders):
        argv = [*scope_command(first.unit, f"Dal Segno cluster {Path(mark).name}"), *argv]
    elif os.geteuid() != 0 and (scope := user_scope_command(user_of(os.geteuid()))):
        argv = [*scope, *argv]
        # systemd-run finds the socket of the user's systemd instance in this folder.
        env["XDG_RUNTIME_DIR"] = f"/run/user/{os.geteuid()}"
    done = runner.run(argv, env=env, timeout_s=boot_limit_s(len(plans), slowness()))
    booted = {}
    for plan, line in zip(plans, done.stdout.splitlines(), strict=False):
        answer = line.rpartition("\t")[2]
        if not answer.isdigit():
            raise TargetError(
                f"host {plan.name} did not boot: {answer.removeprefix('error ') or 'no answer'}",
                where=plan.log,
                hint="set `local: {hosts: loopback}` if namespaces are not permitted here",
            )
        booted[plan.name] = host_process(Path(plan.dir)) or Process(int(answer), -1)
    done.checked()
    return booted


def boot_limit_s(hosts: int, times_slower: float) -> float:
    """Return the time limit for hosts that boot together.

    The first host may have to wait for its link until the last has booted.
    """
    return (60 + hosts) * times_slower


def host_process(folder: Path) -> Process | None:
    """Return the first process of the host in this folder; None if it is not alive."""
    fact = read_json(folder / "init.json")
    if fact is None:
        return None
    if not isinstance(fact, dict) or not isinstance(fact.get("pid"), int) or not isinstance(fact.get("start"), int):
        raise damaged(folder / "init.json", "it has no process")
    process = Process(int(str(fact["pid"])), int(str(fact["start"])))
    return process if process.alive() else None


def has_its_files(folder: Path) -> bool:
    """Return whether all planned files are mounted in a live host.

    Only root can check this; for other users, return True.
    """
    process, plan = host_process(folder), read_plan(folder)
    if process is None or plan is None or not plan.isolate:
        return True
    try:
        pairs = [(source, f"/proc/{process.pid}/root{target}") for source, target in plan.binds]
        return all(os.path.samefile(source, target) for source, target in pairs)
    except FileNotFoundError:
        return not process.alive()  # false if a mount point was removed, true if the host has just ended
    except OSError:
        return True


def reload(folder: Path) -> None:
    """Make a live host read its plan again."""
    process = host_process(folder)
    if process is not None:
        send(process, signal.SIGHUP)


def service_facts(folder: Path) -> dict[str, ServiceFact]:
    """Return the host's last reports about its services, by name. If the host is dead, no service counts as running."""
    facts = read_json(folder / "services.json")
    alive = host_process(folder) is not None
    if not isinstance(facts, dict):
        return {}
    return {name: _service_fact(name, fact, alive) for name, fact in facts.items() if isinstance(fact, dict)}


def _service_fact(name: str, fact: Mapping[str, object], alive: bool) -> ServiceFact:
    code = fact.get("exit_code")
    return ServiceFact(
        name,
        running=alive and bool(fact.get("pid")),
        revision=str(fact.get("revision", "")),
        exit_code=code if isinstance(code, int) else None,
        error=str(fact.get("error", "")),
        ended_at=float(str(fact.get("ended", 0.0))),
    )
