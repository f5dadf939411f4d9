"""A training state as one value: this rank's part of each tensor, and all other values."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dalsegno.train.errors import CheckpointError
from dalsegno.train.nested import empty_out, fill_in


class Part(NamedTuple):
    """The part of a tensor that this rank holds: all of it, or its shard of a DTensor."""

    tensor: torch.Tensor
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    shared: bool
    writes: bool


def part_of(key: str, tensor: torch.Tensor) -> Part:
    if is_sharded(tensor):
        return _shard(tensor)
    if type(tensor).__name__ == "ShardedTensor":
        raise CheckpointError(
            f"{key} is a ShardedTensor (FSDP1), which is not supported",
            hint="use fully_shard (FSDP2), or FullyShardedDataParallel(use_orig_params=True) with a full state dict",
        )
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    size = tuple(whole.shape)
    return Part(whole, size, (0,) * len(size), shared=True, writes=True)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a DTensor of which this rank has only a part."""
    placements = getattr(tensor, "placements", ())
    return any(placement.is_shard() for placement in placements)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the layout of `like` whose part on this rank is `local`."""
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    mesh, placements = like.device_mesh, like.placements
    local = local.to(like.device)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _shard(tensor: torch.Tensor) -> Part:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = mesh.get_coordinate() or []
    first = all(at == 0 for at, placement in zip(place, placements) if placement.is_replicate())
    return Part(tensor.to_local(), tuple(tensor.shape), tuple(offsets), shared=False, writes=first)


Unpickle = Callable[[bytes], Any]


@dataclass(frozen=True)
class TensorPiece:
    """This rank's part of one tensor."""

    key: str  # name in PyTorch's distributed checkpoint, such as "model.layers.0.weight"
    tensor: torch.Tensor
    size: tuple[int, ...]  # size of the whole tensor
    offsets: tuple[int, ...]  # where this part begins in the whole tensor
    shared: bool  # whether all ranks hold the same part and divide the work of writing it
    writes: bool = True  # False if another rank writes the same part (hybrid sharding)


@dataclass(frozen=True)
class TrainingState:
    """Everything a run needs to resume from a step with identical results."""

    step: int  # the number of completed steps, which is also the number of the next step
    rank: int
    world: int
    pieces: tuple[TensorPiece, ...]
    shell: bytes  # pickled nested state dicts with a placeholder for each tensor; the same on all ranks
    own: bytes  # pickled state that only this rank has: random states and its position in the data
    values: Mapping[str, object]  # leaves of the shell other than tensors, by name, for torch's own loader


def take(
    nested: Mapping[str, Any], own: object, step: int, rank: int, world: int, apart: Container[str] = ()
) -> TrainingState:
    """Return the current state. No tensor is copied: the state refers to the script's own tensors.

    `apart` names the tensors that may differ between ranks. In a snapshot, each rank keeps its own; a checkpoint
    contains those of the first rank.
    """
    shell, tensors, values = empty_out(nested)
    pieces = tuple(_piece(key, tensor, rank, key in apart) for key, tensor in tensors.items())
    return TrainingState(step, rank, world, pieces, pickle.dumps(shell), pickle.dumps(own), values)


def rebuild_state(
    shell: bytes, tensors: Mapping[str, torch.Tensor], unpickle: Unpickle = pickle.loads
) -> dict[str, Any]:
    """Rebuild the nested state dicts, for `load_state_dict`."""
    nested: dict[str, Any] = fill_in(unpickle(shell), tensors)
    return nested


def _piece(key: str, tensor: torch.Tensor, rank: int, apart: bool) -> TensorPiece:
    part = part_of(key, tensor)
    if apart and part.shared:
        return TensorPiece(key, part.tensor.detach(), part.size, part.offsets, shared=False, writes=rank == 0)
    return TensorPiece(key, part.tensor.detach(), part.size, part.offsets, part.shared, part.writes)


# Objects of the script whose state is saved

_MAX_STATISTICS = 1 << 16  # an integer buffer with more elements is a lookup table, not statistics of batches
RESERVED = ("dalsegno",)


class LateState:
    """The state of objects that a framework creates only when its training starts.

    A state that is loaded earlier is kept until the framework gets it with `claim`.
    """

    def __init__(self, take: Callable[[], dict[str, Any]], optimizers: Callable[[], Iterable[Any]] = tuple) -> None:
        self._take = take
        self.optimizers = optimizers  # returns the optimizers whose state `take` returns
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self._take()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def claim(self) -> dict[str, Any] | None:
        """Return the loaded state and drop it; None if no state was loaded."""
        loaded, self._loaded = self._loaded, None
        return loaded


