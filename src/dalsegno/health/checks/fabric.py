"""Is the network that training talks over up, steady and clean?"""

from __future__ import annotations

from dalsegno.health.check import Check
from dalsegno.health.readers.ports import Ports, ask_ports, has_ports
from dalsegno.health.result import Remedy, Result, failed, passed, warned


def judge_ports(found: Ports, *, count: float = 0) -> Result:
    """`count` is how many should be up; without it, as many as there were."""
    up = [port for port in found.ports if port.state == "ACTIVE"]
    down = [port for port in found.ports if port.state != "ACTIVE"]
    wanted, names = int(max(count, found.expected)), ", ".join(f"{port.name} is {port.state}" for port in down[:4])
    if not wanted and not up:
        return warned(f"no port is up, and none was before: {names}")
    if len(up) < wanted:
        names = names or "the others are gone"
        return failed(f"{len(up)} of {wanted} ports are up: {names}", Remedy.REBOOT)
    return passed(f"{len(up)} ports are up")


def judge_flaps(found: Ports, *, most: float = 1, window_s: float = 6 * 3600, after_boot_s: float = 1800) -> Result:
    """Links are trained anew for a while after boot: that is excused."""
    since = max(found.now - window_s, found.booted_at + after_boot_s if found.booted_at else 0)
    counts = {port.name: sum(at >= since for at in port.flaps) for port in found.ports}
    worst = max(counts, key=lambda name: counts[name], default="")
    if worst and counts[worst] > most:
        return failed(f"{worst} went down {counts[worst]} times within {window_s / 3600:g} h", Remedy.DRAIN)
    return passed("no port flaps")


def judge_port_errors(found: Ports, *, most: float = 100) -> Result:
    bad = [(port.name, name, count) for port in found.ports for name, count in port.errors.items() if count > most]
    if bad:
        name, counter, count = max(bad, key=lambda each: each[2])
        return warned(f"{name} has counted {count} x {counter}", counter)
    return passed("no port has counted many errors")


FABRIC_CHECKS = (
    Check(
        "fabric-ports",
        "EFA and InfiniBand ports are up",
        ask_ports,
        judge_ports,
        every_s=1,
        applies=has_ports,
        settle_s=3,
    ),
    Check("fabric-flaps", "ports that go up and down", ask_ports, judge_flaps, every_s=5, applies=has_ports),
    Check(
        "fabric-errors", "errors that ports have counted", ask_ports, judge_port_errors, every_s=30, applies=has_ports
    ),
)
