"""The GPUs: from the telemetry on simulated nodes, else from NVML, else from nvidia-smi."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dalsegno.health.facts import GpuFacts, GpuProcess
from dalsegno.health.world import NodeWorld
from dalsegno.system.apart import NoAnswer

if TYPE_CHECKING:  # many nodes never ask nvidia-smi, and an agent must be small
    from xml.etree import ElementTree

from dataclasses import dataclass

from dalsegno.errors import NotThere
from dalsegno.hardware import find_gpu
from dalsegno.health.facts import Sample
from dalsegno.health.telemetry import VARIABLE, BadTelemetry, Telemetry, parse_telemetry

# ---- GPUs as `nvidia-smi` tells of them: everything in one answer, and the NVLinks in two more.


_NOT_TOLD = {"", "N/A", "[N/A]", "Not Supported", "[Not Supported]", "Requested functionality has been deprecated"}
_BROKEN = re.compile(r"ERR!|Unknown Error|GPU is lost|\[?GPU requires reset\]?", re.IGNORECASE)
_GPU = re.compile(r"^GPU (\d+):.*?(?:UUID: (GPU-[\w-]+))?\)?\s*$")
_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "sw_power_cap")


def read_smi(world: NodeWorld) -> tuple[GpuFacts, ...]:
    answer = world.run(("nvidia-smi", "-q", "-x"), timeout_s=5.0)
    if answer.exit_code != 0 or "<gpu " not in answer.stdout:
        raise NoAnswer(f"nvidia-smi ended with {answer.exit_code}: {_last(answer.stdout, answer.stderr)}")
    gpus = parse_smi(answer.stdout)
    up, errors = _links(world, "-s"), _links(world, "-e")
    return tuple(_with_links(gpu, parse_links(up), parse_link_errors(errors)) for gpu in gpus)


def parse_smi(xml: str) -> tuple[GpuFacts, ...]:
    """The answer to `nvidia-smi -q -x`. ValueError if it is none."""
    from xml.etree import ElementTree

    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi's XML: {error}") from error
    return tuple(_gpu(number, gpu) for number, gpu in enumerate(root.iter("gpu")) if gpu.get("id"))


def _gpu(number: int, gpu: ElementTree.Element) -> GpuFacts:
    heat_c, slowdown_c = _heat(gpu)
    return GpuFacts(
        index=number,
        uuid=_text(gpu, "uuid") or "",
        serial=_text(gpu, "serial") or "",
        model=_text(gpu, "product_name") or "",
        lost=any(_BROKEN.search(each.text or "") for each in gpu.iter()),
        temperature_c=heat_c,
        slowdown_c=slowdown_c,
        clock_mhz=_number(gpu, "clocks/sm_clock"),
        max_clock_mhz=_number(gpu, "max_clocks/sm_clock"),
        throttle=_throttle(gpu),
        utilization_percent=_number(gpu, "utilization/gpu_util"),
        ecc_corrected=_sum(gpu, "ecc_errors/volatile", lambda tag: tag.endswith("_correctable")),
        ecc_uncorrected=_sum(gpu, "ecc_errors/volatile", lambda tag: "_uncorrectable" in tag),
        remap_pending=_yes(gpu, "remapped_rows/remapped_row_pending"),
        remap_failed=_yes(gpu, "remapped_rows/remapped_row_failure"),
        remapped_rows=_whole(gpu, "remapped_rows/remapped_row_unc"),
        pcie_width=_whole(gpu, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        pcie_max_width=_whole(gpu, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        memory_total_mib=_whole(gpu, "fb_memory_usage/total"),
        memory_used_mib=_whole(gpu, "fb_memory_usage/used"),
        processes=tuple(_process(each) for each in gpu.iterfind("processes/process_info")),
        divided={"Enabled": True, "Disabled": False}.get(_text(gpu, "mig_mode/current_mig") or ""),
    )


def _heat(gpu: ElementTree.Element) -> tuple[float | None, float | None]:
    """Now, and where slowdown begins: newer drivers tell how far it is to a limit, and slowdown from that limit."""
    now = _number(gpu, "temperature/gpu_temp")
    left, slow = _number(gpu, "temperature/gpu_temp_tlimit"), _number(gpu, "temperature/gpu_temp_slow_tlimit_threshold")
    if now is not None and left is not None and slow is not None:
        return now, now + left - slow
    return now, _number(gpu, "temperature/gpu_temp_slow_threshold")


def _throttle(gpu: ElementTree.Element) -> tuple[str, ...] | None:
    """Drivers before 535 call them throttle reasons."""
    for new, one in (("clocks_event_reasons", "clocks_event_reason"), ("clocks_throttle_reasons",) * 2):
        said = gpu.find(new)
        if said is not None:
            return tuple(word for word in _REASONS if _text(said, f"{one.removesuffix('s')}_{word}") == "Active")
    return None


def _process(entry: ElementTree.Element) -> GpuProcess:
    return GpuProcess(_whole(entry, "pid") or 0, _text(entry, "process_name") or "", _whole(entry, "used_memory"))


def _text(within: ElementTree.Element, path: str) -> str | None:
    text = (within.findtext(path) or "").strip()
    return None if text in _NOT_TOLD else text


def _number(within: ElementTree.Element, path: str) -> float | None:
    """`36 C`, `1980 MHz`, `16x`, `-2 C`."""
    found = re.match(r"-?\d+(\.\d+)?", _text(within, path) or "")
    return float(found[0]) if found else None


def _whole(within: ElementTree.Element, path: str) -> int | None:
    number = _number(within, path)
    return None if number is None else int(number)


def _yes(within: ElementTree.Element, path: str) -> bool | None:
    return {"Yes": True, "No": False}.get(_text(within, path) or "")


def _sum(within: ElementTree.Element, path: str, counts: Callable[[str], bool]) -> int | None:
    entries = [each for each in within.iterfind(f"{path}/*") if counts(each.tag)]
    told = [int(each.text) for each in entries if (each.text or "").strip().isdigit() and each.text]
    return sum(told) if told else None


# NVLink -------------------------------------------------------------------------------------------------------


def _links(world: NodeWorld, flag: str) -> str:
    try:
        return world.run(("nvidia-smi", "nvlink", flag), timeout_s=3.0).stdout
    except NoAnswer:
        return ""


def parse_links(text: str) -> dict[str, int]:
    """Links that are up by a GPU's uuid, from `nvidia-smi nvlink -s`: `Link 0: 26.562 GB/s` or `<inactive>`."""
    return _by_gpu(text, lambda line: int(bool(re.search(r"Link \d+: [\d.]+ GB/s", line))))


