"""Compute the telemetry of simulated hardware from the faults that were injected into it. Pure.

The computation always starts from the telemetry of a healthy node and adds all lasting faults. So faults can be undone
in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dalsegno.health.facts import HW_POWER_BRAKE, HW_THERMAL, GpuFacts
from dalsegno.health.telemetry import Telemetry, with_gpu, with_line, xid_line
from dalsegno.inject.records import FaultRecord
from dalsegno.wire.cloud_notice import SPOT_S

XID_TEXTS = {
    31: "Ch 00000010, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted",
    48: "DBE (double bit error) ECC Error",
    63: "Row Remapper: New row marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Error when marking row for remapping",
    74: "NVLink: fatal error detected on link 0(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "GPU has fallen off the bus.",
    94: "Contained: SM (0x1). RST: No, D-RST: No",
    95: "Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No",
    119: "Timeout after 6s of waiting for RPC response from GPU0 GSP!",
}
OOM = "Out of memory: Killed process {pid} ({name}) total-vm:{kib}kB, anon-rss:{kib}kB"
HOT_C, COOLER_C = 96.0, 87.0


def with_faults(telemetry: Telemetry, faults: Iterable[FaultRecord]) -> Telemetry:
    """Return the telemetry with these faults added. Faults that telemetry does not show are ignored."""
    for fault in faults:
        change = CHANGES.get(fault.fault)
        telemetry = change(telemetry, fault) if change else telemetry
    return telemetry


def _xid(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    code, gpu = int(fault.options["code"]), _gpu(fault)
    line = xid_line(code, XID_TEXTS.get(code, "unknown"), gpu=gpu)
    logged = with_line(telemetry, fault.at, line)
    return with_gpu(logged, gpu, lost=True) if code == 79 else logged


def _ecc(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    return with_gpu(telemetry, _gpu(fault), ecc_uncorrected=int(fault.options.get("count", 1)))


def _lost(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    """Remove the GPU from the telemetry, as if it were no longer on the PCI bus."""
    return replace(telemetry, gpus=tuple(gpu for gpu in telemetry.gpus if gpu.index != _gpu(fault)))


def _hot(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    return with_gpu(telemetry, _gpu(fault), temperature_c=HOT_C, slowdown_c=COOLER_C, throttle=(HW_THERMAL,))


def _nvlink(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    down = int(fault.options.get("count", 1))
    gpu = _find(telemetry, _gpu(fault))
    left = max((gpu.nvlinks or 0) - down, 0) if gpu else 0
    return with_gpu(telemetry, _gpu(fault), nvlinks=left, nvlink_errors=down)


def _slow(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    gpu = _find(telemetry, _gpu(fault))
    third = round((gpu.max_clock_mhz or 0) / 3) if gpu else 0
    return with_gpu(telemetry, _gpu(fault), clock_mhz=third, throttle=(HW_POWER_BRAKE,), utilization_percent=100)


def _skew(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    return replace(telemetry, clock_skew_s=float(fault.options.get("by_s", 300.0)))


def _oom(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    return with_line(telemetry, fault.at, OOM.format(**{"pid": 4242, "name": "python", "kib": 33554432, **fault.undo}))


def _flap(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    """Add the flaps to the first simulated port, because the real link of a virtual host has no flap counter."""
    times = tuple(fault.at + index for index in range(int(fault.options.get("count", 3))))
    ports = tuple(replace(port, flaps=(*port.flaps, *times)) for port in telemetry.ports[:1])
    return replace(telemetry, ports=(*ports, *telemetry.ports[1:]))


def _down(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    ports = tuple(replace(port, state="DOWN") for port in telemetry.ports[:1])
    return replace(telemetry, ports=(*ports, *telemetry.ports[1:]))


def _notice(telemetry: Telemetry, fault: FaultRecord) -> Telemetry:
    return replace(telemetry, notice_at=fault.at + float(fault.options.get("by_s", SPOT_S)))


CHANGES: dict[str, Callable[[Telemetry, FaultRecord], Telemetry]] = {
    "xid": _xid,
    "ecc": _ecc,
    "gpu-lost": _lost,
    "gpu-hot": _hot,
    "nvlink": _nvlink,
    "slow-gpu": _slow,
    "clock-skew": _skew,
    "oom": _oom,
    "link-flap": _flap,
    "link-down": _down,
    "cloud-notice": _notice,
}


def _gpu(fault: FaultRecord) -> int:
    return int(fault.options.get("gpu", 0))


def _find(telemetry: Telemetry, index: int) -> GpuFacts | None:
    return next((gpu for gpu in telemetry.gpus if gpu.index == index), None)
