"""Detect silent data corruption: other ranks repeat a rank's forward and backward pass, and the gradients are compared.

In a check, every rank computes the gradients of its own batch. It then repeats the step of another rank, with that
rank's batch and random states. If the run has several nodes, the other rank is on another node. The gradients must be
identical to the last bit. If they are not, a third rank repeats the step, and the majority decides which rank is wrong.
With two ranks, no majority is possible. The check does not change the training: gradients, random states and buffers
are restored.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, NoReturn

import torch

from dalsegno.train.agent import AgentLink
from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import find_folder, flip_name, open_own
from dalsegno.train.rank_state import restore_randomness, take_randomness
from dalsegno.train.ranks import RankPlace, RankStore
from dalsegno.train.state import is_sharded, unwrap

Backward = Callable[[Any, Any], object]  # computes gradients: `backward(module, batch)`

# Digests of gradients


_CHUNK = 1 << 22  # number of elements per pass, which limits the memory that a digest needs
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = 0x5BD1E995_9E3779B1, 0x2545F491_4F6CDD1D  # odd, so that a changed bit always changes the first sum


def digest_tensors(tensors: Iterable[torch.Tensor | None]) -> str:
    """Return a digest of the exact bits of tensors, in their order; None stands for a missing gradient.

    A digest consists of sums of integers, which do not depend on the order of additions. They are computed on the
    tensors' device. A GPU needs milliseconds, and no tensor is copied to the host.
    """
    total = hashlib.sha256()
    for tensor in tensors:
        shape = None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))
        total.update(repr((shape, None if tensor is None else _sums(tensor))).encode())
    return total.hexdigest()


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    whole = tensor.detach()
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    bits = whole.contiguous().reshape(-1).view(_INTEGERS[whole.element_size()])
    first = second = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        weighted = (part + 1) * (places * 2 + _FIRST)
        first = first + weighted.sum()
        second = second + ((weighted ^ (weighted >> 29)) * _SECOND).sum()
    return int(first), int(second)


# The ranks that repeat a step, and the decision about which rank is wrong


def witness_shifts(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return the offsets from a rank to its witnesses, the ranks that repeat its step.

    `nodes` has the node of every rank. All ranks must get the same offsets, or the exchange between them hangs.

    The witnesses are on the next two nodes. With two nodes, the second witness is the next rank. With one node, or if
    the ranks are unevenly spread over nodes, the witnesses are the next two ranks. With two ranks, there is no second
    witness. A single rank repeats its own step.
    """
    world, local_world = len(nodes), nodes.count(nodes[0])
    if world == 1:
        return (0,)
    even = list(nodes) == [node for node in dict.fromkeys(nodes) for _ in range(local_world)]
    first = local_world if even and local_world < world else 1
    second = 2 * first % world or 1
    return (first,) if second == first else (first, second)


@dataclass(frozen=True)
class GradientVerdict:
    """The ranks whose gradients differ from those of a witness. `wrong` is empty if no majority could decide."""

    step: int
    differing: tuple[int, ...]  # ranks for whose step a witness got a different result
    wrong: tuple[int, ...] = ()
    node: str = ""  # the node of the wrong ranks
    text: str = ""

    def message(self, generation: int) -> dict[str, Any]:
        """Return the message that reports the verdict to the agent."""
        return {
            "corruption": {"step": self.step, "ranks": list(self.wrong), "node": self.node, "text": self.text},
            "generation": generation,
        }


