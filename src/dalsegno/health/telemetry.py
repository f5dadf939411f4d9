"""The telemetry file of a simulated node: the hardware state that a virtual host cannot have.

Full disks, hanging mounts, dead daemons and stuck processes are not in the file: they are real on virtual hosts too,
and the usual checks find them. The kernel log is in the file because all virtual hosts share one kernel, whose
messages belong to no single host.

Fault injection replaces the file atomically: a reader finds the old file or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from dalsegno.health.facts import GpuFacts, GpuProcess, LogLine, Port, nvlinks_of
from dalsegno.system.files import write_atomic

# Conversion of facts to JSON and back. Missing values and values of a wrong type are read as not available; unknown
# keys are ignored.


_T = TypeVar("_T")
_KEYS = {"model": "name"}  # maps a field to its key in the file: the simulated nvidia-smi reads `name`


def plain(value: object) -> Any:
    if is_dataclass(value):
        return {_KEYS.get(each.name, each.name): plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value


def lenient(kind: type[_T], entry: Mapping[str, Any]) -> _T:
    found = {}
    for each in fields(cast("Any", kind)):
        value = entry.get(_KEYS.get(each.name, each.name))
        try:
            found[each.name] = _READ[str(each.type)](value)
        except (TypeError, ValueError, OverflowError):
            found[each.name] = _missing(each)
    return kind(**found)


def _missing(field: Any) -> Any:
    """Return the value of a field that is not available; for a required field, an empty value of its type."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    return -1 if field.type == "int" else 0.0 if field.type == "float" else ""


