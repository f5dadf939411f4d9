"""Train a small MLP with data parallelism, in the form of PyTorch's multi-GPU tutorial.

    python ddp.py 10 2
    torchrun --standalone --nproc-per-node 4 ddp.py 10 2
    dalsegno torchrun --standalone --nproc-per-node 4 ddp.py 10 2
    dalsegno run --nodes 2 --nproc-per-node 4 ddp.py 10 2

Kill it at any moment and run the same command again: it resumes where it was.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dalsegno.train import Checkpointer

SAMPLES, FEATURES, WIDTH = 2048, 20, 64


def main() -> None:
    asked = parse_arguments()
    rank, world, device = join()
    sampler = DistributedSampler(make_data(), num_replicas=world, rank=rank)
    loader = DataLoader(sampler.dataset, asked.batch_size, sampler=sampler, pin_memory=device.type == "cuda")
    torch.manual_seed(0)
    model: nn.Module = make_model().to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    every = asked.save_every * len(loader)  # the tutorial counts epochs, the checkpointer steps
    ckpt = Checkpointer(asked.checkpoints, model=model, optimizer=optimizer, data=loader, disk_every=every)
    for epoch in ckpt.epochs(asked.total_epochs):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"epoch {epoch} step {ckpt.step} loss {loss.item():.9g}", flush=True)
            ckpt.done(loss=loss)

    if dist.is_initialized():
        dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="data-parallel training of a small MLP")
    parser.add_argument("total_epochs", type=int, help="epochs to train in all")
    parser.add_argument("save_every", type=int, help="epochs between two checkpoints on disk")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step on each rank (default 32)")
    parser.add_argument("--checkpoints", default="checkpoints/ddp", help="folder (default checkpoints/ddp)")
    return parser.parse_args()


def join() -> tuple[int, int, torch.device]:
    """Join the process group of the launcher, or run as a single process if no launcher set its variables."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return 0, 1, device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def make_data() -> TensorDataset:
    inputs = torch.rand(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


if __name__ == "__main__":
    main()
