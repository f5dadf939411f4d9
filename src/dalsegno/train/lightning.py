"""Train with Lightning and resume exactly: `fit(trainer, model, folder, …)` replaces `trainer.fit(model, …)`.

Lightning restores its loops, optimizers and callbacks from a checkpoint dict, as it would from one of its own files.
The Checkpointer saves that dict, the model, the random states and the position in the data. Lightning itself does not
restore a position within an epoch.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from dalsegno.train.checkpointer import Checkpointer
from dalsegno.train.errors import CheckpointError
from dalsegno.train.options import Folder
from dalsegno.train.rank_state import DataPlace, find_place
from dalsegno.train.resume import fix_layout
from dalsegno.train.state import LateState


def fit(trainer: Any, model: Any, folder: Folder, *loaders: Any, options: Any = None, **data: Any) -> None:
    """Train as `trainer.fit(model, …)` does. Resume from the folder if a state is saved there.

    `loaders` and `data` are the loaders or the datamodule of `trainer.fit`. `options` are those of the Checkpointer, as
    a dict: `disk_every`, `memory_every`, `keep` and so on.
    """
    if "ckpt_path" in data:
        raise CheckpointError("fit() resumes by itself", hint="leave out ckpt_path")
    session = FitSession(trainer, model, folder, options or {})
    callback = session.callback()
    trainer.callbacks.append(callback)  # last, so that other callbacks have seen a step before it is saved
    strategy = trainer.strategy
    plain_io, plain_process = strategy.checkpoint_io, strategy.process_dataloader
    try:
        strategy.process_dataloader = lambda loader: session.bind(plain_process(loader))
        strategy.checkpoint_io = session.checkpoint_io(plain_io)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")  # `bind` makes it resumable
            trainer.fit(model, *loaders, ckpt_path=str(session.ckpt.folder) if session.ckpt.resumed else None, **data)
    finally:
        strategy.process_dataloader, strategy.checkpoint_io = plain_process, plain_io
        trainer.callbacks.remove(callback)
        session.ckpt.end()


class LoaderPlace:
    """The position in the train loader.

    The saved position is loaded before Lightning creates the loader. It is kept here until `bind` gets the loader.
    """

    def __init__(self) -> None:
        self._place: DataPlace | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def bound(self) -> bool:
        return self._place is not None

    @property
    def between_epochs(self) -> bool:
        return self._loaded is None or not self._loaded["samples"]

    def bind(self, loader: Any) -> None:
        self._place = find_place(loader)
        if self._place is not None and self._loaded is not None:
            self._place.load_state_dict(self._loaded)

    def batch_done(self, epoch: int, last: bool) -> None:
        """Record a batch. `last` says whether it was the last batch of the epoch."""
        if self._place is not None and last:
            self._place.finish(epoch)
        elif self._place is not None:
            self._place.step_done(None)

    def state_dict(self) -> dict[str, Any]:
        return self._place.state_dict() if self._place is not None else {"samples": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state if "seed" in state else None


class FitSession:
    """One call of `fit`: the trainer, its Checkpointer and the saved state."""

    def __init__(self, trainer: Any, model: Any, folder: Folder, options: dict[str, Any]) -> None:
        self.trainer, self.model = trainer, model
        if trainer.world_size > 1 and not torch.distributed.is_initialized():
            trainer.strategy.setup_environment()  # `trainer.fit` then uses this process group
        self._place = LoaderPlace()
        self._checkpoint = LateState(self._take, lambda: trainer.optimizers)
        self.ckpt = Checkpointer(folder, model=model, lightning=self._checkpoint, data=self._place, **options)

    def _take(self) -> dict[str, Any]:
        """Return Lightning's checkpoint without the weights, which the Checkpointer takes from the model.

        Return an empty dict before `trainer.fit` has begun.
        """
        if self.trainer.lightning_module is None:
            return {}
        checkpoint: dict[str, Any] = self.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        del checkpoint["state_dict"]
        return checkpoint

    def checkpoint_io(self, plain: Any) -> Any:
        """Return a plugin that gives Lightning the state that the Checkpointer loaded. `plain` handles other files."""
        from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

        session = self

        class SavedState(_WrappingCheckpointIO):  # type: ignore[misc]
            def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                self.checkpoint_io.save_checkpoint(*args, **kwargs)

            def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
                saved = session._checkpoint.claim() if str(path) == str(session.ckpt.folder) else None
                if saved is None:
                    return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)
                return {**saved, "state_dict": session.model.state_dict()}

        return SavedState(plain)

    def bind(self, loader: Any) -> Any:
        """Return the loader. If it is the train loader, track the position in it.

        Lightning calls this for each loader, before it reads from the loader.
        """
        if self.trainer.training:
            if self._place.bound:
                raise CheckpointError("fit() supports one train loader", hint="combine the datasets in one loader")
            self._place.bind(loader)
            if self._place.between_epochs:
                self.begin()  # restore random states now: the loader draws its seed next, as in the interrupted run
        return loader

    def begin(self) -> None:
        self.ckpt.begin()

    def started(self) -> None:
        fix_layout(self.trainer.strategy.model)
        self.ckpt.watch(self.trainer.strategy.model)
        self.begin()

    def batch_ended(self, output: Any) -> None:
        trainer = self.trainer
        self._place.batch_done(trainer.current_epoch, trainer.is_last_batch)
        if trainer.global_step > self.ckpt.step:  # the step is complete: no gradients are being accumulated
            loss = output.get("loss") if isinstance(output, dict) else output
            self.ckpt.done(loss=loss)

    def ended(self) -> None:
        self.begin()  # needed if no steps remained when the run resumed
        self.ckpt.finish()

    def callback(self) -> Any:
        from lightning.pytorch import Callback

        session = self

        class LightningCallback(Callback):  # type: ignore[misc]
            """Passes Lightning's events on to the session."""

            def on_train_start(self, trainer: Any, module: Any) -> None:
                session.started()

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                session.batch_ended(outputs)

            def on_train_end(self, trainer: Any, module: Any) -> None:
                session.ended()

        return LightningCallback()
