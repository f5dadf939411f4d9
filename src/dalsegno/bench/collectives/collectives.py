"""The collectives of nccl-tests: their flags, sizes, bandwidth factors and test data. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from typing import Any

from dalsegno.bench.nccl.table import NcclSettings, NcclTest
from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean


@dataclass(frozen=True)
class CollectiveTest:
    """A test of nccl-tests and the way it moves data.

    If `split` is set, the message size is the sum of all ranks' parts. `in_place_checked` says whether nccl-tests check
    the data of the in-place rows too.
    """

    test: NcclTest
    split: bool = False
    reduces: bool = False
    rooted: bool = False
    in_place_checked: bool = True

    @property
    def name(self) -> str:
        return self.test.value


TESTS = {
    each.name: each
    for each in (
        CollectiveTest(NcclTest.ALL_REDUCE, reduces=True),
        CollectiveTest(NcclTest.ALL_GATHER, split=True),
        CollectiveTest(NcclTest.REDUCE_SCATTER, split=True, reduces=True),
        CollectiveTest(NcclTest.BROADCAST, rooted=True),
        CollectiveTest(NcclTest.REDUCE, reduces=True, rooted=True),
        CollectiveTest(NcclTest.ALLTOALL, split=True, in_place_checked=False),
        CollectiveTest(NcclTest.SCATTER, split=True, rooted=True),
        CollectiveTest(NcclTest.GATHER, split=True, rooted=True),
        CollectiveTest(NcclTest.SENDRECV, in_place_checked=False),
    )
}


@dataclass(frozen=True)
class DataType:
    """A data type of nccl-tests. It represents all integers up to `exact` exactly."""

    name: str
    size: int
    torch: str
    exact: int


DATA_TYPES = {
    each.name: each
    for each in (
        DataType("int8", 1, "int8", 127),
        DataType("uint8", 1, "uint8", 255),
        DataType("int32", 4, "int32", 2**31 - 1),
        DataType("int64", 8, "int64", 2**63 - 1),
        DataType("half", 2, "float16", 2048),
        DataType("float", 4, "float32", 2**24),
        DataType("double", 8, "float64", 2**53),
        DataType("bfloat16", 2, "bfloat16", 256),
    )
}
OPERATIONS = ("sum", "prod", "max", "min", "avg")
_GLOO_OPERATIONS = OPERATIONS[:4]  # gloo cannot average


class Averaging(Enum):
    """The way in which the times of all ranks become the reported time (option `-a` of nccl-tests)."""

    RANK_0 = 0
    MEAN = 1
    MIN = 2
    MAX = 3


# Message sizes, as users write them


_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE = re.compile(r"(\d{1,15})([KMGT]?)B?", re.IGNORECASE)
MAX_SIZES = 10_000


def parse_bytes(text: str, where: str = "", least: int = 0) -> int:
    """Parse a size as nccl-tests does: `8`, `32M`, `16G`; the units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if not found or int(found[1]) < least:
        raise UsageError(
            f"invalid size `{text}`", where=where, hint="write bytes, or a number with K, M or G: 8, 32M, 16G"
        )
    return int(found[1]) * _UNITS[found[2].upper()]


@dataclass(frozen=True)
class CollectiveAsk:
    """The settings of one test. Names and defaults are those of nccl-tests, but there are more warm-up rounds."""

    test: str
    min_bytes: int = 32 << 20
    max_bytes: int = 32 << 20
    step_bytes: int = 1 << 20
    step_factor: int = 0  # if 0, sizes grow by step_bytes
    iters: int = 20
    warmup_iters: int = 5
    cycles: int = 1
    check: int = 1
    data_type: str = "float"  # a data type, or `all`
    operation: str = "sum"  # an operation, or `all`
    root: int = 0
    average: int = Averaging.MEAN.value
    device: str = "auto"  # auto, cpu or cuda

    def __post_init__(self) -> None:
        _choose("data type", "-d", self.data_type, (*DATA_TYPES, "all"))
        _choose("operation", "-o", self.operation, (*OPERATIONS, "all"))
        if self.max_bytes < self.min_bytes:
            raise UsageError("the largest size is below the smallest", where="-e", hint="set -e to at least -b")
        if self.step_factor == 1 or (not self.step_factor and not self.step_bytes and self.max_bytes > self.min_bytes):
            raise UsageError("the sizes would never grow", where="-f", hint="use -f 2, or -i with a size")
        for where, count in (("-n", self.iters), ("-N", self.cycles)):
            if count < 1:
                raise UsageError(f"`{where}` cannot be {count}", hint="the minimum is 1")
        if len(list(self.sizes())) >= MAX_SIZES:
            raise UsageError("too many sizes", where="-i", hint="use a larger step, or -f 2")

    def sizes(self) -> Iterator[int]:
        """Yield the sizes in bytes, at most MAX_SIZES."""
        size, left = self.min_bytes, MAX_SIZES
        while size <= self.max_bytes and left:
            yield size
            size = size * self.step_factor if self.step_factor and size else size + max(1, self.step_bytes)
            left -= 1

    def data_types(self) -> list[DataType]:
        return list(DATA_TYPES.values()) if self.data_type == "all" else [DATA_TYPES[self.data_type]]

    def operations(self, backend: str) -> list[str]:
        """Return the operations to test. A test that does not reduce has the operation `none`."""
        if not TESTS[self.test].reduces:
            return ["none"]
        known = _GLOO_OPERATIONS if backend == "gloo" else OPERATIONS
        if self.operation != "all" and self.operation not in known:
            hint = f"use {', '.join(known)}"
            raise UsageError(f"{backend} has no operation `{self.operation}`", where="-o", hint=hint)
        return list(known) if self.operation == "all" else [self.operation]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CollectiveAsk:
        return cls(**json.loads(text))

    def settings(self) -> NcclSettings:
        """Return the settings as nccl-tests print them."""
        return NcclSettings(
            threads=1,
            gpus=1,
            min_bytes=self.min_bytes,
            max_bytes=self.max_bytes,
            step=self.step_factor or self.step_bytes,
            step_is_factor=bool(self.step_factor),
            warmup_iters=self.warmup_iters,
            iters=self.iters,
            validation=self.check,
        )

    def nccl_tests_args(self) -> list[str]:
        """Return the same settings as arguments of an nccl-tests binary."""
        step = ["-f", str(self.step_factor)] if self.step_factor else ["-i", str(self.step_bytes)]
        return [
            "-b", str(self.min_bytes), "-e", str(self.max_bytes), *step, "-n", str(self.iters),
            "-w", str(self.warmup_iters), "-N", str(self.cycles), "-c", str(self.check), "-d", self.data_type,
            "-o", self.operation, "-r", str(self.root), "-a", str(self.average),
        ]  # fmt: skip


