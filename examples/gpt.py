"""A small GPT that learns to write sonnets, character by character: about a million parameters, two minutes on a CPU.

    python gpt.py
    torchrun --standalone --nproc-per-node 2 gpt.py            # every rank holds the whole model (DDP)
    torchrun --standalone --nproc-per-node 2 gpt.py --fsdp     # every rank holds a part of it (FSDP2)
    dalsegno run --nodes 2 --nproc-per-node 4 gpt.py --fsdp

Kill it at any moment and run the same command again: it resumes where it was, also with another number of ranks.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dalsegno.train import Checkpointer

TEXT = Path(__file__).parent / "data" / "sonnets.txt"


class Attention(nn.Module):
    """Causal self-attention. Rotations of queries and keys encode the positions (RoPE)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(rotate(q, rotations), rotate(k, rotations), v, is_causal=True)
        return self.out(seen.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotations)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, letters: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.per_head = width // heads
        self.embed = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        x, rotations = self.embed(letters), rotations_for(letters.shape[1], self.per_head, letters.device)
        for block in self.blocks:
            x = block(x, rotations)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotations_for(length: int, size: int, device: torch.device) -> Tensor:
    """Return the rotation of each pair of numbers at each position: fast for the first pairs, slow for the last."""
    speeds = 10_000 ** (-torch.arange(0, size, 2, device=device) / size)
    angles = torch.outer(torch.arange(length, device=device), speeds)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    (cos, sin), (a, b) = rotations, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def main() -> None:
    asked = parse_arguments()
    rank, device = join()
    text = TEXT.read_text()
    alphabet = sorted(set(text))
    letters = torch.tensor([alphabet.index(letter) for letter in text], device=device)
    torch.manual_seed(0)  # the same model on every rank
    model = distribute(GPT(len(alphabet), asked.width, asked.heads, asked.layers).to(device), asked.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, asked.steps))
    torch.manual_seed(1 + rank)  # different data on every rank

    ckpt = Checkpointer(
        asked.checkpoints, model=model, optimizer=optimizer, scheduler=scheduler, disk_every=asked.save_every
    )
    for step in ckpt.steps(asked.steps):
        inputs, targets = draw_batch(letters, asked.batch_size, asked.context)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step % asked.print_every == 0 or step == asked.steps - 1):
            print(f"step {step} loss {loss.item():.9g}", flush=True)
        ckpt.done(step, loss=loss, samples=asked.batch_size)

    written = write(model, letters[: asked.context], asked.sample)  # all ranks take part: each may hold a shard
    if rank == 0:
        print("".join(alphabet[letter] for letter in written))
    if dist.is_initialized():
        dist.destroy_process_group()


def distribute(model: GPT, fsdp: bool) -> nn.Module:
    """Distribute the model over the ranks, with FSDP2 or DDP."""
    if fsdp:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model
    return DistributedDataParallel(model) if dist.is_initialized() else model


def draw_batch(letters: Tensor, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Return random pieces of the text, and for each letter the one that follows it."""
    starts = torch.randint(len(letters) - context, (size, 1)).to(letters.device)
    places = starts + torch.arange(context, device=letters.device)
    return letters[places], letters[places + 1]


@torch.no_grad()
def write(model: nn.Module, start: Tensor, count: int) -> list[int]:
    chance, context = torch.Generator().manual_seed(0), len(start)
    for _ in range(count):
        odds = model(start[None, -context:])[0, -1].softmax(dim=-1).cpu()
        start = torch.cat([start, torch.multinomial(odds, 1, generator=chance).to(start.device)])
    return start[context:].tolist()


def cosine(step: int, steps: int) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(step / steps, 1)))


def join() -> tuple[int, torch.device]:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return 0, device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), device


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a small GPT that learns to write sonnets")
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the ranks (FSDP2) instead of DDP")
    parser.add_argument("--checkpoints", default="checkpoints/gpt", help="folder (default checkpoints/gpt)")
    parser.add_argument("--save-every", default="1m", type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--lr", default=1e-3, type=float)
    numbers = {"steps": 1000, "batch_size": 16, "context": 128, "layers": 5, "width": 128, "heads": 4}
    for name, default in {**numbers, "print_every": 50, "sample": 300}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=int, help=f"default {default}")
    asked = parser.parse_args()
    if asked.fsdp and "RANK" not in os.environ:
        parser.error("--fsdp shards over ranks: start it with torchrun, or with dalsegno run")
    return asked


if __name__ == "__main__":
    main()