class Objects:
    """The objects to save, by the names that the script gave them."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = {name: unwrap(each) for name, each in named.items() if each is not None}
        for name, each in self._named.items():
            _check(name, each)

    def nested(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._named.items()}

    def apart(self) -> set[str]:
        """Return the names of buffers that may differ between ranks, such as batch norm statistics of a rank's batches.

        DDP makes the buffers equal, but only when the next step begins. Large integer tables are not included.
        """
        modules = {name: each for name, each in self._named.items() if isinstance(each, torch.nn.Module)}
        buffers = ((f"{name}.{key}", buffer) for name, each in modules.items() for key, buffer in each.named_buffers())
        return {key for key, buffer in buffers if buffer.is_floating_point() or buffer.numel() <= _MAX_STATISTICS}

    def steady(self) -> set[int]:
        """Return the addresses of the tensors that only optimizer steps change: parameters and optimizer states."""
        found: set[int] = set()
        late = [
            optimizer for each in self._named.values() if isinstance(each, LateState) for optimizer in each.optimizers()
        ]
        for each in (*self._named.values(), *late):
            if isinstance(each, torch.optim.Optimizer):
                parameters = [parameter for group in each.param_groups for parameter in group["params"]]
                states = [value for state in each.state.values() for value in state.values()]
                held = [value for value in (*parameters, *states) if isinstance(value, torch.Tensor)]
                found.update(local_part(tensor).data_ptr() for tensor in held)
        return found

    def layouts(self) -> dict[str, torch.Tensor]:
        """Return, by name, the sharded tensors of the objects, including the future states of optimizers.

        Loaded tensors get the layouts of these tensors.
        """
        found = {key: tensor for key, tensor in empty_out(self.nested())[1].items() if is_sharded(tensor)}
        for name, each in self._named.items():
            if isinstance(each, torch.optim.Optimizer):
                found.update(_layouts_of_states(name, each))
        return found

    def restore(self, shell: bytes, tensors: Mapping[str, torch.Tensor], unpickle: Unpickle = pickle.loads) -> None:
        """Load a saved state.

        The tensors may be views of a file. Modules, and torch's own optimizers on a GPU, copy the tensors that they
        load. Other objects get copies.
        """
        saved = rebuild_state(shell, _copied(tensors, self._copying()), unpickle)
        for name, each in self._named.items():
            if name not in saved:
                hint = "leave it out, start from scratch with --fresh, or use another folder"
                raise CheckpointError(f"the checkpoint has no `{name}`, only {', '.join(saved)}", hint=hint)
            try:
                each.load_state_dict(saved[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the checkpoint does not fit `{name}`: {error}",
                    hint="start from scratch with --fresh, or use another folder",
                ) from error
            if _moves(each):
                _detach_from_file(each)

    def _copying(self) -> tuple[str, ...]:
        """Return the prefixes of the tensors that are copied when their objects load them."""
        names = (name for name, each in self._named.items() if isinstance(each, torch.nn.Module) or _moves(each))
        return tuple(f"{name}." for name in names)


def _moves(thing: Any) -> bool:
    """Return whether the object itself copies a loaded state to a GPU. If so, it is given the state without a copy.

    torch's own optimizers copy all of it except the step counts. Other optimizers may keep the loaded tensors.
    """
    if not isinstance(thing, torch.optim.Optimizer) or not type(thing).__module__.startswith("torch.optim."):
        return False
    parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
    return bool(parameters) and all(parameter.device.type == "cuda" for parameter in parameters)


def _detach_from_file(optimizer: torch.optim.Optimizer) -> None:
    """Copy the loaded tensors that stayed in host memory, which may be views of a file."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                state[key] = value.clone()


def unwrap(thing: Any) -> Any:
    """Return the module inside DDP and torch.compile, so that a checkpoint can be loaded with and without them."""
    while True:
        if isinstance(thing, torch.nn.parallel.DistributedDataParallel):
            thing = thing.module
        elif isinstance(thing, torch.nn.Module) and hasattr(thing, "_orig_mod"):
            thing = thing._orig_mod
        else:
            return thing


def _check(name: str, thing: Any) -> None:
    if name in RESERVED or "." in name:
        raise CheckpointError(f"invalid object name `{name}`", hint="use another name, without a dot")
    if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
        raise CheckpointError(
            f"`{name}` ({type(thing).__name__}) has no state_dict and load_state_dict",
            hint="give it both, or leave it out",
        )


def _layouts_of_states(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the layouts of an optimizer's future states, which are sharded like its parameters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        if is_sharded(parameter):
            yield f"{name}.state.{number}.", parameter


def layout_for(key: str, size: tuple[int, ...], layouts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the script's sharded tensor whose layout a saved tensor gets; None if the tensor is not sharded."""
    found = layouts.get(key)
    if found is None:
        found = layouts.get(key.rpartition(".")[0] + ".")
    return found if found is not None and tuple(found.shape) == tuple(size) else None


def _copied(tensors: Mapping[str, torch.Tensor], copying: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {key: tensor if key.startswith(copying) else tensor.clone() for key, tensor in tensors.items()}