def _choose(noun: str, where: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known, otherwise=f"use one of {', '.join(known)}")
        raise UsageError(f"unknown {noun} `{name}`", where=where, hint=hint)


@dataclass(frozen=True)
class ElementCounts:
    """The number of elements that one rank sends and receives, and the count and size that nccl-tests print."""

    send: int
    receive: int
    shown: int
    size: int


def count_elements(test: CollectiveTest, size: int, data_type: DataType, ranks: int) -> ElementCounts:
    """Return the element counts for a size. If the size is split between ranks, each part is rounded down to a multiple
    of 16 bytes."""
    count = size // data_type.size
    if not test.split:
        return ElementCounts(count, count, count, count * data_type.size)
    part = count // ranks // (16 // data_type.size) * (16 // data_type.size)
    whole = part * ranks
    send = part if test.name in ("all_gather", "gather") else whole
    receive = part if test.name in ("reduce_scatter", "scatter") else whole
    return ElementCounts(send, receive, part, whole * data_type.size)


def bandwidths(test: CollectiveTest, size: int, time_us: float, ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in GB/s (1e9 bytes)."""
    algbw = size / 1e9 / (time_us / 1e6) if time_us > 0 else 0.0
    return algbw, algbw * test.test.bus_factor(ranks)


# Test data with known results. It is periodic, so that creating and checking it needs little memory.


PERIOD = 251  # a prime, so that a shift by a power of two is noticed
_PLAIN = 97  # data that is only moved has values below this limit, which every data type represents exactly


def moved_values(source: int, target: int = 0) -> list[int]:
    """Return one period of what rank `source` sends to rank `target`."""
    return [_scattered(at, source, target) % _PLAIN for at in range(PERIOD)]


def _scattered(at: int, source: int, target: int = 0) -> int:
    """Return a pseudo-random number for this position and these ranks. With a regular pattern, wrong data could have
    the right sum."""
    return ((at + 1) * 2654435761 + (source + 1) * (at + 3) * 40503 + (target + 1) * (at + 7) * 69621) % 4294967291 >> 7


def reduced_values(rank: int, ranks: int, data_type: DataType, operation: str) -> list[int]:
    """Return one period of a rank's input to a reduction. Values are small, so that the result is exact if possible."""
    if operation == "prod":  # at each position one rank has a 2 and the others a 1, so the product is 2
        return [2 if (at + rank) % ranks == 0 else 1 for at in range(PERIOD)]
    if operation in ("max", "min"):
        return moved_values(rank)
    most = max(2, min(_PLAIN, data_type.exact // ranks + 1))
    return [_scattered(at, rank) % most for at in range(PERIOD)]


def expected_values(ranks: int, data_type: DataType, operation: str) -> list[float]:
    """Return one period of the correct result of a reduction."""
    columns = zip(*(reduced_values(rank, ranks, data_type, operation) for rank in range(ranks)), strict=True)
    reduce: dict[str, Callable[[Sequence[int]], float]] = {
        "sum": sum, "prod": prod, "max": max, "min": min, "avg": lambda column: sum(column) / ranks,
    }  # fmt: skip
    return [_wrapped(reduce[operation](column), data_type) for column in columns]


def _wrapped(value: float, data_type: DataType) -> float:
    """Return a result as the data type stores it: 8-bit integers overflow, other types keep the value."""
    if data_type.name == "uint8":
        return float(value % 256)
    return float((value + 128) % 256 - 128) if data_type.name == "int8" else value


def tolerance(ranks: int, data_type: DataType, operation: str) -> float:
    """Return the relative error that rounding alone may cause; 0.0 where every partial result is exact."""
    if operation == "avg":  # never exact: the rounding depends on whether the backend divides before or after the sum
        return 4.0 * ranks / data_type.exact
    if data_type.torch.endswith(("int8", "int32", "int64")):
        return 0.0
    largest = ranks * (max(2, min(_PLAIN, data_type.exact // ranks + 1)) - 1)
    return 2.0 * ranks / data_type.exact if operation == "sum" and largest > data_type.exact else 0.0


# Instance id of this machine


def instance_id(read: Callable[[str], str]) -> str:
    """Return the cloud's instance id of this machine, from files that every user may read; "" if unknown."""
    tag = read("/sys/devices/virtual/dmi/id/board_asset_tag").strip()
    if tag.startswith("i-"):  # an EC2 instance id
        return tag
    try:
        found: Any = json.loads(read("/run/cloud-init/instance-data.json"))
        return str(found["v1"]["instance_id"])
    except (ValueError, KeyError, TypeError):
        return ""
