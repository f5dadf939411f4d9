"""Train a small model with one rung, and compare its gradients with those of DDP.

torchrun --nproc-per-node 2 -m ladder ring
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from . import RUNGS
from .rung import Rung
from .torch_ddp import TorchDDP
from .train import make_model, train_step, width_of
from .wire import Wire

MIB, LAYERS, STEPS, BATCH_PER_RANK = 1.0, 4, 3, 16


def main() -> None:
    parser = argparse.ArgumentParser(prog="ladder", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rung", choices=list(RUNGS))
    parser.add_argument("--bucket-cap-mb", type=float, default=0.3)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rung = RUNGS[asked.rung](make_model(MIB, LAYERS), Wire(), bucket_cap_mb=asked.bucket_cap_mb)
    train(rung)
    if rung.wire.rank == 0:
        print(f"{asked.rung}: rank 0 in {STEPS} steps: {rung.wire.tally}")
    away = distance(rung, train(TorchDDP(make_model(MIB, LAYERS), Wire())))
    if rung.wire.rank == 0:
        print(f"largest difference to DDP's gradients: {away:.1e}")
    dist.destroy_process_group()


def train(rung: Rung) -> Rung:
    optimizer = torch.optim.SGD(rung.parameters, lr=0.1)
    noise = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs, targets = torch.randn(2, BATCH_PER_RANK * rung.wire.size, width_of(MIB, LAYERS), generator=noise)
        train_step(rung, rung.my_part(inputs), rung.my_part(targets), optimizer)
    return rung


def distance(one: Rung, other: Rung) -> float:
    pairs = zip(one.parameters, other.parameters, strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    main()
