#!/usr/bin/env python3
"""Test the check for silent data corruption on one GPU, and measure its cost.

    PYTHONPATH=src python benchmarks/verify_gpu.py           a GPT of 163 million parameters, about a minute

Three ranks share the GPU, over gloo. All cases train the same 13 steps, with a check at steps 0, 4, 8 and 12:

- `plain` has no checks; `verify` must end with the same weights.
- In `flip`, a bit of the gradients of rank 1 is wrong from step 6 on. The check at step 8 must convict this rank.
- `any-order` allows algorithms that are not deterministic. The check must not convict any rank.
- `alone` is one rank, which repeats its own steps, for the cost without other ranks on the same GPU.

It needs torch with CUDA and one GPU with 40 GB of memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS is not deterministic

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from dalsegno.train.corruption import GradientCheck, digest_tensors, flip_bit
from dalsegno.train.errors import CheckpointError
from dalsegno.train.ranks import find_where, open_rank_store

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 50257, 768, 12, 12, 512, 8
STEPS, EVERY, FLIP_AT = 13, 4, 6
CASES = {3: ("plain", "verify", "flip", "any-order"), 1: ("alone",)}  # number of ranks -> its cases


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mixed = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device, dtype=mixed.dtype)
        logits: torch.Tensor = self.head(self.blocks(mixed, mask=mask, is_causal=True))
        return logits


def backward(module: nn.Module, ids: torch.Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        logits = module(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()


def work(rank: int, world: int, answers: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    os.environ.update(LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=f"node-{rank}")
    if world > 1:
        dist.init_process_group("gloo")
    for case in CASES[world]:
        answers.put(train(rank, world, case))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def train(rank: int, world: int, case: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(case != "any-order")
    torch.manual_seed(1)
    network = Gpt().cuda()
    model = nn.parallel.DistributedDataParallel(network) if world > 1 else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(100 + rank)
    check = GradientCheck(0 if case == "plain" else EVERY, find_where(), open_rank_store(rank, world), None)
    found, steps_s, checks_s = "", list[float](), list[float]()
    for step in range(STEPS):
        if case == "flip" and rank == 1 and step == FLIP_AT:
            next(network.parameters()).register_hook(flip_bit)
        ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT), device="cuda")
        began = now()
        try:
            verdict = check.run(step, model, ids, backward)
        except CheckpointError as error:
            found = f"convicted: {error.what}"
            break
        if check.every and step % check.every == 0:
            checks_s.append(now() - began)
        if verdict is not None:
            found = f"undecided: {verdict.text}"
            break
        began = now()
        optimizer.zero_grad()
        backward(model, ids)
        optimizer.step()
        steps_s.append(now() - began)
    began = now()
    weights = digest_tensors(network.parameters())
    return {
        "case": case, "rank": rank, "found": found, "steps": len(steps_s), "weights": weights[:12],
        "digest_s": round(now() - began, 4), "step_s": middle(steps_s[2:]), "check_s": middle(checks_s[1:]),
        "million parameters": round(sum(each.numel() for each in network.parameters()) / 1e6),
    }  # fmt: skip


def middle(times_s: list[float]) -> float | None:
    return round(median(times_s), 4) if times_s else None


def now() -> float:
    torch.cuda.synchronize()
    return time.monotonic()


def main() -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    context, found = processes.get_context("spawn"), dict[str, list[dict[str, Any]]]()
    for world, cases in CASES.items():
        answers = context.Queue()
        ranks = [context.Process(target=work, args=(rank, world, answers)) for rank in range(world)]
        for each in ranks:
            each.start()
        for _ in range(world * len(cases)):
            answer = answers.get(timeout=120)
            print(json.dumps(answer), flush=True)
            found.setdefault(answer["case"], []).append(answer)
        for each in ranks:
            each.join()
    return judge(found)


def judge(found: dict[str, list[dict[str, Any]]]) -> int:
    """Print whether each case ended as it must; return the exit code."""
    fine = {
        "checks do not change the training": len({one["weights"] for one in found["plain"] + found["verify"]}) == 1,
        "no rank disagrees": not any(one["found"] for one in found["verify"] + found["alone"]),
        "rank 1 is convicted at step 8": all("node-1" in one["found"] and one["steps"] == 8 for one in found["flip"]),
        "nobody is convicted": not any(one["found"].startswith("convicted") for one in found["any-order"]),
    }
    for what, holds in fine.items():
        print(f"{'passed' if holds else 'FAILED'}: {what}")
    return 0 if all(fine.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
