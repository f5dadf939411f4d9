"""Train with accelerate. The loop is the script's own, so the Checkpointer is used as in any other loop.

    dalsegno run --nodes 2 --nproc-per-node 2 accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 accelerate_loop.py

accelerate skips the used batches of the interrupted epoch. Kill it at any moment and run the same command again:
it ends with the same weights.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from settings import describe, parse_arguments, slow_down
from torch.utils.data import DataLoader, TensorDataset

from dalsegno.train import Checkpointer

asked = parse_arguments()
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # the order depends on the epoch alone
)
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
adam = torch.optim.AdamW(net.parameters(), lr=0.01)
# With a generator of its own, the loader draws nothing from the random state that dropout uses.
data = DataLoader(TensorDataset(torch.randn(256, 8)), 4, shuffle=True, generator=torch.Generator().manual_seed(0))
model, optimizer, loader = accelerator.prepare(net, adam, data)

per_epoch = len(loader) // 2  # steps of an epoch: two batches make one
ckpt = Checkpointer(asked.checkpoints, model=model, optimizer=adam, disk_every=asked.disk_every)
torch.manual_seed(accelerator.process_index)
ckpt.begin(asked.steps)
while ckpt.step < asked.steps:
    epoch, done = divmod(ckpt.step, per_epoch)
    loader.set_epoch(epoch)
    for (inputs,) in accelerator.skip_first_batches(loader, 2 * done) if done else loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            slow_down(asked)
            ckpt.done()
        if ckpt.step == asked.steps:
            break
ckpt.finish()
describe(net, ckpt.step)
accelerator.end_training()
