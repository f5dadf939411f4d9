"""Train with Hugging Face's Trainer and resume exactly: `train(trainer, folder)` replaces `trainer.train()`.

The Trainer skips the batches that were used and restores its TrainerState. The Checkpointer saves and restores
everything else: the model, the optimizer, the learning rate schedule, the gradient scaler, the random states, and the
losses that the Trainer has not logged yet.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from dalsegno.train.checkpointer import Checkpointer
from dalsegno.train.errors import CheckpointError
from dalsegno.train.options import Folder
from dalsegno.train.progress import WaitClock
from dalsegno.train.resume import fix_layout
from dalsegno.train.state import LateState

# The methods with which the Trainer loads a checkpoint of its own. `train` replaces them when it resumes.
HOOKS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
# The Trainer's loss sums, the steps at which they begin, and its count of FLOPs. They differ between ranks.
SUMS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")


def train(trainer: Any, folder: Folder, **options: Any) -> Any:
    """Train as `trainer.train()` does, and return the same. Resume from the folder if a state is saved there.

    `options` are those of the Checkpointer: `disk_every`, `memory_every`, `keep` and so on.
    """
    _check(trainer)
    session = TrainerSession(trainer, folder, options)
    callback = session.callback()
    trainer.add_callback(callback)
    try:
        return trainer.train(resume_from_checkpoint=session.prepare_resume())
    finally:
        trainer.remove_callback(callback)
        session.close()


def _check(trainer: Any) -> None:
    if missing := [name for name in HOOKS if not hasattr(trainer, name)]:
        raise CheckpointError(f"this Trainer has no {', '.join(missing)}", hint="use transformers 5 or newer")
    if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
        raise CheckpointError(
            "a Trainer with FSDP or DeepSpeed saves its own checkpoints",
            hint="call trainer.train(resume_from_checkpoint=…) with the newest checkpoint in output_dir",
        )


class TrainerSession:
    """One call of `train`: the Trainer, its Checkpointer and the saved state."""

    def __init__(self, trainer: Any, folder: Folder, options: dict[str, Any]) -> None:
        self.trainer = trainer
        self._loss: float | None = None
        self._resume: tempfile.TemporaryDirectory[str] | None = None
        self._objects = LateState(self._take, lambda: [trainer.optimizer] if trainer.optimizer else [])
        self._sums = LateState(self._take_sums)
        self.ckpt = Checkpointer(
            folder, model=trainer.model, trainer=self._objects, per_rank={"sums": self._sums}, **options
        )

    # State that is saved

    def _take(self) -> dict[str, Any]:
        """Return the TrainerState, and the states of the objects that the Trainer creates when it starts."""
        trainer = self.trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        parts = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "scaler": scaler}
        taken: dict[str, Any] = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return {**taken, "state": self._take_state()}

    def _take_state(self) -> str:
        """Return the TrainerState as JSON, including the callbacks' states, in the Trainer's own format."""
        from transformers.trainer_callback import ExportableState

        trainer = self.trainer
        for each in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(each, ExportableState):
                saved = trainer.state.stateful_callbacks
                name = type(each).__name__
                # A list contains the states of several callbacks of one class, and stays unchanged.
                if not isinstance(saved.get(name), list):
                    saved[name] = each.state()
        return json.dumps(dataclasses.asdict(trainer.state))

    def _take_sums(self) -> dict[str, Any]:
        return {name: getattr(self.trainer, name) for name in SUMS if hasattr(self.trainer, name)}

    # Resuming from a checkpoint

    def prepare_resume(self) -> str | None:
        """Write the TrainerState to a temporary folder from which the Trainer resumes, and return the folder.

        Replace the Trainer's methods that would load the rest of a checkpoint from that folder. The folder is deleted
        when training begins. If there is no saved state, change nothing and return None.
        """
        saved = self._objects.claim()
        if saved is None:
            return None
        self._resume = tempfile.TemporaryDirectory(prefix="dalsegno-")
        Path(self._resume.name, "trainer_state.json").write_text(saved["state"])
        trainer = self.trainer

        def load(_: str) -> None:
            trainer.optimizer.load_state_dict(saved["optimizer"])
            trainer.lr_scheduler.load_state_dict(saved["scheduler"])
            if "scaler" in saved:
                trainer.accelerator.scaler.load_state_dict(saved["scaler"])

        trainer._load_from_checkpoint = lambda *_: None  # the Checkpointer has loaded the model
        trainer._load_optimizer_and_scheduler = load
        trainer._load_scaler = lambda _: None
        trainer._load_rng_state = lambda _: self.begin()  # called after the Trainer has skipped the used batches
        return self._resume.name

    def close(self) -> None:
        """Undo the changes to the Trainer, also after an error, so that it can train again."""
        for name in HOOKS:
            vars(self.trainer).pop(name, None)
        vars(self.trainer.accelerator).pop("gather", None)
        self._remove_resume()
        self.ckpt.end()

    def _remove_resume(self) -> None:
        if self._resume is not None:
            self._resume.cleanup()
        self._resume = None

    def begin(self) -> None:
        self.ckpt.begin(self.trainer.state.max_steps)

    # Events of the Trainer

    def started(self) -> None:
        self._remove_resume()  # remove the folder now, because a killed process would leave it on disk
        fix_layout(self.trainer.model_wrapped)
        self._measure_waiting()
        for name, value in (self._sums.claim() or {}).items():
            present = getattr(self.trainer, name)
            setattr(self.trainer, name, value.to(present.device) if hasattr(present, "device") else value)
        if self.ckpt.resumed is None:
            self.begin()

    def _measure_waiting(self) -> None:
        """Measure how long this rank waits for others, in DDP and in the exchange of token counts.

        By default, the Trainer adds up the tokens of all ranks before each step. A fast rank waits there for slow ones.
        """
        trainer, clock = self.trainer, WaitClock()
        trainer.accelerator.gather = clock.wrap(trainer.accelerator.gather, lambda: bool(trainer.model.training))
        for waiting in (trainer.model_wrapped, clock):
            self.ckpt.watch(waiting)

    def logged(self, logs: dict[str, Any]) -> None:
        self._loss = logs.get("loss", self._loss)

    def between_steps(self) -> None:
        """Report the step that was completed since the last call, if any.

        The Trainer has already logged it, and run an evaluation if one was due.
        """
        if self.trainer.state.global_step > self.ckpt.step:
            self.ckpt.done(loss=self._loss)

    def ended(self) -> None:
        self.begin()  # needed if no steps remained when the run resumed
        self.between_steps()
        self.ckpt.finish()

    def callback(self) -> Any:
        from transformers import TrainerCallback

        session = self

        class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
            """Passes the Trainer's events on to the session."""

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                session.started()

            def on_epoch_begin(self, *_: Any, **__: Any) -> None:
                session.between_steps()

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                session.between_steps()

            def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
                session.logged(logs or {})

            def on_train_end(self, *_: Any, **__: Any) -> None:
                session.ended()

        return HuggingFaceCallback()
