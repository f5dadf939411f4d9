"""Train with Lightning. `fit(trainer, model, folder, loader)` replaces `trainer.fit(model, loader)`.

    dalsegno run --nodes 2 --nproc-per-node 2 lightning_fit.py
    torchrun --standalone --nproc-per-node 2 lightning_fit.py

Kill it at any moment and run the same command again: sixty steps stay sixty, and the weights are the same.
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from settings import describe, parse_arguments, slow_down
from torch.utils.data import DataLoader, TensorDataset

from dalsegno.train.lightning import fit


class Regression(L.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        slow_down(asked)
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


asked = parse_arguments()
ranks, ranks_of_node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
L.seed_everything(3)
loader = DataLoader(TensorDataset(torch.randn(256, 8)), batch_size=4, shuffle=True)
model = Regression(asked.steps)
trainer = L.Trainer(
    max_steps=asked.steps,
    accumulate_grad_batches=2,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=ranks_of_node,
    num_nodes=ranks // ranks_of_node,
    strategy="ddp" if ranks > 1 else "auto",
    logger=False,
    enable_checkpointing=False,  # the Checkpointer saves; a ModelCheckpoint beside it exports weights
    enable_progress_bar=False,
)
fit(trainer, model, asked.checkpoints, loader, options={"disk_every": asked.disk_every})
describe(model, trainer.global_step)
