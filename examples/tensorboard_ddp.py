"""Follow a training in TensorBoard and Weights & Biases, also over restarts.

    pip install tensorboard wandb
    python tensorboard_ddp.py 200
    dalsegno run --nodes 2 tensorboard_ddp.py 200
    tensorboard --logdir logs/tensorboard
    wandb sync logs/wandb/offline-run-*

Kill it at any moment and run the same command again: the curves continue where the training resumes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from dalsegno.train import Checkpointer


class Curves:
    """Writes the figures of each step to TensorBoard and to Weights & Biases."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.tensorboard = SummaryWriter(folder / "tensorboard", purge_step=first_step)  # discards what is repeated
        run = os.environ.get("DALSEGNO_RUN")  # the same after every restart
        self.wandb = wandb.init(project="demo", id=run, resume="allow", mode="offline", dir=folder)

    def add(self, step: int, **figures: float) -> None:
        for name, value in figures.items():
            self.tensorboard.add_scalar(name, value, step)
        self.wandb.log(figures, step=step)

    def close(self) -> None:
        self.tensorboard.close()
        self.wandb.finish()


def main() -> None:
    total, folder = int(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "logs")
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(8, 1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ckpt = Checkpointer(folder / "checkpoints", model=model, optimizer=optimizer, disk_every=50)
    folder.mkdir(parents=True, exist_ok=True)
    curves = Curves(folder, ckpt.step) if rank == 0 else None
    for step in ckpt.steps(total):
        began = time.monotonic()
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if curves is not None:
            curves.add(step, loss=loss.item(), step_time=time.monotonic() - began)
        ckpt.done(step, loss=loss)
    if curves is not None:
        curves.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
