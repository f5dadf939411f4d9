"""States for tests, and their bit-by-bit comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from dalsegno.train.state import TensorPiece, TrainingState

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def piece(key: str, tensor: Any, shared: bool = False, writes: bool = True) -> TensorPiece:
    return TensorPiece(key, tensor, tuple(tensor.shape), (0,) * tensor.dim(), shared, writes)


def state(step: int, *pieces: TensorPiece, rank: int = 0, world: int = 1) -> TrainingState:
    return TrainingState(
        step, rank, world, pieces, shell=b"shell", own=b"own %d" % rank, values={"lr": 0.1, "step": step}
    )


def filled(step: int, count: int = 8, elements: int = 1000, rank: int = 0, world: int = 1) -> TrainingState:
    """Return a state in which every element is the step, so that a mix of two steps is detected."""
    pieces = [piece(f"w{n}", torch.full((elements,), step, dtype=torch.int32), shared=n % 2 == 0) for n in range(count)]
    return state(step, *pieces, rank=rank, world=world)


def same(one: TrainingState, other: TrainingState) -> bool:
    alike = replace(one, pieces=()) == replace(other, pieces=()) and len(one.pieces) == len(other.pieces)
    return alike and all(map(_same_piece, one.pieces, other.pieces))


def _same_piece(one: TensorPiece, other: TensorPiece) -> bool:
    a, b = one.tensor, other.tensor
    alike = replace(one, tensor=None) == replace(other, tensor=None) and (a.dtype, a.shape) == (b.dtype, b.shape)
    return bool(alike and torch.equal(_raw(a), _raw(b)))


def _raw(tensor: Any) -> Any:
    """Return the bytes of a tensor: two NaN are equal, 0.0 and -0.0 are not."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten()).view(torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Generate tensors: scalars, empty ones, any dtype, and non-contiguous ones."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = torch.Size(shape).numel()
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    whole = flat.view(shape)
    how = draw(st.sampled_from(["plain", "turned", "every second"]))
    if how == "turned" and whole.dim() >= 2:
        return whole.transpose(0, 1)
    return whole[::2] if how == "every second" and whole.dim() else whole


states = st.builds(
    lambda step, parts, shell, own, rank: TrainingState(
        step,
        rank,
        8,
        tuple(piece(f"é.{n}", tensor, shared, writes) for n, (tensor, shared, writes) in enumerate(parts)),
        shell,
        own,
        {"n": step},
    ),
    st.integers(0, 2**60),
    st.lists(st.tuples(tensors(), st.booleans(), st.booleans()), max_size=6),
    st.binary(max_size=200),
    st.binary(max_size=200),
    st.integers(0, 7),
)
