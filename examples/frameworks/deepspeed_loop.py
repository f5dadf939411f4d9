"""Train with DeepSpeed and its own checkpoints.

    dalsegno run --nodes 2 deepspeed_loop.py
    torchrun --standalone --nproc-per-node 2 deepspeed_loop.py

DeepSpeed shards the optimizer (ZeRO stage 1) and saves every few steps. After a fault, it continues with its newest
checkpoint. The batch of a step depends on the step alone, so the run ends with the same weights as without a fault.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from settings import describe, parse_arguments, slow_down

from dalsegno.train import report

asked = parse_arguments()
if not torch.cuda.is_available():
    # Ranks of one host could exchange small tensors through an operator that takes minutes to compile. Without it, they
    # use gloo for everything.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
settings = {
    "train_micro_batch_size_per_gpu": 4,
    # The default buckets of 2 GB would be allocated in every step.
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    "zero_allow_untested_optimizer": True,  # any optimizer of PyTorch
    "steps_per_print": asked.steps,
}
engine, *_ = deepspeed.initialize(
    model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False), config=settings
)
found, _ = engine.load_checkpoint(asked.checkpoints)
rank = torch.distributed.get_rank()
if found is not None and rank == 0:
    print(f"resuming from step {engine.global_steps} (deepspeed)", flush=True)

while engine.global_steps < asked.steps:
    batch = torch.Generator().manual_seed(engine.global_steps * torch.distributed.get_world_size() + rank)
    loss = engine(torch.randn(4, 8, generator=batch).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    slow_down(asked)
    report(engine.global_steps, loss=loss, last=engine.global_steps == asked.steps)
    if engine.global_steps % asked.disk_every == 0:
        engine.save_checkpoint(asked.checkpoints)
describe(net, engine.global_steps)
torch.distributed.destroy_process_group()
