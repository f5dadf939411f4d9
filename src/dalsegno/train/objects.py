"""The objects a script wants to have saved: their state dicts by name, and how a saved state goes back into them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dalsegno.train.errors import CheckpointError
from dalsegno.train.nested import empty_out
from dalsegno.train.shards import is_sharded, local_part
from dalsegno.train.state import Unpickle, put_together

_FEW = 1 << 16  # elements
RESERVED = ("dalsegno",)


class Objects:
    """By the names the script gave them."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = {name: unwrapped(each) for name, each in named.items() if each is not None}
        for name, each in self._named.items():
            _check(name, each)

    def nested(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._named.items()}

    def apart(self) -> set[str]:
        """The names of what ranks see differently: a batch norm's statistics are of each rank's own batches.

        DDP gives all ranks those of the first one when the next step begins. Large tables of numbers are no statistics.
        """
        modules = {name: each for name, each in self._named.items() if isinstance(each, torch.nn.Module)}
        buffers = ((f"{name}.{key}", buffer) for name, each in modules.items() for key, buffer in each.named_buffers())
        return {key for key, buffer in buffers if buffer.is_floating_point() or buffer.numel() <= _FEW}

    def steady(self) -> set[int]:
        """The addresses of what only an optimizer's step changes: its parameters, and its states."""
        found: set[int] = set()
        for each in self._named.values():
            if isinstance(each, torch.optim.Optimizer):
                parameters = [parameter for group in each.param_groups for parameter in group["params"]]
                states = [value for state in each.state.values() for value in state.values()]
                held = [value for value in (*parameters, *states) if isinstance(value, torch.Tensor)]
                found.update(local_part(tensor).data_ptr() for tensor in held)
        return found

    def layouts(self) -> dict[str, torch.Tensor]:
        """The sharded tensors there are or will be, by name: they tell how a saved one has to be cut."""
        found = {key: tensor for key, tensor in empty_out(self.nested())[1].items() if is_sharded(tensor)}
        for name, each in self._named.items():
            if isinstance(each, torch.optim.Optimizer):
                found.update(_layouts_of_states(name, each))
        return found

    def give(self, shell: bytes, tensors: Mapping[str, torch.Tensor], unpickle: Unpickle = pickle.loads) -> None:
        """Put a saved state back. The tensors may be views of a file: only modules, which copy, get those."""
        saved = put_together(shell, _copied(tensors, self._copying()), unpickle)
        for name, each in self._named.items():
            if name not in saved:
                hint = "leave it out, start anew with --fresh, or give this training a folder of its own"
                raise CheckpointError(f"the checkpoint holds no `{name}`, only {', '.join(saved)}", hint=hint)
            try:
                each.load_state_dict(saved[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"the checkpoint does not fit `{name}`: {error}",
                    hint="start anew with --fresh, or give this training a folder of its own",
                ) from error

    def _copying(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name, each in self._named.items() if isinstance(each, torch.nn.Module))


def unwrapped(thing: Any) -> Any:
    """What DDP and torch.compile have wrapped: a checkpoint then fits with and without them."""
    while True:
        if isinstance(thing, torch.nn.parallel.DistributedDataParallel):
            thing = thing.module
        elif isinstance(thing, torch.nn.Module) and hasattr(thing, "_orig_mod"):
            thing = thing._orig_mod
        else:
            return thing


def _check(name: str, thing: Any) -> None:
    if name in RESERVED or "." in name:
        raise CheckpointError(f"an object cannot be called `{name}`", hint="any other name without a dot will do")
    if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
        raise CheckpointError(
            f"`{name}` ({type(thing).__name__}) has no state_dict and load_state_dict",
            hint="give it both, or leave it out",
        )


def _layouts_of_states(name: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """An optimizer has no state before its first step; what it will have is cut as its parameters are."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in enumerate(parameters):
        if is_sharded(parameter):
            yield f"{name}.state.{number}.", parameter


def layout_for(key: str, size: tuple[int, ...], layouts: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The living sharded tensor by which a saved one is cut, if it is cut at all."""
    found = layouts.get(key)
    if found is None:
        found = layouts.get(key.rpartition(".")[0] + ".")
    return found if found is not None and tuple(found.shape) == tuple(size) else None


def _copied(tensors: Mapping[str, torch.Tensor], copying: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {key: tensor if key.startswith(copying) else tensor.clone() for key, tensor in tensors.items()}