def find_differing(own: Sequence[str], first: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks whose own digest differs from that of their first witness.

    Index i of both lists belongs to the step of rank i.
    """
    return tuple(rank for rank, (mine, other) in enumerate(zip(own, first)) if mine != other)


def judge_gradients(
    step: int, nodes: Sequence[str], own: Sequence[str], repeated: Mapping[int, Sequence[str]]
) -> GradientVerdict:
    """Return which ranks computed wrong gradients.

    `repeated` maps the offset of a witness to the witnesses' digests. Index i of a list belongs to the step of rank i.
    Ranks are declared wrong only if every vote has a majority, and all outvoted ranks are on one node. If outvoted
    ranks are on several nodes, the script is probably not repeatable.
    """
    differing = find_differing(own, next(iter(repeated.values())))
    votes = [_votes(rank, own, repeated) for rank in differing]
    odd = [_odd_one(each) for each in votes]
    wrong = tuple(sorted({rank for rank in odd if rank is not None}))
    wrong_nodes = {nodes[rank] for rank in wrong}
    if None in odd or len(wrong_nodes) != 1:
        return GradientVerdict(step, differing, text=_undecided(step, differing, nodes, len(repeated) > 1))
    bad = [(rank, value[:8]) for rank, value in votes[0].items() if rank in wrong]
    right = [(rank, value[:8]) for rank, value in votes[0].items() if rank not in wrong]
    against = " and ".join(f"{rank} on {nodes[rank]}" for rank, _ in right)
    node = wrong_nodes.pop()
    text = f"wrong gradients in step {step}: rank {bad[0][0]} got {bad[0][1]}, ranks {against} got {right[0][1]}"
    return GradientVerdict(step, differing, wrong, node, text)


def _votes(rank: int, own: Sequence[str], repeated: Mapping[int, Sequence[str]]) -> dict[int, str]:
    return {rank: own[rank], **{(rank + by) % len(own): values[rank] for by, values in repeated.items()}}


def _odd_one(votes: Mapping[int, str]) -> int | None:
    """Return the one rank of three whose digest differs from the other two; None if there is no such rank."""
    if len(votes) < 3:
        return None
    alone = [rank for rank, value in votes.items() if list(votes.values()).count(value) == 1]
    return alone[0] if len(alone) == 1 else None


def _undecided(step: int, differing: Sequence[int], nodes: Sequence[str], had_third: bool) -> str:
    ranks = ", ".join(f"{rank} on {nodes[rank]}" for rank in differing[:4])
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    why = (
        "several nodes differ; is the step repeatable (torch.use_deterministic_algorithms)?"
        if had_third
        else "three ranks are needed to tell which one is wrong"
    )
    return f"step {step} gave other gradients when it was repeated, for rank {ranks}{more}; {why}"


# Exchange between ranks


class RankExchange:
    """Moves bytes between all ranks of the process group. All ranks must call the same methods in the same order."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def shift(self, data: bytes, by: int) -> bytes:
        """Send the bytes to the rank `by` places after this one, and return those from the rank `by` places before."""
        if by % self._world == 0:
            return data
        group, device = torch.distributed, self._device()
        sizes = [int(each) for each in self.gather(torch.tensor([len(data)], device=device))]
        received = torch.empty(sizes[(self._rank - by) % self._world], dtype=torch.uint8, device=device)
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        after, before = (self._rank + by) % self._world, (self._rank - by) % self._world
        moves = [group.P2POp(group.isend, sent, after), group.P2POp(group.irecv, received, before)]
        for move in group.batch_isend_irecv(moves):
            move.wait()
        return bytes(received.cpu().numpy())

    def gather_digests(self, digest: str) -> list[str]:
        """Return the digests of all ranks."""
        own = torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8).to(self._device())
        return [bytes(each.cpu().tolist()).hex() for each in self.gather(own)]

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        if self._world == 1:
            return [own]
        every = [torch.empty_like(own) for _ in range(self._world)]
        torch.distributed.all_gather(every, own)
        return every

    def _device(self) -> torch.device:
        nccl = self._world > 1 and torch.distributed.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def pack_step(batch: Any, module: torch.nn.Module) -> bytes:
    """Return everything that another rank needs to repeat this rank's step: batch, random states and small buffers."""
    states = take_randomness()
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (str(kind), [int(key) for key in keys], *rest)
    packed = io.BytesIO()
    torch.save({"batch": batch, "random": states, "buffers": dict(_small_buffers(module))}, packed)
    return packed.getvalue()


def unpack_step(data: bytes) -> dict[str, Any]:
    """Unpack another rank's step. Put its GPU tensors on this rank's GPU, and run no code from the pickle."""

    def place(storage: Any, location: str) -> Any:
        return storage.cuda() if location.startswith("cuda") else storage

    try:
        step: dict[str, Any] = torch.load(io.BytesIO(data), map_location=place, weights_only=True)
    except Exception as error:  # unpickling can raise many exception types
        raise CheckpointError(
            f"verify() cannot send this batch to another rank: {str(error).splitlines()[0]}",
            hint="pass a batch of tensors, numbers and text, in lists, tuples and dicts",
        ) from None
    return step


_MAX_BUFFER = 1 << 16  # maximum number of elements; a larger buffer is taken for a table that is equal on all ranks


def _small_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, buffer) for name, buffer in module.named_buffers() if buffer.numel() <= _MAX_BUFFER)


# An injected fault


class InjectedFlip:
    """Flips one bit of this rank's gradients while a certain file exists in the user's shared-memory folder.

    `dalsegno inject bit-flip` creates the file. As with a faulty GPU, the flip affects every backward pass, including
    those of the training.
    """

    def __init__(self, run: str, rank: int) -> None:
        self._run, self._rank = run, rank
        self._hook: Any = None

    def update(self, module: torch.nn.Module) -> None:
        asked = self._is_asked()
        if asked and self._hook is None:
            self._hook = next(each for each in module.parameters() if each.requires_grad).register_hook(flip_bit)
        elif not asked and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _is_asked(self) -> bool:
        folder = find_folder()
        fd = open_own(folder / flip_name(self._run, self._rank)) if folder else None
        if fd is not None:
            os.close(fd)
        return fd is not None


