"""One of several processes that try every rung: `python -m tests.ladder.ranks FOLDER RANK PORT`.

All three run with three ranks, then the first two with two ranks, and each writes its results to a file. The processes
start once for all rungs, because the import of torch takes most of the time.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ladder import RUNGS
from ladder.buckets import make_buckets
from ladder.torch_ddp import TorchDDP
from ladder.wire import Tally, Wire
from tests.ladder.worlds import KNOWN_CAP_BYTES, WORLDS

ODD_CAP_MB = 100 / 2**20  # gives several buckets of different sizes


class Odd(nn.Module):
    """A model with odd shapes, two dtypes, a scalar, a buffer, a frozen parameter and parameters used by some ranks."""

    def __init__(self, seed: int, detour: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.detour = detour
        self.first = nn.Linear(7, 5)
        self.register_buffer("shift", torch.randn(5))
        self.never = nn.Linear(3, 2)
        self.sometimes = nn.Linear(5, 5)
        self.second = nn.Linear(5, 3, bias=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.precise = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, batch: Any) -> Any:
        hidden = torch.relu(self.first(batch) + self.shift)
        if self.detour:
            hidden = hidden + self.sometimes(hidden)
        return self.second(hidden) * self.scalar * self.precise + self.frozen


def gradients(rung_name: str, *, detour: bool, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the gradients of two steps from different initial weights, and the weights and buffers at the start."""
    wire = Wire()
    rung = RUNGS[rung_name](Odd(seed=wire.rank, detour=detour), wire, bucket_cap_mb=ODD_CAP_MB, **options)
    start = [each.detach().clone() for each in (*rung.model.parameters(), *rung.model.buffers())]
    optimizer = torch.optim.SGD(rung.parameters, lr=0.1, momentum=0.9)
    noise, seen = torch.Generator().manual_seed(5), []
    for _ in range(2):
        batch = rung.my_part(torch.randn(4 * wire.size, 7, generator=noise))
        optimizer.zero_grad()
        rung(batch).square().mean().backward()
        rung.after_backward()
        seen += [None if each.grad is None else each.grad.clone() for each in rung.parameters]
        optimizer.step()
    rung.close()
    return seen, start


def known_model() -> Any:
    """Return a model with 92 bytes of gradients: 48 + 12, 24 + 8."""
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def traffic(rung_name: str) -> dict[str, Any]:
    """Return the traffic of one step of the known model."""
    rung = RUNGS[rung_name](known_model(), Wire(), bucket_cap_mb=KNOWN_CAP_BYTES / 2**20)
    if isinstance(rung, TorchDDP):
        rung.count_buckets()
        _backward(rung)  # DDP rebuilds its buckets after the first step
        rung.wire.tally = Tally()
    _backward(rung)
    rung.close()
    return asdict(rung.wire.tally)


def _backward(rung: Any) -> None:
    rung(torch.ones(2, 4)).sum().backward()
    rung.after_backward()


def differences(ours: list[Any], theirs: list[Any]) -> list[str]:
    """Return the differences between two lists of gradients.

    Two gradients are the same if both are missing, or if they differ only by the order of summation.
    """
    found = []
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one is None or other is None:
            same = one is other
        else:
            same = one.dtype == other.dtype and torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        found += [] if same else [f"gradient {at}: {one} and not {other}"]
    return found


def run_all_cases() -> dict[str, Any]:
    some_take_the_detour = dist.get_rank() != 1
    found: dict[str, Any] = {}
    for case, detour, options in (
        ("unused by all or some", some_take_the_detour, {"find_unused": True}),
        ("used by all", True, {"find_unused": True}),
    ):
        theirs, _ = gradients("ddp", detour=detour, **options)
        for name in RUNGS:
            if name == "data-parallel" and case != "used by all":
                continue  # with one process there are no parameters that only some ranks use
            ours, start = gradients(name, detour=detour, **options)
            found[f"{case}: {name}"] = differences(ours, theirs)
            found[f"start: {name}"] = [each.tolist() for each in start]
    found |= {f"traffic: {name}": traffic(name) for name in RUNGS if name != "data-parallel"}
    found["buckets"] = [[len(each.parameters), each.flat.numel(), str(each.flat.dtype)] for each in _odd_buckets()]
    found["zero instead of missing"] = _missing_without_find_unused()
    return found


def _odd_buckets() -> list[Any]:
    return make_buckets([each for each in Odd(0, True).parameters() if each.requires_grad], cap_bytes=100)


def _missing_without_find_unused() -> bool:
    seen, _ = gradients("overlap", detour=dist.get_rank() == 0)
    return all(each is not None for each in seen)


def main(folder: Path, rank: int, port: str) -> None:
    found = {}
    for size in WORLDS:
        if rank >= size:
            break
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{size}", rank=rank, world_size=size)
        found[size] = run_all_cases()
        dist.destroy_process_group()
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    if rank < 2:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        sys.argv = ["ladder", "ring"]
        runpy.run_module("ladder", run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # torch's gloo threads sometimes abort a process that tears the interpreter down
