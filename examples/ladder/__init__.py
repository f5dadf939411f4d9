"""Data-parallel training from first principles: seven ways to average gradients, from naive to torch's own.

Read the rungs in the order of `RUNGS`. All of them use the same loop (`train.py`), communicate through the same counted
interface (`wire.py`) and produce the same gradients. They differ in how many messages they send, and when.
"""

from __future__ import annotations

from .flat_buckets import FlatBuckets
from .gather import GatherToFirst
from .overlap import Overlapped
from .per_parameter import PerParameter
from .ring import Ring
from .rung import Rung
from .torch_data_parallel import TorchDataParallel
from .torch_ddp import TorchDDP

RUNGS: dict[str, type[Rung]] = {
    "gather": GatherToFirst,
    "per-parameter": PerParameter,
    "buckets": FlatBuckets,
    "overlap": Overlapped,
    "ring": Ring,
    "data-parallel": TorchDataParallel,
    "ddp": TorchDDP,
}

__all__ = ["RUNGS", "Rung"]