def flip_bit(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy in which the highest bit of the mantissa of the first element is flipped."""
    flipped = gradient.detach().clone().contiguous()
    bit = {2: 6 if gradient.dtype is torch.bfloat16 else 9, 4: 22, 8: 51}.get(gradient.element_size(), 0)
    flipped.view(-1).view(_INTEGERS[gradient.element_size()])[0] ^= 1 << bit
    return flipped


# The check


KILLED_S = 60.0  # how long to wait for the launcher, which normally ends this process within a second of the report


class GradientCheck:
    """The checks of one rank. `every` is the number of steps between two checks; 0 means no checks."""

    def __init__(self, every: int, where: RankPlace, store: RankStore, agent: AgentLink | None) -> None:
        self.every, self._where, self._store, self._agent = every, where, store, agent
        self._exchange = RankExchange(where.rank, where.world)
        self._flip = InjectedFlip(where.run, where.rank)
        self._nodes: list[str] = []
        self.seconds = 0.0  # how long the last check took

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def run(self, step: int, model: Any, batch: Any, backward: Backward) -> GradientVerdict | None:
        """Check this step if it is due.

        Return None if no check is due or all ranks agree. If the ranks differ but no majority could decide, return the
        verdict. If a rank was found to be wrong, raise CheckpointError, unless the launcher ends this process first.
        """
        if not self.every:
            return None
        module = unwrap(model)
        self._flip.update(module)
        if not self.is_due(step):
            return None
        _check_repeatable(module)
        self._nodes = self._nodes or self._store.gather("nodes", _node_name())
        began = time.monotonic()
        with _undisturbed(module):
            verdict = self._compare(step, module, batch, backward)
        self.seconds = time.monotonic() - began
        if verdict is None:
            if self._where.rank == 0 and self._agent is not None:
                self._agent.send({"verified": step, "generation": self._where.generation})
            return None
        self._report(verdict)
        return verdict

    def _compare(self, step: int, module: Any, batch: Any, backward: Backward) -> GradientVerdict | None:
        mine = pack_step(batch, module)
        own = self._exchange.gather_digests(_gradients(module, batch, backward))
        first, *others = witness_shifts(self._nodes)
        repeated = {first: self._repeat(mine, first, module, backward)}
        if not find_differing(own, repeated[first]):
            return None
        for by in others:
            repeated[by] = self._repeat(mine, by, module, backward)
        return judge_gradients(step, self._nodes, own, repeated)

    def _repeat(self, mine: bytes, by: int, module: Any, backward: Backward) -> list[str]:
        """Repeat the step of the rank `by` places before this one.

        Return the digests that all ranks got. Index i belongs to the step of rank i.
        """
        other = unpack_step(self._exchange.shift(mine, by))
        _restore_step(other, module)
        digests = self._exchange.gather_digests(_gradients(module, other["batch"], backward))
        return [digests[(rank + by) % len(digests)] for rank in range(len(digests))]

    def _report(self, verdict: GradientVerdict) -> None:
        """Report the verdict to the agent, from the first rank on a node without wrong ranks, or else from rank 0.

        If a rank is wrong, training must not continue. The launcher then ends this process. If it does not, or if there
        is no launcher, raise CheckpointError.
        """
        reporter = next((rank for rank, node in enumerate(self._nodes) if node != verdict.node), 0)
        if self._agent is not None and self._where.rank == reporter:
            self._agent.send(verdict.message(self._where.generation))
        if verdict.wrong:
            if self._agent is not None:
                time.sleep(KILLED_S)
            _fail(verdict)


def _fail(verdict: GradientVerdict) -> NoReturn:
    raise CheckpointError(
        f"{verdict.node}: {verdict.text}", hint="leave out this node, and resume from a checkpoint before that step"
    )


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _check_repeatable(module: torch.nn.Module) -> None:
    if any(is_sharded(parameter) for parameter in module.parameters()):
        raise CheckpointError(
            "verify() cannot repeat a step of a sharded model: no rank has all of its parameters",
            hint="use --verify-every with DDP, or leave it out",
        )


def _gradients(module: torch.nn.Module, batch: Any, backward: Backward) -> str:
    """Compute the gradients of a batch and return their digest."""
    for parameter in module.parameters():
        parameter.grad = None
    backward(module, batch)
    return digest_tensors(parameter.grad for parameter in module.parameters() if parameter.requires_grad)


def _restore_step(step: Mapping[str, Any], module: torch.nn.Module) -> None:
    states = dict(step["random"])
    if "numpy" in states and "numpy" not in sys.modules:
        del states["numpy"]
    restore_randomness(states)
    with torch.no_grad():
        for name, buffer in _small_buffers(module):
            if name in step["buffers"]:
                buffer.copy_(step["buffers"][name])


@contextlib.contextmanager
def _undisturbed(module: torch.nn.Module) -> Iterator[None]:
    """Restore gradients, random states and buffers when the block ends."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    states, buffers = take_randomness(), [(buffer, buffer.clone()) for _, buffer in _small_buffers(module)]
    try:
        yield
    finally:
        restore_randomness(states)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
