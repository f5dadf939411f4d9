"""Read the state of GPUs: from a simulated node's telemetry, otherwise from NVML, otherwise from nvidia-smi."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dalsegno.health.facts import GpuFacts, GpuProcess
from dalsegno.health.node_reader import NodeReader
from dalsegno.system.hanging_calls import NoAnswer

if TYPE_CHECKING:  # imported only when needed: many nodes never run nvidia-smi, and an agent must be small
    from xml.etree import ElementTree

from dataclasses import dataclass

from dalsegno.errors import NotThere
from dalsegno.hardware import find_gpu
from dalsegno.health.facts import Sample
from dalsegno.health.telemetry import VARIABLE, BadTelemetry, Telemetry, parse_telemetry

# Output of nvidia-smi: two calls return the values of NVLinks, and one call returns all other values


_NOT_TOLD = {"", "N/A", "[N/A]", "Not Supported", "[Not Supported]", "Requested functionality has been deprecated"}
_BROKEN = re.compile(r"ERR!|Unknown Error|GPU is lost|\[?GPU requires reset\]?", re.IGNORECASE)
_GPU = re.compile(r"^GPU (\d+):.*?(?:UUID: (GPU-[\w-]+))?\)?\s*$")
_REASONS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "sw_power_cap")


def read_smi(node: NodeReader) -> tuple[GpuFacts, ...]:
    answer = node.run(("nvidia-smi", "-q", "-x"), timeout_s=5.0)
    if answer.exit_code != 0 or "<gpu " not in answer.stdout:
        raise NoAnswer(f"nvidia-smi exited with code {answer.exit_code}: {_last(answer.stdout, answer.stderr)}")
    gpus = parse_smi(answer.stdout)
    up, errors = _links(node, "-s"), _links(node, "-e")
    return tuple(_with_links(gpu, parse_links(up), parse_link_errors(errors)) for gpu in gpus)


def parse_smi(xml: str) -> tuple[GpuFacts, ...]:
    """Parse the output of `nvidia-smi -q -x`; raise ValueError if it is not XML."""
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
        bus_id=gpu.get("id") or "",
        memory_clock_mhz=_number(gpu, "clocks/mem_clock"),
        memory_temperature_c=_number(gpu, "temperature/memory_temp"),
        memory_utilization_percent=_number(gpu, "utilization/memory_util"),
        encoder_percent=_number(gpu, "utilization/encoder_util"),
        decoder_percent=_number(gpu, "utilization/decoder_util"),
        power_w=_power(gpu),
        pcie_replays=_whole(gpu, "pci/replay_counter"),
        memory_free_mib=_whole(gpu, "fb_memory_usage/free"),
        memory_reserved_mib=_whole(gpu, "fb_memory_usage/reserved"),
        rows_corrected=_whole(gpu, "remapped_rows/remapped_row_corr"),
    )


def _heat(gpu: ElementTree.Element) -> tuple[float | None, float | None]:
    """Return the current temperature and the slowdown temperature. Newer drivers report distances to a limit
    instead."""
    now = _number(gpu, "temperature/gpu_temp")
    left, slow = _number(gpu, "temperature/gpu_temp_tlimit"), _number(gpu, "temperature/gpu_temp_slow_tlimit_threshold")
    if now is not None and left is not None and slow is not None:
        return now, now + left - slow
    return now, _number(gpu, "temperature/gpu_temp_slow_threshold")


def _power(gpu: ElementTree.Element) -> float | None:
    """Return the power draw in watts. Drivers report it under different names."""
    places = ("instant_power_draw", "average_power_draw", "power_draw")
    paths = [f"{section}/{name}" for section in ("gpu_power_readings", "power_readings") for name in places]
    found = (_number(gpu, path) for path in paths)
    return next((watts for watts in found if watts is not None), None)


def _throttle(gpu: ElementTree.Element) -> tuple[str, ...] | None:
    """Return the throttle reasons, which drivers before 535 report under another name."""
    for new, one in (("clocks_event_reasons", "clocks_event_reason"), ("clocks_throttle_reasons",) * 2):
        reasons = gpu.find(new)
        if reasons is not None:
            return tuple(word for word in _REASONS if _text(reasons, f"{one.removesuffix('s')}_{word}") == "Active")
    return None


def _process(entry: ElementTree.Element) -> GpuProcess:
    return GpuProcess(_whole(entry, "pid") or 0, _text(entry, "process_name") or "", _whole(entry, "used_memory"))


def _text(within: ElementTree.Element, path: str) -> str | None:
    text = (within.findtext(path) or "").strip()
    return None if text in _NOT_TOLD else text


def _number(within: ElementTree.Element, path: str) -> float | None:
    """Return the number in `36 C`, `1980 MHz`, `16x` or `-2 C`."""
    found = re.match(r"-?\d+(\.\d+)?", _text(within, path) or "")
    return float(found[0]) if found else None


def _whole(within: ElementTree.Element, path: str) -> int | None:
    number = _number(within, path)
    return None if number is None else int(number)


def _yes(within: ElementTree.Element, path: str) -> bool | None:
    return {"Yes": True, "No": False}.get(_text(within, path) or "")


def _sum(within: ElementTree.Element, path: str, counts: Callable[[str], bool]) -> int | None:
    entries = [each for each in within.iterfind(f"{path}/*") if counts(each.tag)]
    numbers = [int(each.text) for each in entries if (each.text or "").strip().isdigit() and each.text]
    return sum(numbers) if numbers else None


# Number and errors of NVLinks


def _links(node: NodeReader, flag: str) -> str:
    try:
        return node.run(("nvidia-smi", "nvlink", flag), timeout_s=3.0).stdout
    except NoAnswer:
        return ""


def parse_links(text: str) -> dict[str, int]:
    """Return the active links by GPU uuid, from `nvidia-smi nvlink -s`: `Link 0: 26.562 GB/s` or `<inactive>`."""
    return _by_gpu(text, lambda line: int(bool(re.search(r"Link \d+: [\d.]+ GB/s", line))))


def parse_link_errors(text: str) -> dict[str, int]:
    """Return the errors by GPU uuid, from `nvidia-smi nvlink -e`, without replays and CRC errors, which links
    correct."""
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
    return lines[-1][:200] if lines else "no output"


# Telemetry of simulated nodes


def ask_telemetry(node: NodeReader) -> Telemetry | None:
    """Return the telemetry of a simulated node; None on a real node."""
    path = node.env.get(VARIABLE)
    if not path:
        return None
    try:
        return parse_telemetry(node.read(path))
    except BadTelemetry as error:
        raise NoAnswer(f"the node's telemetry is damaged: {error}") from error


# All GPUs of a node, from any source


PCI = "/sys/bus/pci/devices"
NVIDIA, DISPLAY_OR_3D = "0x10de", "0x03"


@dataclass(frozen=True)
class GpuCount:
    """The GPUs that were found, the number in slurm.conf (None: not specified), and the number on the bus."""

    gpus: tuple[GpuFacts, ...]
    expected: int | None
    on_bus: int


@dataclass(frozen=True)
class TemperatureHistory:
    """The temperatures of a GPU, oldest first."""

    index: int
    slowdown_c: float
    samples: tuple[Sample, ...]


def has_gpus(node: NodeReader) -> bool:
    """Return whether the node should have NVIDIA GPUs."""
    if node.expected.gpus is not None:
        return node.expected.gpus > 0 and _is_nvidias(node.expected.gpu_type)
    telemetry = ask_telemetry(node)
    return bool(telemetry.gpus) if telemetry else gpus_on_bus(node) > 0


def may_have_gpus(node: NodeReader) -> bool:
    """Return whether the node should have NVIDIA GPUs, or Slurm runs on it but slurm.conf has no line for it."""
    return has_gpus(node) or bool(node.expected.missing_reason)


def _is_nvidias(gpu_type: str) -> bool:
    """Return whether a GPU type is NVIDIA's. A type that is not in the catalog counts as NVIDIA's."""
    try:
        return find_gpu(gpu_type).product.startswith("NVIDIA") if gpu_type else True
    except NotThere:
        return True


def ask_gpus(node: NodeReader, detailed: bool = False) -> tuple[GpuFacts, ...]:
    """Return the GPUs. `detailed` adds values that the metrics need, but no check does."""
    telemetry = ask_telemetry(node)
    if telemetry is not None and (telemetry.gpus or not gpus_on_bus(node)):
        return telemetry.gpus
    found = node.nvml(detailed)
    return read_smi(node) if found is None else found


def ask_gpu_count(node: NodeReader) -> GpuCount:
    if not has_gpus(node):
        raise NoAnswer(node.expected.missing_reason)
    simulated = ask_telemetry(node) is not None
    return GpuCount(ask_gpus(node), node.expected.gpus, 0 if simulated else gpus_on_bus(node))


def ask_job_gpus(node: NodeReader) -> tuple[GpuFacts, ...]:
    """Return the GPUs that should be free, except those that only a validation uses.

    Before a job, these are only the job's GPUs, because other jobs may use the rest.
    """
    found = tuple(gpu for gpu in ask_gpus(node) if not _is_used_by_validation(node, gpu))
    if "SLURM_JOB_ID" not in node.env:
        return found
    mine = node.env.get("SLURM_JOB_GPUS", "").split(",")
    return tuple(gpu for gpu in found if str(gpu.index) in mine)


def _is_used_by_validation(node: NodeReader, gpu: GpuFacts) -> bool:
    """Return whether only the node agent uses the GPU. The agent uses it for some seconds when another node is
    validated with this one as its partner."""
    return bool(gpu.processes) and all(_is_node_agent(node, process.pid) for process in gpu.processes or ())


def _is_node_agent(node: NodeReader, pid: int) -> bool:
    try:
        argv, status = node.read(f"/proc/{pid}/cmdline").split("\0"), node.read(f"/proc/{pid}/status")
    except NoAnswer:
        return False
    return "node-agent" in argv[:4] and "\nUid:\t0\t" in status


def ask_heat(node: NodeReader) -> tuple[TemperatureHistory, ...]:
    """Record the current temperatures, and return all recorded ones by GPU."""
    now, found = node.now(), []
    for gpu in ask_gpus(node):
        if gpu.temperature_c is not None and gpu.slowdown_c is not None:
            samples = node.seen.heat_of(gpu.uuid or str(gpu.index))
            samples.append(Sample(now, gpu.temperature_c))
            found.append(TemperatureHistory(gpu.index, gpu.slowdown_c, tuple(samples)))
    return tuple(found)


def gpus_on_bus(node: NodeReader) -> int:
    return sum(_is_gpu(node, f"{PCI}/{name}") for name in node.names(PCI))


def _is_gpu(node: NodeReader, device: str) -> bool:
    """Return whether a device is an NVIDIA GPU. The result is cached: large nodes have hundreds of devices."""
    displays = node.seen.displays
    if device not in displays:
        is_nvidias = node.read(f"{device}/vendor").strip() == NVIDIA
        displays[device] = is_nvidias and node.read(f"{device}/class").startswith(DISPLAY_OR_3D)
    # A GPU that is passed to a virtual machine does not count.
    return displays[device] and "DRIVER=vfio-pci" not in node.read(f"{device}/uevent").splitlines()
