"""What connects the GPUs, and what watches over them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.health.check import QUIET, Check
from dalsegno.health.checks.telling import telling, which
from dalsegno.health.facts import GpuFacts
from dalsegno.health.links import nvlinks_of
from dalsegno.health.readers.gpus import ask_gpus, has_gpus
from dalsegno.health.readers.simulated import ask_telemetry
from dalsegno.health.result import Remedy, Result, failed, passed, warned
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer

_SLOT = re.compile(r"PCIe?\b|\bNVL\b", re.IGNORECASE)  # "NVIDIA H100 PCIe", "NVIDIA H100 NVL"
SWITCHED_FROM = 8  # so many GPUs with NVLink are joined by switches, which need the fabric manager


@dataclass(frozen=True)
class Links:
    gpus: tuple[GpuFacts, ...]
    each: int  # that a GPU of this type has; 0: not known


def has_links(world: World) -> bool:
    return has_gpus(world) and (world.expected.gpus or 2) > 1 and _links_each(world) > 0


def is_switched(world: World) -> bool:
    return has_links(world) and (world.expected.gpus or 0) >= SWITCHED_FROM


def ask_links(world: World) -> Links:
    return Links(ask_gpus(world), _links_each(world))


def _links_each(world: World) -> int:
    """By the type in Slurm's file. Without one, or for a card in a PCIe slot, whose bridges vary: by what its
    neighbours have."""
    gpus = ask_gpus(world)
    if world.expected.gpu_type and not any(_SLOT.search(gpu.model) for gpu in gpus):
        return nvlinks_of(world.expected.gpu_type)
    return max((gpu.nvlinks or 0 for gpu in gpus), default=0)


def ask_fabric_manager(world: World) -> str:
    told = ask_telemetry(world)
    if told is not None:
        return told.fabric_manager
    said = world.run(("systemctl", "is-active", "nvidia-fabricmanager"))
    if not said.stdout.strip():
        raise NoAnswer(f"systemctl does not tell: {(said.stderr.strip() or 'it says nothing').splitlines()[0]}")
    return said.stdout.strip()


def ask_dcgm(world: World) -> str:
    return world.run(("dcgmi", "health", "-g", "0", "-c", "-j")).stdout


def judge_nvlink(links: Links, *, errors: float = 0) -> Result:
    told = telling(links.gpus, "nvlinks", "of its NVLinks")
    if down := [gpu for gpu in told if (gpu.nvlinks or 0) < links.each]:
        return failed(f"{down[0].nvlinks} of {links.each} NVLinks are up on {which(down)}", Remedy.RESET, "down")
    if bad := [gpu for gpu in told if (gpu.nvlink_errors or 0) > errors]:
        return failed(f"{bad[0].nvlink_errors} NVLink errors on {which(bad)}", Remedy.RESET, "errors")
    return passed(f"all NVLinks of {len(told)} GPUs are up")


def judge_pcie(gpus: Sequence[GpuFacts], *, lanes: float = 16) -> Result:
    told = telling(gpus, "pcie_width", "its PCIe width")
    bad = [gpu for gpu in told if (gpu.pcie_width or 0) < min(lanes, gpu.pcie_max_width or lanes)]
    if bad:
        return failed(f"{which(bad)} has {bad[0].pcie_width} of {lanes:g} PCIe lanes", Remedy.REPLACE)
    return passed("all PCIe lanes are in use")


def judge_fabric_manager(state: str) -> Result:
    if state == "active":
        return passed("the fabric manager runs")
    if state in ("inactive", "failed", "deactivating", "activating", "reloading"):
        return failed(f"nvidia-fabricmanager is {state}: GPUs cannot reach each other", Remedy.REBOOT)
    raise ValueError(f"systemctl says {state!r}")


def judge_dcgm(text: str) -> Result:
    health = json.loads(text)["body"]["Overall Health"]["value"]
    if health == "Healthy":
        return passed("DCGM has no complaint")
    if health == "Warning":
        return warned("DCGM warns: see `dcgmi health -g 0 -c`")
    if health == "Failure":
        return failed("DCGM reports a failure: see `dcgmi health -g 0 -c`", Remedy.RESET)
    raise ValueError(f"DCGM says {health!r}")


GPU_LINK_CHECKS = (
    Check("nvlink", "all NVLinks are up, without errors", ask_links, judge_nvlink, every_s=5, applies=has_links),
    Check("pcie-width", "each GPU has all its lanes", ask_gpus, judge_pcie, every_s=30, applies=has_gpus),
    Check(
        "fabric-manager", "NVIDIA's, which joins the GPUs", ask_fabric_manager, judge_fabric_manager, every_s=30,
        applies=is_switched, settle_s=10,
    ),
    Check(
        "dcgm", "what DCGM says, where it is", ask_dcgm, judge_dcgm, QUIET, 300,
        applies=lambda world: has_gpus(world) and world.has("dcgmi"),
    ),
)  # fmt: skip
