"""The division of tensors: everything is written once, and every rank writes about the same number of bytes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

pytest.importorskip("torch")

from dalsegno.train.disk.write import MIN_ENTRY_BYTES, Shared, Slice, divide

MIB = 1 << 20


def bytes_of(share: list[Slice], tensors: list[Shared]) -> int:
    by_key = {tensor.key: tensor for tensor in tensors}
    return sum(_row_bytes(by_key[each.key], each.dim) * (each.stop - each.start) for each in share)


def _row_bytes(tensor: Shared, dim: int) -> int:
    return tensor.bytes // tensor.size[dim] if tensor.size and tensor.size[dim] else tensor.bytes


def test_dominant_tensor_is_divided() -> None:
    tensors = [Shared("big", (4096, 1024), 4), Shared("bias", (1024,), 4)]
    shares = divide(tensors, 4)
    assert all(abs(bytes_of(share, tensors) - 4 * MIB) <= MIN_ENTRY_BYTES for share in shares)


def test_small_tensors_are_not_divided_but_distributed() -> None:
    tensors = [Shared(f"w{number:03d}", (16, 16), 4) for number in range(400)]
    shares = divide(tensors, 4)
    assert [len(share) for share in shares] == [100] * 4
    assert all((each.start, each.stop) == (0, 16) for share in shares for each in share)


def test_leading_dimensions_of_size_one_are_skipped() -> None:
    (first, second) = divide([Shared("w", (1, 1, 1024, 1024), 4)], 2)
    assert first == [Slice("w", 2, 0, 512)] and second == [Slice("w", 2, 512, 1024)]


def test_scalars_and_empty_tensors_are_assigned() -> None:
    tensors = [Shared("step", (), 8), Shared("none", (0, 7), 4), Shared("also", (7, 0), 4)]
    assert sorted(each.key for share in divide(tensors, 3) for each in share) == ["also", "none", "step"]
    assert [each.key for share in divide([Shared("none", (0,), 4)], 3) for each in share] == ["none"]


def test_more_ranks_than_rows_are_handled() -> None:
    shares = divide([Shared("w", (2, MIB), 4)], 8)
    assert sorted((each.start, each.stop) for share in shares for each in share) == [(0, 1), (1, 2)]


SIZES = some.lists(some.integers(0, 400), max_size=3).map(tuple)
TENSORS = some.lists(some.tuples(SIZES, some.sampled_from([1, 2, 4, 8, 16])), max_size=12).map(
    lambda rows: [Shared(f"t{number}", size, itemsize) for number, (size, itemsize) in enumerate(rows)]
)


@given(TENSORS, some.integers(1, 9), some.randoms())
def test_every_row_is_written_once_in_any_order_of_tensors(
    tensors: list[Shared], world: int, chance: random.Random
) -> None:
    shares = divide(tensors, world)
    shuffled = list(tensors)
    chance.shuffle(shuffled)
    assert divide(shuffled, world) == shares
    for tensor in tensors:
        mine = sorted(each for share in shares for each in share if each.key == tensor.key)
        rows = tensor.size[mine[0].dim] if tensor.size else 1
        assert [each.start for each in mine] == [0, *(each.stop for each in mine[:-1])] and mine[-1].stop == rows


@given(TENSORS, some.integers(1, 9))
def test_shares_differ_by_at_most_a_row_or_the_smallest_entry_at_each_end(tensors: list[Shared], world: int) -> None:
    total = sum(tensor.bytes for tensor in tensors)
    row = max((tensor.bytes // next((rows for rows in tensor.size if rows > 1), 1) for tensor in tensors), default=0)
    most = max(bytes_of(share, tensors) for share in divide(tensors, world))
    assert most <= total / world + 2 * max(MIN_ENTRY_BYTES, row)
