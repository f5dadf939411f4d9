"""The GPU memory that training a transformer needs, for each way to spread the model over GPUs. Pure.

Per parameter, training with bfloat16 and Adam keeps 2 bytes of weights, 2 of gradients, and 12 of optimizer state (a
float32 copy of the weights and two moments). Activations follow Korthikanti et al. (arXiv 2205.05198) with
attention that does not store the score matrix: 34·s·b·h bytes per layer, or 2·s·b·h with full recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

WEIGHTS, GRADIENTS, OPTIMIZER = 2, 2, 12  # bytes per parameter
STATE = WEIGHTS + OPTIMIZER  # bytes per parameter in a checkpoint
KEPT, RECOMPUTED = 34, 2  # bytes of activations per layer, token and hidden unit
USABLE_SHARE = 0.92  # usable share of a GPU's memory; CUDA, NCCL's buffers and fragmentation take the rest
GIB = 1 << 30


class MemoryFit(str, Enum):
    """The verdicts on a model: whether it fits into the memory of a GPU."""

    YES = "yes"
    RECOMPUTE = "with recomputation"
    NO = "no"


@dataclass(frozen=True)
class ModelShape:
    """A transformer: its parameters, layers and hidden size, and the sequence length and micro-batch of a GPU."""

    params: float
    layers: int
    hidden: int
    sequence: int = 8192
    micro_batch: int = 1

    def activations(self, bytes_each: int) -> float:
        """Return the bytes of the activations of all layers."""
        return float(bytes_each) * self.sequence * self.micro_batch * self.hidden * self.layers


def shape_of(params: float, layers: int | None, hidden: int | None, sequence: int, micro_batch: int) -> ModelShape:
    """Return the shape of a model.

    Missing values are those of a common model: 12 x layers x hidden^2 parameters, with a hidden size of 128 per layer.
    """
    if layers is None:
        layers = round(params / 12 / hidden**2) if hidden else round((params / 12 / 128**2) ** (1 / 3))
    layers = max(1, layers)
    hidden = hidden or max(64, round((params / 12 / layers) ** 0.5 / 64) * 64)
    return ModelShape(params, layers, hidden, sequence, micro_batch)


@dataclass(frozen=True)
class MemoryChoice:
    """One way to spread the model over GPUs, and the bytes of memory that each GPU then needs."""

    name: str
    state: float  # weights, gradients and optimizer state
    kept: float  # activations, if they are kept
    recomputed: float  # activations, if they are computed again in the backward pass
    limit: float

    @property
    def fit(self) -> MemoryFit:
        if self.state + self.kept <= self.limit:
            return MemoryFit.YES
        return MemoryFit.RECOMPUTE if self.state + self.recomputed <= self.limit else MemoryFit.NO

    def to_dict(self) -> dict[str, object]:
        """Return the choice for `--json`, in GiB."""
        sizes = {"state": self.state, "activations": self.kept, "activations_recomputed": self.recomputed}
        rounded = {f"{key}_gib": round(size / GIB, 1) for key, size in sizes.items()}
        return {"name": self.name, **rounded, "fits": self.fit.value}


def memory_choices(shape: ModelShape, gpus: int, gpus_per_node: int, gpu_memory_gib: float) -> list[MemoryChoice]:
    """Return the ways to spread the model over a number of GPUs, the simplest first."""
    return list(_choices(shape, gpus, gpus_per_node, USABLE_SHARE * gpu_memory_gib * GIB))


def _choices(shape: ModelShape, gpus: int, gpus_per_node: int, limit: float) -> Iterator[MemoryChoice]:
    p, layer = shape.params, shape.params / shape.layers
    kept = shape.activations(KEPT)
    # With recomputation, the activations of one layer exist in full while its gradients are computed.
    again = shape.activations(RECOMPUTED) + kept / shape.layers
    fixed = WEIGHTS + GRADIENTS
    yield MemoryChoice("DDP", (fixed + OPTIMIZER) * p, kept, again, limit)
    if gpus > 1:
        yield MemoryChoice("ZeRO-1", fixed * p + OPTIMIZER * p / gpus, kept, again, limit)
        yield MemoryChoice("ZeRO-2", WEIGHTS * p + (GRADIENTS + OPTIMIZER) * p / gpus, kept, again, limit)
        gathered = 2 * WEIGHTS * layer  # the current layer and the next one
        yield MemoryChoice("FSDP (ZeRO-3)", (fixed + OPTIMIZER) * p / gpus + gathered, kept, again, limit)
    if gpus_per_node > 1:
        yield from _tensor_and_pipeline(shape, gpus, gpus_per_node, limit)


def _tensor_and_pipeline(shape: ModelShape, gpus: int, tensor: int, limit: float) -> Iterator[MemoryChoice]:
    """Yield tensor parallelism in a node. If that does not fit without recomputation, yield it also with the fewest
    pipeline stages that fit.

    A pipeline does not reduce activations: its first stage keeps one micro-batch per stage. The optimizer state is
    spread over the replicas (ZeRO-1), the activations over the GPUs of a node (sequence parallelism).
    """
    stages = [1]
    while stages[-1] * 2 * tensor <= gpus and stages[-1] * 2 <= shape.layers:
        stages.append(stages[-1] * 2)
    choices = [_pipeline(shape, gpus, tensor, count, limit) for count in stages]
    yield choices[0]
    if choices[0].fit is not MemoryFit.YES and len(choices) > 1:
        fitting = (choice for choice in choices[1:] if choice.fit is not MemoryFit.NO)
        yield next(fitting, choices[-1])


def _pipeline(shape: ModelShape, gpus: int, tensor: int, stages: int, limit: float) -> MemoryChoice:
    part = shape.params / (tensor * stages)
    replicas = max(1, gpus // (tensor * stages))
    kept = shape.activations(KEPT) / tensor
    again = shape.activations(RECOMPUTED) / tensor + kept / shape.layers
    name = f"TP {tensor}" + (f" x PP {stages}" if stages > 1 else "") + (" + ZeRO-1" if replicas > 1 else "")
    return MemoryChoice(name, (WEIGHTS + GRADIENTS) * part + OPTIMIZER * part / replicas, kept, again, limit)
