"""The library for training scripts.

Names are imported on first use. The launcher, the controller and the node agents import `dalsegno.train.contract`.
They must not import torch with it: that takes seconds, and torch may be missing on their hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dalsegno.train.checkpointer import Checkpointer
    from dalsegno.train.errors import CheckpointError
    from dalsegno.train.step_report import report

__all__ = ["CheckpointError", "Checkpointer", "report"]

_HOMES = {"Checkpointer": "checkpointer", "CheckpointError": "errors", "report": "step_report"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