def parse_link_errors(text: str) -> dict[str, int]:
    """Recoveries by a GPU's uuid, from `nvidia-smi nvlink -e`; replays and CRC errors are mended by the link itself."""
    found = r"Link \d+: (?:Recovery|Uncorrectable|Effective BER) Errors?: (\d+)"
    return _by_gpu(text, lambda line: int(match[1]) if (match := re.search(found, line)) else 0)


def _by_gpu(text: str, count: Callable[[str], int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    gpu = ""
    for line in text.splitlines():
        if found := _GPU.match(line.strip()):
            gpu = found[2] or found[1]
            counts[gpu] = 0
        elif gpu:
            counts[gpu] += count(line)
    return counts


def _with_links(gpu: GpuFacts, up: dict[str, int], errors: dict[str, int]) -> GpuFacts:
    return replace(gpu, nvlinks=up.get(gpu.uuid), nvlink_errors=errors.get(gpu.uuid))


def _last(*texts: str) -> str:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


# ---- The telemetry of a simulated node.


def ask_telemetry(world: NodeWorld) -> Telemetry | None:
    """None on a real node."""
    path = world.env.get(VARIABLE)
    if not path:
        return None
    try:
        return parse_telemetry(world.read(path))
    except BadTelemetry as error:
        raise NoAnswer(f"the node's telemetry is damaged: {error}") from error


# ---- The GPUs: from the telemetry on simulated nodes, else from NVML, else from nvidia-smi.


PCI = "/sys/bus/pci/devices"
NVIDIA, DISPLAY_OR_3D = "0x10de", "0x03"


@dataclass(frozen=True)
class GpuCount:
    """GPUs that were found, that Slurm's file promises (None: it says nothing), and that the bus has."""

    gpus: tuple[GpuFacts, ...]
    expected: int | None
    on_bus: int


@dataclass(frozen=True)
class Heat:
    """How a GPU's temperature went, oldest first."""

    index: int
    slowdown_c: float
    samples: tuple[Sample, ...]


def has_gpus(world: NodeWorld) -> bool:
    """Whether there should be some."""
    if world.expected.gpus is not None:
        return world.expected.gpus > 0 and _is_nvidias(world.expected.gpu_type)
    told = ask_telemetry(world)
    return bool(told.gpus) if told else gpus_on_bus(world) > 0


def may_have_gpus(world: NodeWorld) -> bool:
    """Also where nobody says, and somebody should."""
    return has_gpus(world) or bool(world.expected.untold)


def _is_nvidias(gpu_type: str) -> bool:
    """One that the catalog does not know may be."""
    try:
        return find_gpu(gpu_type).product.startswith("NVIDIA") if gpu_type else True
    except NotThere:
        return True


def ask_gpus(world: NodeWorld) -> tuple[GpuFacts, ...]:
    told = ask_telemetry(world)
    if told is not None and (told.gpus or not gpus_on_bus(world)):
        return told.gpus
    found = world.nvml()
    return read_smi(world) if found is None else found


def ask_gpu_count(world: NodeWorld) -> GpuCount:
    if not has_gpus(world):
        raise NoAnswer(world.expected.untold)
    simulated = ask_telemetry(world) is not None
    return GpuCount(ask_gpus(world), world.expected.gpus, 0 if simulated else gpus_on_bus(world))


def ask_job_gpus(world: NodeWorld) -> tuple[GpuFacts, ...]:
    """Before a job: only those that it gets, for others may be in use. Slurm tells a prolog which."""
    found = tuple(gpu for gpu in ask_gpus(world) if not _is_tried(world, gpu))
    if "SLURM_JOB_ID" not in world.env:
        return found
    mine = world.env.get("SLURM_JOB_GPUS", "").split(",")
    return tuple(gpu for gpu in found if str(gpu.index) in mine)


def _is_tried(world: NodeWorld, gpu: GpuFacts) -> bool:
    """For seconds, by our own agent: another node proves itself with this one as its partner."""
    return bool(gpu.processes) and all(_is_our_agents(world, process.pid) for process in gpu.processes or ())


def _is_our_agents(world: NodeWorld, pid: int) -> bool:
    try:
        words, status = world.read(f"/proc/{pid}/cmdline").split("\0"), world.read(f"/proc/{pid}/status")
    except NoAnswer:
        return False
    return "node-agent" in words[:4] and "\nUid:\t0\t" in status


def ask_heat(world: NodeWorld) -> tuple[Heat, ...]:
    """Notes what it is now, and gives all that was noted."""
    now, found = world.now(), []
    for gpu in ask_gpus(world):
        if gpu.temperature_c is not None and gpu.slowdown_c is not None:
            samples = world.seen.heat_of(gpu.uuid or str(gpu.index))
            samples.append(Sample(now, gpu.temperature_c))
            found.append(Heat(gpu.index, gpu.slowdown_c, tuple(samples)))
    return tuple(found)


def gpus_on_bus(world: NodeWorld) -> int:
    return sum(_is_gpu(world, f"{PCI}/{name}") for name in world.names(PCI))


def _is_gpu(world: NodeWorld, device: str) -> bool:
    """What a device is does not change, and large nodes have hundreds of them: it is read once."""
    displays = world.seen.displays
    if device not in displays:
        is_nvidias = world.read(f"{device}/vendor").strip() == NVIDIA
        displays[device] = is_nvidias and world.read(f"{device}/class").startswith(DISPLAY_OR_3D)
    # One that is given to a virtual machine is not ours, as long as it is.
    return displays[device] and "DRIVER=vfio-pci" not in world.read(f"{device}/uevent").splitlines()
