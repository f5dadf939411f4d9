"""Large tensors straight from the mapped file: torch.load would read each chunk as a whole into fresh memory, and copy
it from there. Here only the pages that a target needs are read, and copied once.
"""

from __future__ import annotations

import math
import mmap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.utils import _create_file_view

_LARGE = 1 << 20  # bytes: below this there is nothing to win
_DATA = "data/0"  # what torch.save calls the first storage of a file


class MappedReader(FileSystemReader):  # type: ignore[misc]
    """torch's reader, with a shorter way for what is large. It reads files that we wrote: every chunk contiguous."""

    def __init__(self, checkpoint: Path, metadata: Any) -> None:
        super().__init__(checkpoint)
        self._items = metadata.state_dict_metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Reads what is large, and leaves the rest of the plan to torch."""
        rest = [item for item in plan.items if not self._copied(item, planner)]
        return super().read_data(replace(plan, items=rest), planner)

    def _copied(self, item: Any, planner: Any) -> bool:
        info, known = self.storage_data[item.storage_index], self._items[item.storage_index.fqn]
        if info.length < _LARGE or not hasattr(known, "chunks"):
            return False
        sizes = next(chunk.sizes for chunk in known.chunks if chunk.offsets == item.storage_index.offset)
        chunk = _mapped_chunk(Path(self.path) / info.relative_path, info, known.properties.dtype, sizes)
        if chunk is None:
            return False
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)
        return True


def _mapped_chunk(path: Path, info: Any, dtype: torch.dtype, sizes: torch.Size) -> torch.Tensor | None:
    """None if it does not lie there as we write it."""
    elements = math.prod(sizes)
    with open(path, "rb") as file:
        archive = torch._C.PyTorchFileReader(_create_file_view(file, info.offset, info.length))
        if not archive.has_record(_DATA):
            return None
        start = archive.get_record_offset(_DATA)
        if start + elements * dtype.itemsize > info.length:
            return None
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
        return torch.frombuffer(mapping, dtype=dtype, count=elements, offset=info.offset + start).view(sizes)
