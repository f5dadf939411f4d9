"""The training script of a drill: a very small GPT that learns this file, character by character.

Usage: python training.py CHECKPOINTS NOTES STEPS PAUSE-S. Rank 0 writes every step and the digest of the final weights
to NOTES, so that a disturbed run can be compared with an undisturbed one, bit for bit. It runs in the user's Python.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dalsegno.train import Checkpointer

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 48, 8


class GPT(nn.Module):  # type: ignore[misc]
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letter(letters) + self.place(torch.arange(letters.shape[1]))
        later = torch.triu(torch.full((letters.shape[1], letters.shape[1]), float("-inf")), 1)
        logits: Tensor = self.out(self.layers(x, mask=later))
        return logits


def main(folder: str, notes: str, total: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank, generation = dist.get_rank(), os.environ.get("DALSEGNO_GENERATION", "1")
    text = Path(__file__).read_text()
    alphabet = sorted(set(text))
    letters = torch.tensor([alphabet.index(letter) for letter in text])
    torch.manual_seed(0)  # the same model on every rank
    model = DistributedDataParallel(GPT(len(alphabet)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # different data on every rank
    ckpt = Checkpointer(folder, model=model, optimizer=optimizer, memory_every=1, disk_every=50)
    notes_fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for step in ckpt.steps(total):
        places = torch.randint(len(letters) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT)
        loss = F.cross_entropy(model(letters[places]).flatten(0, 1), letters[places + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            os.write(notes_fd, f"step {time.time():.3f} {step} {loss.item():.6f} {generation}\n".encode())
        ckpt.done(step, loss=loss)
        time.sleep(pause_s)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    if rank == 0:
        os.write(notes_fd, f"weights {hashlib.sha256(weights).hexdigest()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
