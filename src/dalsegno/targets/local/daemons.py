"""Starting services on hosts and waiting until they serve; a daemon that dies tells why."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.system.apart import slowness
from dalsegno.system.hosts import HostPlan, Service, host_process, reload, service_facts, write_plan
from dalsegno.system.processes import Runner
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.services import NODE_PATH, slurm_env

START_S = 60.0
LOG_LINES = 12


def check_settings(runner: Runner, folder: Folder) -> None:
    """Have Slurm read its files before any daemon depends on them: a key or a number it does not know is told here."""
    env = {"PATH": NODE_PATH, **slurm_env(folder)}
    done = runner.run(["scontrol", "show", "hostnames", "a"], env=env, timeout_s=30 * slowness())
    if done.exit_code != 0:
        said = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-LOG_LINES:])
        raise TargetError(
            f"slurmctld could not start: Slurm cannot read its settings\n{said}",
            where=str(folder.slurm_conf),
            hint="mend it in the cluster file, most likely below `extra:`, and run `dalsegno up` again",
        )


def start_services(plan: HostPlan, names: Collection[str]) -> None:
    """Have a host start, or restart with new settings, just these services; the others stay as they are."""
    services = tuple(replace(service, hold=service.name not in names) for service in plan.services)
    write_plan(replace(plan, services=services))
    reload(Path(plan.dir))


def hold_all(plan: HostPlan) -> HostPlan:
    """The plan of a host that boots with nothing running yet."""
    return replace(plan, services=tuple(replace(service, hold=True) for service in plan.services))


def start_and_wait(
    plan: HostPlan, names: Collection[str], name: str, ready: Callable[[], bool], timeout_s: float | None = None
) -> None:
    """Have a host start these services, and wait until `name` serves.

    Its death from now on, its host's death, or silence is an error with the end of its log.
    """
    asked_at, timeout_s = time.time(), START_S * slowness() if timeout_s is None else timeout_s
    start_services(plan, names)
    service = next(service for service in plan.services if service.name == name)
    until = time.monotonic() + timeout_s
    pause_s = 0.005
    while not (_is_current(plan, service) and _answers(ready)):
        raise_if_dead(plan, service, asked_at)
        if time.monotonic() > until:
            raise TargetError(
                f"{name} on {plan.name} does not answer after {timeout_s:.0f} s; the end of its log:\n"
                f"{log_tail(service.log)}",
                where=service.log,
                hint="a loaded machine may need longer: run `dalsegno up` again",
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.1)


def _answers(ready: Callable[[], bool]) -> bool:
    """A question that fails is no answer yet: why the daemon is not there, its own log tells better."""
    try:
        return ready()
    except DalsegnoError:
        return False


def _is_current(plan: HostPlan, service: Service) -> bool:
    """Running with the settings it should have: while it is being restarted, the old one may still answer."""
    fact = service_facts(Path(plan.dir)).get(service.name)
    return fact is not None and fact.running and fact.revision == service.revision


def raise_if_dead(plan: HostPlan, service: Service, since: float) -> None:
    """An earlier death does not count: it is what we are about to mend."""
    if host_process(Path(plan.dir)) is None:
        raise TargetError(
            f"host {plan.name} is gone\n{log_tail(plan.log)}", where=plan.log, hint="run `dalsegno up` again"
        )
    fact = service_facts(Path(plan.dir)).get(service.name)
    current = fact is not None and fact.revision == service.revision  # its forerunner was stopped on purpose
    if fact is not None and current and fact.exit_code is not None and fact.ended_at >= since:
        why = fact.error or f"ended with code {fact.exit_code}"
        raise TargetError(
            f"{service.name} on {plan.name} {why}; the end of its log:\n{log_tail(service.log)}",
            where=service.log,
            hint="mend what it complains about in the cluster file and run `dalsegno up` again",
        )


def log_tail(path: str, lines: int = LOG_LINES) -> str:
    """The last lines of a log, set in."""
    try:
        text = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return "  (no log)"
    return "\n".join(f"  {line}" for line in text[-lines:]) or "  (its log is empty)"


def socket_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return False
    return True


def port_answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False
