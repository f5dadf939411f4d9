"""The checks of GPUs: whether they are present, free of faults, cool, at full speed, and unused."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dalsegno.health.check import NO_JOB, QUIET, WATCHING, Check
from dalsegno.health.facts import (
    HW_POWER_BRAKE,
    HW_SLOWDOWN,
    HW_THERMAL,
    SW_POWER_CAP,
    SW_THERMAL,
    GpuFacts,
    Sample,
    nvlinks_of,
)
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.readers.gpus import (
    GpuCount,
    TemperatureHistory,
    ask_gpu_count,
    ask_gpus,
    ask_heat,
    ask_job_gpus,
    ask_telemetry,
    has_gpus,
    may_have_gpus,
)
from dalsegno.health.readers.host import KernelLines, ask_kernel_log
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.xids import SAYS_ITSELF, XidEvent, events, meaning, named_action, remedy_for
from dalsegno.system.hanging_calls import NoAnswer

# Functions that several checks share


def reporting(gpus: Sequence[GpuFacts], field: str, what: str) -> list[GpuFacts]:
    """Return the GPUs that report this field; raise NoAnswer if there are none."""
    found = [gpu for gpu in gpus if getattr(gpu, field) is not None]
    if not found:
        raise NoAnswer(f"no GPU reports {what}")
    return found


def name_gpus(gpus: Iterable[GpuFacts]) -> str:
    """Return names such as `GPU 3 (1653724066759)`: the index may change, but the serial number is on the card."""
    return ", ".join(f"GPU {gpu.index}" + (f" ({gpu.serial})" if gpu.serial else "") for gpu in gpus)


BUSY_PERCENT = 90


def judge_count(count: GpuCount) -> Result:
    lost = [gpu for gpu in count.gpus if gpu.lost]
    there, wanted = len(count.gpus) - len(lost), max(count.expected or 0, count.on_bus)
    if lost:
        return failed(f"{name_gpus(lost)} does not answer; {there} of {max(wanted, len(count.gpus))} do", Remedy.REBOOT)
    if there < wanted:
        return failed(f"{there} of {wanted} GPUs are present", Remedy.REBOOT)
    return passed(f"{there} GPU{'s' * (there != 1)}")


def judge_ecc(gpus: Sequence[GpuFacts], *, corrected: float = 20_000_000) -> Result:
    known = reporting(gpus, "ecc_uncorrected", "its ECC errors")
    if bad := [gpu for gpu in known if gpu.ecc_uncorrected]:
        return failed(f"uncorrected memory errors on {name_gpus(bad)}: {bad[0].ecc_uncorrected}", Remedy.RESET)
    if many := [gpu for gpu in known if (gpu.ecc_corrected or 0) > corrected]:
        return warned(f"{many[0].ecc_corrected} corrected memory errors on {name_gpus(many)}")
    return passed("no uncorrected memory errors")


def judge_rows(gpus: Sequence[GpuFacts], *, rows: float = 512) -> Result:
    known = reporting(gpus, "remap_failed", "remapped rows")
    if bad := [gpu for gpu in known if gpu.remap_failed]:
        return failed(f"a row of memory could not be remapped on {name_gpus(bad)}", Remedy.REPLACE, "failed")
    if worn := [gpu for gpu in known if (gpu.remapped_rows or 0) > rows]:
        return failed(
            f"{worn[0].remapped_rows} rows of memory are remapped on {name_gpus(worn)}", Remedy.REPLACE, "worn"
        )
    if waits := [gpu for gpu in known if gpu.remap_pending]:
        return failed(f"a remapped row needs a reset on {name_gpus(waits)}", Remedy.RESET, "pending")
    return passed("no row of memory needs to be remapped")


def judge_temperature(gpus: Sequence[GpuFacts], *, margin_c: float = 5, least_c: float = 0) -> Result:
    """Judge the margin between the temperature and the limit at which the hardware slows down. The limit differs
    between cards."""
    known = [gpu for gpu in reporting(gpus, "temperature_c", "its temperature") if gpu.slowdown_c is not None]
    hottest = min(known, key=_margin_c, default=None)
    if hottest is None:
        raise NoAnswer("no GPU reports at which temperature it slows down")
    text = f"{name_gpus([hottest])} is at {hottest.temperature_c:g} °C and slows down at {hottest.slowdown_c:g} °C"
    if _margin_c(hottest) <= least_c:
        return failed(text, Remedy.DRAIN)
    return warned(text) if _margin_c(hottest) <= margin_c else passed(f"{_margin_c(hottest):g} °C below slowdown")


def _margin_c(gpu: GpuFacts) -> float:
    return (gpu.slowdown_c or 0) - (gpu.temperature_c or 0)


def judge_heating(
    heat: Sequence[TemperatureHistory],
    *,
    within_min: float = 10,
    near_c: float = 15,
    window_s: float = 300,
    least_s: float = 60,
) -> Result:
    """Warn of a GPU that approaches slowdown and keeps heating up: a fan or a pump may have failed."""
    slopes = [(each, _slope_c_per_s(each.samples, window_s, least_s)) for each in heat]
    if not any(slope is not None for _, slope in slopes):
        raise NoAnswer("not enough measurements for a trend yet")
    for each, slope in slopes:
        left_c = each.slowdown_c - each.samples[-1].celsius
        if slope and slope > 0 and left_c <= near_c and left_c / slope <= within_min * 60:
            return warned(f"GPU {each.index} heats up by {slope * 60:.1f} °C per minute: {_until(left_c, slope)}")
    return passed("no GPU is heating up towards slowdown")


def _until(left_c: float, slope: float) -> str:
    if left_c <= 0:
        return "it has slowed down already"
    minutes = left_c / slope / 60
    return f"slowdown in {minutes:.0f} min" if minutes >= 1 else "slowdown within a minute"


def _slope_c_per_s(samples: Sequence[Sample], window_s: float, least_s: float) -> float | None:
    """Return the slope by least squares over the window; None if there are too few samples."""
    recent = [sample for sample in samples if sample.at > samples[-1].at - window_s]
    if len(recent) < 5 or recent[-1].at - recent[0].at < least_s:
        return None
    mean_at = sum(sample.at for sample in recent) / len(recent)
    mean_c = sum(sample.celsius for sample in recent) / len(recent)
    spread = sum((sample.at - mean_at) ** 2 for sample in recent)
    return sum((sample.at - mean_at) * (sample.celsius - mean_c) for sample in recent) / spread


def judge_clocks(gpus: Sequence[GpuFacts], *, least_share: float = 0.5) -> Result:
    known = reporting(gpus, "throttle", "why its clocks are reduced")
    if hot := [gpu for gpu in known if HW_THERMAL in (gpu.throttle or ())]:
        return failed(f"{name_gpus(hot)} is slowed down by heat", Remedy.DRAIN, HW_THERMAL)
    for reason in (HW_POWER_BRAKE, HW_SLOWDOWN):
        if bad := [gpu for gpu in known if reason in (gpu.throttle or ())]:
            return failed(f"{name_gpus(bad)} is slowed down by its hardware ({reason})", Remedy.RESET, reason)
    if warm := [gpu for gpu in known if SW_THERMAL in (gpu.throttle or ())]:
        return warned(f"{name_gpus(warm)} is slowed down by the driver because of heat", SW_THERMAL)
    if slow := [gpu for gpu in known if _is_slow(gpu, least_share)]:
        return warned(f"{name_gpus(slow)} runs at {slow[0].clock_mhz:g} of {slow[0].max_clock_mhz:g} MHz", "slow")
    return passed("no clock is reduced")


def _is_slow(gpu: GpuFacts, least_share: float) -> bool:
    """Return whether a loaded GPU runs slowly for another reason than its power cap."""
    busy = (gpu.utilization_percent or 0) >= BUSY_PERCENT and SW_POWER_CAP not in (gpu.throttle or ())
    known = gpu.clock_mhz is not None and gpu.max_clock_mhz is not None
    return busy and known and (gpu.clock_mhz or 0) < least_share * (gpu.max_clock_mhz or 0)


def judge_leftovers(gpus: Sequence[GpuFacts], *, used_mib: float = 15) -> Result:
    """Fail if processes or memory are left on GPUs that should be idle."""
    if not gpus:
        return passed("no GPU for this job, or only GPUs in use by a validation")
    known = reporting(gpus, "memory_used_mib", "how much of its memory is in use")
    whole = [gpu for gpu in known if not gpu.divided]
    if bad := [gpu for gpu in known if gpu.processes]:
        pids = ", ".join(str(process.pid) for gpu in bad for process in gpu.processes or ())
        return failed(f"processes are left on {name_gpus(bad)}: {pids}", Remedy.REBOOT, "processes")
    if full := [gpu for gpu in whole if (gpu.memory_used_mib or 0) > used_mib]:
        return failed(f"{full[0].memory_used_mib} MiB are in use on idle {name_gpus(full)}", Remedy.REBOOT, "memory")
    return passed("no processes or memory left on GPUs")


GPU_CHECKS = (
    Check("gpu-count", "all GPUs are present and answer", ask_gpu_count, judge_count, every_s=1, applies=may_have_gpus),
    Check("gpu-ecc", "memory errors since the last reset", ask_gpus, judge_ecc, every_s=1, applies=has_gpus),
    Check("gpu-rows", "worn rows of memory", ask_gpus, judge_rows, every_s=10, applies=has_gpus),
    Check(
        "gpu-temperature", "margin to slowdown", ask_gpus, judge_temperature, every_s=1, applies=has_gpus, settle_s=5
    ),
    Check("gpu-heating", "GPUs that heat up", ask_heat, judge_heating, WATCHING, every_s=5, applies=has_gpus),
    Check("gpu-clocks", "reduced clocks", ask_gpus, judge_clocks, every_s=1, applies=has_gpus, settle_s=5),
    Check(
        "gpu-leftovers",
        "processes and memory left behind",
        ask_job_gpus,
        judge_leftovers,
        NO_JOB,
        60,
        has_gpus,
        lasts=False,
    ),
)


# Links between GPUs


_SLOT = re.compile(r"PCIe?\b|\bNVL\b", re.IGNORECASE)  # matches names such as "NVIDIA H100 PCIe" and "NVIDIA H100 NVL"
SWITCHED_FROM = 8  # nodes with at least this many GPUs connect NVLinks through switches, which need the fabric manager


@dataclass(frozen=True)
class Links:
    gpus: tuple[GpuFacts, ...]
    each: int  # number of NVLinks per GPU of this type; 0 if unknown


def has_links(node: NodeReader) -> bool:
    return has_gpus(node) and (node.expected.gpus or 2) > 1 and _links_each(node) > 0


def is_switched(node: NodeReader) -> bool:
    return has_links(node) and (node.expected.gpus or 0) >= SWITCHED_FROM


def ask_links(node: NodeReader) -> Links:
    return Links(ask_gpus(node), _links_each(node))


def _links_each(node: NodeReader) -> int:
    """Return the NVLinks per GPU for the type in slurm.conf. Without a type, and for PCIe cards, which have different
    bridges, return the largest number on the node."""
    gpus = ask_gpus(node)
    if node.expected.gpu_type and not any(_SLOT.search(gpu.model) for gpu in gpus):
        return nvlinks_of(node.expected.gpu_type)
    return max((gpu.nvlinks or 0 for gpu in gpus), default=0)


def ask_fabric_manager(node: NodeReader) -> str:
    telemetry = ask_telemetry(node)
    if telemetry is not None:
        return telemetry.fabric_manager
    done = node.run(("systemctl", "is-active", "nvidia-fabricmanager"))
    if not done.stdout.strip():
        raise NoAnswer(f"no answer from systemctl: {(done.stderr.strip() or 'no output').splitlines()[0]}")
    return done.stdout.strip()


def ask_dcgm(node: NodeReader) -> str:
    return node.run(("dcgmi", "health", "-g", "0", "-c", "-j")).stdout


def judge_nvlink(links: Links, *, errors: float = 0) -> Result:
    known = reporting(links.gpus, "nvlinks", "its NVLinks")
    if down := [gpu for gpu in known if (gpu.nvlinks or 0) < links.each]:
        return failed(f"{down[0].nvlinks} of {links.each} NVLinks are up on {name_gpus(down)}", Remedy.RESET, "down")
    if bad := [gpu for gpu in known if (gpu.nvlink_errors or 0) > errors]:
        return failed(f"{bad[0].nvlink_errors} NVLink errors on {name_gpus(bad)}", Remedy.RESET, "errors")
    return passed(f"all NVLinks of {len(known)} GPUs are up")


def judge_pcie(gpus: Sequence[GpuFacts], *, lanes: float = 16) -> Result:
    known = reporting(gpus, "pcie_width", "its PCIe width")
    bad = [gpu for gpu in known if (gpu.pcie_width or 0) < min(lanes, gpu.pcie_max_width or lanes)]
    if bad:
        return failed(f"{name_gpus(bad)} has {bad[0].pcie_width} of {lanes:g} PCIe lanes", Remedy.REPLACE)
    return passed("all PCIe lanes are in use")


def judge_fabric_manager(state: str) -> Result:
    if state == "active":
        return passed("the fabric manager is running")
    if state in ("inactive", "failed", "deactivating", "activating", "reloading"):
        return failed(f"nvidia-fabricmanager is {state}: GPUs cannot reach each other", Remedy.REBOOT)
    raise ValueError(f"systemctl reports {state!r}")


def judge_dcgm(text: str) -> Result:
    health = json.loads(text)["body"]["Overall Health"]["value"]
    if health == "Healthy":
        return passed("DCGM reports no problem")
    if health == "Warning":
        return warned("DCGM warns: see `dcgmi health -g 0 -c`")
    if health == "Failure":
        return failed("DCGM reports a failure: see `dcgmi health -g 0 -c`", Remedy.RESET)
    raise ValueError(f"DCGM reports {health!r}")


GPU_LINK_CHECKS = (
    Check("nvlink", "all NVLinks are up, without errors", ask_links, judge_nvlink, every_s=5, applies=has_links),
    Check("pcie-width", "all PCIe lanes of each GPU", ask_gpus, judge_pcie, every_s=30, applies=has_gpus),
    Check(
        "fabric-manager", "NVIDIA's fabric manager is running", ask_fabric_manager, judge_fabric_manager, every_s=30,
        applies=is_switched, settle_s=10,
    ),
    Check(
        "dcgm", "health reported by DCGM, if installed", ask_dcgm, judge_dcgm, QUIET, 300,
        applies=lambda node: has_gpus(node) and node.has("dcgmi"),
    ),
)  # fmt: skip


# Xids in the kernel log. For each GPU the heaviest remedy counts, unless the driver names an action (Xid 154).


@dataclass(frozen=True)
class XidLog:
    kernel: KernelLines
    a100: bool


def ask_xids(node: NodeReader) -> XidLog:
    return XidLog(ask_kernel_log(node), node.expected.gpu_type.lower().startswith("a100"))


def judge_xid(log: XidLog, *, window_s: float = 86400, repeats: float = 3) -> Result:
    recent = [event for event in events(log.kernel.lines) if event.at > log.kernel.now - window_s]
    gpus = sorted({event.gpu for event in recent})
    found = [_of_gpu([event for event in recent if event.gpu == gpu], repeats, log.a100) for gpu in gpus]
    if not found:
        return passed("no Xid in the kernel log")
    remedy, event = max(found, key=lambda each: list(Remedy).index(each[0]))
    text = f"Xid {event.xid} on {event.gpu}: {_describe(event)}"
    if remedy is Remedy.NONE:
        return passed(f"{len(recent)} Xids caused by programs, the last: {text}")
    return warned(text, str(event.xid)) if remedy is Remedy.WATCH else failed(text, remedy, str(event.xid))


def _describe(event: XidEvent) -> str:
    """Return the driver's text without the process, or the meaning from the table if the text is empty."""
    return re.sub(r"^(pid=[^,]*,\s*|name=[^,]*,\s*)+", "", event.text) or meaning(event.xid)


def _of_gpu(seen: list[XidEvent], repeats: float, a100: bool) -> tuple[Remedy, XidEvent]:
    """Return the heaviest remedy and its event. If Xid 154 names an action, that action takes precedence."""
    counts = Counter(event.xid for event in seen)
    judged = [(remedy_for(event.xid, counts[event.xid], repeats, a100), event) for event in seen]
    plain = [each for each in judged if each[1].xid != SAYS_ITSELF] or judged
    remedy, event = max(plain, key=lambda each: list(Remedy).index(each[0]))
    named = [action for each in seen if (action := named_action(each)) is not None]
    return (named[-1] if named else remedy), event


XID = Check("xid", "errors logged by the NVIDIA driver", ask_xids, judge_xid, every_s=1, applies=has_gpus, lasts=False)
