"""The GPUs: from the telemetry on simulated nodes, else from NVML, else from nvidia-smi."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.errors import NotThere
from dalsegno.hardware import find_gpu
from dalsegno.health.facts import GpuFacts
from dalsegno.health.readers.simulated import ask_telemetry
from dalsegno.health.readers.smi import read_smi
from dalsegno.health.seen import Sample
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer

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


def has_gpus(world: World) -> bool:
    """Whether there should be some."""
    if world.expected.gpus is not None:
        return world.expected.gpus > 0 and _is_nvidias(world.expected.gpu_type)
    told = ask_telemetry(world)
    return bool(told.gpus) if told else gpus_on_bus(world) > 0


def may_have_gpus(world: World) -> bool:
    """Also where nobody says, and somebody should."""
    return has_gpus(world) or bool(world.expected.untold)


def _is_nvidias(gpu_type: str) -> bool:
    """One that the catalog does not know may be."""
    try:
        return find_gpu(gpu_type).product.startswith("NVIDIA") if gpu_type else True
    except NotThere:
        return True


def ask_gpus(world: World) -> tuple[GpuFacts, ...]:
    told = ask_telemetry(world)
    if told is not None and (told.gpus or not gpus_on_bus(world)):
        return told.gpus
    found = world.nvml()
    return read_smi(world) if found is None else found


def ask_gpu_count(world: World) -> GpuCount:
    if not has_gpus(world):
        raise NoAnswer(world.expected.untold)
    simulated = ask_telemetry(world) is not None
    return GpuCount(ask_gpus(world), world.expected.gpus, 0 if simulated else gpus_on_bus(world))


def ask_job_gpus(world: World) -> tuple[GpuFacts, ...]:
    """Before a job: only those that it gets, for others may be in use. Slurm tells a prolog which."""
    found = tuple(gpu for gpu in ask_gpus(world) if not _is_tried(world, gpu))
    if "SLURM_JOB_ID" not in world.env:
        return found
    mine = world.env.get("SLURM_JOB_GPUS", "").split(",")
    return tuple(gpu for gpu in found if str(gpu.index) in mine)


def _is_tried(world: World, gpu: GpuFacts) -> bool:
    """For seconds, by our own agent: another node proves itself with this one as its partner."""
    return bool(gpu.processes) and all(_is_our_agents(world, process.pid) for process in gpu.processes or ())


def _is_our_agents(world: World, pid: int) -> bool:
    try:
        words, status = world.read(f"/proc/{pid}/cmdline").split("\0"), world.read(f"/proc/{pid}/status")
    except NoAnswer:
        return False
    return "node-agent" in words[:4] and "\nUid:\t0\t" in status


def ask_heat(world: World) -> tuple[Heat, ...]:
    """Notes what it is now, and gives all that was noted."""
    now, found = world.now(), []
    for gpu in ask_gpus(world):
        if gpu.temperature_c is not None and gpu.slowdown_c is not None:
            samples = world.seen.heat_of(gpu.uuid or str(gpu.index))
            samples.append(Sample(now, gpu.temperature_c))
            found.append(Heat(gpu.index, gpu.slowdown_c, tuple(samples)))
    return tuple(found)


def gpus_on_bus(world: World) -> int:
    return sum(_is_gpu(world, f"{PCI}/{name}") for name in world.names(PCI))


def _is_gpu(world: World, device: str) -> bool:
    """What a device is does not change, and large nodes have hundreds of them: it is read once."""
    displays = world.seen.displays
    if device not in displays:
        is_nvidias = world.read(f"{device}/vendor").strip() == NVIDIA
        displays[device] = is_nvidias and world.read(f"{device}/class").startswith(DISPLAY_OR_3D)
    # One that is given to a virtual machine is not ours, as long as it is.
    return displays[device] and "DRIVER=vfio-pci" not in world.read(f"{device}/uevent").splitlines()