def _checked(kind: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{value!r} is of another type")
        return value

    return read


def _number(value: Any) -> float:
    number: float = _checked((int, float))(value)
    return number


def _several(read: Callable[[Any], _T]) -> Callable[[Any], tuple[_T, ...]]:
    return lambda value: tuple(read(each) for each in _checked(list)(value))


def _entries(kind: type[_T]) -> Callable[[Any], tuple[_T, ...]]:
    return lambda value: tuple(lenient(kind, each) for each in _checked(list)(value) if isinstance(each, dict))


def _counters(value: Any) -> dict[str, int]:
    return {str(key): int(count) for key, count in _checked(dict)(value).items() if type(count) is int}


_READ: dict[str, Callable[[Any], Any]] = {
    "str": _checked(str),
    "bool": _checked(bool),
    "int": _checked(int),
    "float": _number,
    "bool | None": _checked(bool),
    "int | None": _checked(int),
    "float | None": _number,
    "tuple[str, ...] | None": _several(_checked(str)),
    "tuple[float, ...]": _several(_number),
    "tuple[GpuFacts, ...]": _entries(GpuFacts),
    "tuple[GpuProcess, ...] | None": _entries(GpuProcess),
    "tuple[LogLine, ...]": _entries(LogLine),
    "tuple[Port, ...]": _entries(Port),
    "Mapping[str, int]": _counters,
}


# The telemetry file


# Environment variable with the path of the node's file. It is set for all processes of a simulated node.
VARIABLE = "DALSEGNO_TELEMETRY"
XID = "NVRM: Xid (PCI:{bus}): {code}, pid={pid}, {text}"
FIRST_BUS = 0x41  # PCI bus of the first simulated GPU


class BadTelemetry(Exception):
    """Raised if a file is not a valid telemetry file."""


@dataclass(frozen=True)
class Telemetry:
    """The state of a simulated node. `stamp` identifies the GPUs for which the telemetry was created, and never
    changes."""

    node: str
    gpus: tuple[GpuFacts, ...] = ()
    kernel_log: tuple[LogLine, ...] = ()
    ports: tuple[Port, ...] = ()
    clock_skew_s: float | None = 0.0
    fabric_manager: str = "active"  # the service's state, as systemctl reports it
    booted_at: float = 0.0
    notice_at: float = 0.0  # when the simulated cloud ends the instance; 0 if it has not announced this
    stamp: str = ""


def telemetry_path(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of this node's telemetry; None on a real machine."""
    return Path(env[VARIABLE]) if env.get(VARIABLE) else None


def read_telemetry(path: Path) -> Telemetry:
    """Read a telemetry file; raise BadTelemetry if it is not valid."""
    try:
        return parse_telemetry(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadTelemetry(f"{path}: {error}") from error


@lru_cache(maxsize=2)  # several checks read the same file in one round
def parse_telemetry(text: str) -> Telemetry:
    """Parse telemetry leniently.

    Values that are missing or have the wrong type count as unavailable; unknown keys are ignored.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadTelemetry(f"not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("gpus"), list):
        raise BadTelemetry("not an object with a list of `gpus`")
    return lenient(Telemetry, value)


def write_telemetry(path: Path, telemetry: Telemetry) -> None:
    write_atomic(path, telemetry_text(telemetry), durable=False)


def telemetry_text(telemetry: Telemetry) -> str:
    return json.dumps(plain(telemetry), indent=1)


# Values for simulated nodes


def healthy(
    node: str, gpus: int, model: str, *, memory_mib: int = 16384, stamp: str = "", machine: str = ""
) -> Telemetry:
    """Return the telemetry of a healthy node. `model` is Slurm's type (h100).

    For the same node name, a different `machine` has GPUs with different UUIDs and serial numbers.
    """
    links = nvlinks_of(model) if gpus > 1 else 0
    made = [_healthy_gpu(f"{node} {machine} {index}", index, model, links, memory_mib) for index in range(gpus)]
    ports = tuple(Port(f"sim{index}/1") for index in range(_nics(gpus, model)))
    return Telemetry(node, tuple(made), ports=ports, stamp=stamp)


def with_gpu(telemetry: Telemetry, index: int, **changes: Any) -> Telemetry:
    """Return the telemetry with one GPU changed: `with_gpu(t, 0, temperature_c=97.0)`."""
    changed = tuple(replace(gpu, **changes) if gpu.index == index else gpu for gpu in telemetry.gpus)
    return replace(telemetry, gpus=changed)


def with_line(telemetry: Telemetry, at: float, text: str, level: int = 3) -> Telemetry:
    """Return the telemetry with one more line in the kernel log."""
    return replace(telemetry, kernel_log=(*telemetry.kernel_log, LogLine(at, text, level)))


def xid_line(code: int, text: str, *, gpu: int = 0, pid: int = 4242) -> str:
    """Return the line that the driver logs: `NVRM: Xid (PCI:0000:41:00): 79, pid=4242, GPU has fallen off the bus.`"""
    return XID.format(bus=f"0000:{FIRST_BUS + gpu:02x}:00", code=code, pid=pid, text=text)


# Values of the performance counters. Simulated GPUs are idle.
_IDLE_COUNTERS: dict[str, Any] = dict.fromkeys((
    "graphics_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active",
    "fp16_active", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s", "nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s",
), 0.0)  # fmt: skip


def _healthy_gpu(body: str, index: int, model: str, links: int, memory_mib: int) -> GpuFacts:
    from hashlib import blake2b

    mark = blake2b(body.encode(), digest_size=16).hexdigest()
    return GpuFacts(
        index=index,
        uuid=f"GPU-{mark[:8]}-{mark[8:12]}-{mark[12:16]}-{mark[16:20]}-{mark[20:]}",
        serial=str(int(mark[:10], 16)).zfill(13),
        model=f"{model.upper() or 'GPU'} (simulated)",
        temperature_c=34,
        slowdown_c=87,
        clock_mhz=345,
        max_clock_mhz=1980,
        throttle=(),
        utilization_percent=0,
        ecc_corrected=0,
        ecc_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        remapped_rows=0,
        nvlinks=links,
        nvlink_errors=0,
        pcie_width=16,
        pcie_max_width=16,
        memory_total_mib=memory_mib,
        memory_used_mib=0,
        processes=(),
        divided=False,
        bus_id=f"00000000:{FIRST_BUS + index:02X}:00.0",
        memory_clock_mhz=2619,
        memory_temperature_c=38,
        memory_utilization_percent=0,
        encoder_percent=0,
        decoder_percent=0,
        power_w=72,
        energy_mj=0,
        pcie_replays=0,
        memory_free_mib=memory_mib,
        memory_reserved_mib=0,
        rows_corrected=0,
        power_violation_ns=0,
        thermal_violation_ns=0,
        **_IDLE_COUNTERS,
    )


def _nics(gpus: int, model: str) -> int:
    """Return the number of network ports: one for each GPU if the model has NVLink, otherwise one."""
    return gpus if gpus and nvlinks_of(model) else 1
