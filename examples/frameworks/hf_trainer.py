"""Train a small GPT-2 with Hugging Face's Trainer. `train(trainer, folder)` replaces `trainer.train()`.

    dalsegno run --nodes 2 --nproc-per-node 2 hf_trainer.py
    torchrun --standalone --nproc-per-node 2 hf_trainer.py

Kill it at any moment and run the same command again: it ends with the same weights and the same log of losses.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from settings import describe, parse_arguments, slow_down
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from dalsegno.train.huggingface import train

WORDS, LENGTH = 64, 12


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Made-up sentences: numbers drawn by their index."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Pause(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        slow_down(asked)


asked = parse_arguments()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    output_dir=f"{asked.checkpoints}/out",
    max_steps=asked.steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    logging_steps=7,
    save_strategy="no",  # the Checkpointer saves; `trainer.save_model()` exports the result
    report_to=[],
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
    ddp_backend=None if torch.cuda.is_available() or "RANK" not in os.environ else "gloo",
)
trainer = Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Pause()])
train(trainer, asked.checkpoints, disk_every=asked.disk_every)
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
describe(model, trainer.state.global_step, losses)
