"""Where a rank computes and how it reaches the others: GPU and nccl where there is one for each, else CPU and gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dalsegno.bench.tcp import tcp_bytes_sent

_PATIENCE = timedelta(seconds=120)


class Place:
    """This rank's device, and a second group over gloo: its barriers keep no GPU busy while others are measured."""

    def __init__(self, wanted: str, meeting: str = "env://") -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        self.device = _device(wanted, self.local_size)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            self.backend, init_method=meeting, rank=self.rank, world_size=self.size, timeout=_PATIENCE
        )
        self._aside = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def meet(self) -> None:
        """Wait until all ranks are here and their devices idle."""
        self.finish()
        dist.barrier(group=self._aside)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tcp_bytes_sent(self) -> int | None:
        """None with nccl: it has better ways than TCP where it can, and a count of zero would mislead."""
        return tcp_bytes_sent() if self.backend == "gloo" else None

    def of_all_ranks(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._aside)
        return found

    def leave(self) -> None:
        dist.destroy_process_group()


def _device(wanted: str, local_size: int) -> Any:
    gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    if wanted == "cpu" or (wanted == "auto" and gpus < local_size):
        return torch.device("cpu")
    return torch.device("cuda", local_rank if local_rank < gpus else 0)  # srun may show each task its own GPU only
