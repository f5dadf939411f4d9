"""DDP sums gradients in the same order in every life of a run.

DDP lays its buckets out anew after its first iteration, and so sums in another order from the second one on. A run
that was restarted would have its second "first" iteration at another step than the undisturbed run, and end with
slightly other weights. We have DDP lay them out before the first iteration, in every life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def fix_layout(model: torch.nn.Module) -> bool:
    """True if the layout of a DDP model is fixed from now on (or was never going to change)."""
    reducer: Any = getattr(model, "reducer", None)
    if reducer is None or getattr(model, "find_unused_parameters", False):
        return True
    if not (hasattr(reducer, "_push_all_rebuilt_params") and hasattr(reducer, "_rebuild_buckets")):
        return False
    reducer._push_all_rebuilt_params()
    reducer._rebuild_buckets()
    return True


def fix_layouts(objects: Iterable[Any], warn: Callable[[str], None]) -> None:
    """Of all models among them."""
    models = [each for each in objects if isinstance(each, torch.nn.Module)]
    if not all([fix_layout(model) for model in models]):
        warn("this torch does not let DDP's buckets be fixed: a resumed run may differ in the last bits")
