"""Pickles that can do nothing but make plain values: what a checkpoint of somebody else's is read with.

Unpickling runs whatever the pickle names. Here only containers, numbers, tensors, arrays and the classes of PyTorch's
checkpoint index may be named. That is all that state dicts hold, unless a script puts objects of its own into them.
"""

from __future__ import annotations

import io
import os
import pickle
import stat
from typing import Any

import torch

from dalsegno.train.errors import CheckpointError

TRUST = "DALSEGNO_TRUST_CHECKPOINTS"  # "1": load what others may have written, and run the code in it
_PLAIN = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "slice", "range", "dict", "list", "int", "float", "str"},
    "collections": {"OrderedDict", "defaultdict", "Counter", "deque"},
    "_codecs": {"encode"},
    "dalsegno.train.nested": {"Hole"},
    "torch": {"Size", "device"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_parameter"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
}  # fmt: skip


class NotPlain(CheckpointError):
    """There is more in it than plain values."""


def load_plain(raw: bytes) -> Any:
    """Unpickle plain values; `NotPlain` names the first thing that is none."""
    return _Unpickler(io.BytesIO(raw)).load()


def is_ours(fd: int) -> bool:
    """Whether nobody but this user and root can have written an open file, or its user has said to trust it."""
    found = os.fstat(fd)
    others_may_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return os.environ.get(TRUST) == "1" or (found.st_uid in (os.getuid(), 0) and not others_may_write)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        if (module, name) == ("builtins", "getattr"):
            return _get_member
        raise NotPlain(f"{module}.{name} is not a plain value")


def _load_storage(raw: bytes) -> Any:
    """torch's own of this name would unpickle anything."""
    return torch.load(io.BytesIO(raw), weights_only=True)


def _get_member(of: Any, name: str) -> Any:
    """Python 3.11 and later write a member of an enumeration as getattr(class, name)."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    if of is not _MEM_FORMAT_ENCODING:
        raise NotPlain(f"the attribute {name} of {of!r} is not a plain value")
    return _MEM_FORMAT_ENCODING[name]
