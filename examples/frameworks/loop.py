"""A plain loop with the parts that people add to one. Name those you want to see after --with.

    dalsegno run --nodes 2 --nproc-per-node 2 loop.py --with ema scaler
    torchrun --standalone --nproc-per-node 2 loop.py --with compile workers

Every step accumulates two batches, and a schedule changes the learning rate. `ema` keeps an average of the weights,
`amp` computes the loss with autocast in bfloat16, or in float16 with `scaler`, a GradScaler. `compile` compiles the
model with inductor, `workers` loads data in two processes, `stateful` loads it with torchdata's StatefulDataLoader, and
`fsdp` shards the model with fully_shard.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from settings import describe, parse_arguments, slow_down
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dalsegno.train import Checkpointer

asked = parse_arguments()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
net: Any = torch.nn.Sequential(
    torch.nn.Linear(8, 32), torch.nn.LayerNorm(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
).to(device)
if "fsdp" in asked.parts:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net)
objects: dict[str, Any] = {"model": net}
model = torch.compile(net) if "compile" in asked.parts else net
if world > 1 and "fsdp" not in asked.parts:
    model = DistributedDataParallel(model)
    objects["model"] = model
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, asked.steps)
objects |= {"optimizer": optimizer, "schedule": schedule}
if "ema" in asked.parts:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    objects["ema"] = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scaler = torch.amp.GradScaler(device.type, enabled="scaler" in asked.parts, growth_interval=7)
if "scaler" in asked.parts:
    objects["scaler"] = scaler
half = torch.float16 if "scaler" in asked.parts else torch.bfloat16  # bfloat16 needs no GradScaler
dataset = TensorDataset(torch.randn(256, 8))
sampler = DistributedSampler(dataset, num_replicas=world, rank=rank)
kind: Any = DataLoader
if "stateful" in asked.parts:
    from torchdata.stateful_dataloader import StatefulDataLoader as kind  # type: ignore[no-redef]
loader = kind(dataset, 4, sampler=sampler, num_workers=2 if "workers" in asked.parts else 0)

ckpt = Checkpointer(asked.checkpoints, data=loader, disk_every=asked.disk_every, **objects)
torch.manual_seed(rank)
losses = []


def batches() -> Any:
    """Yield batches for ever. Only a loader that does not save its position itself has epochs here."""
    while True:
        yield from loader


source = batches()
for _ in ckpt.steps(asked.steps):
    for _ in range(2):
        (inputs,) = next(source)
        with torch.autocast(device.type, half, enabled="amp" in asked.parts):
            loss = model(inputs.to(device)).float().square().mean() / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()
    if "ema" in asked.parts:
        objects["ema"].update_parameters(net)
    losses.append(loss.item())
    slow_down(asked)
    ckpt.done(loss=loss, samples=8)
describe(objects.get("ema", net), ckpt.step, scaler=scaler.state_dict())
if world > 1:
    dist.destroy_process_group()
