"""Find the newest intact checkpoint in a folder and read it."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import pickle
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.utils import _create_file_view

from dalsegno.train.disk.files import report_disk_errors
from dalsegno.train.disk.folder import ReadLock
from dalsegno.train.disk.format import METADATA, SHELL, CheckpointManifest, own_key
from dalsegno.train.disk.verify import byte_faults, check, list_steps
from dalsegno.train.errors import CheckpointError

# Restricted unpickling, for checkpoints that other users may have written

TRUST = "DALSEGNO_TRUST_CHECKPOINTS"  # "1": trust files that other users may have written, and run the code in them
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


class NotPlainValue(CheckpointError):
    """The pickle contains more than plain values."""


def load_plain(raw: bytes) -> Any:
    """Unpickle plain values; raise NotPlainValue with the name of the first value that is not plain."""
    return _Unpickler(io.BytesIO(raw)).load()


def is_ours(fd: int) -> bool:
    """Return whether only this user and root can have written the open file. Also return True if TRUST is set."""
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
        raise NotPlainValue(f"{module}.{name} is not a plain value")


def _load_storage(raw: bytes) -> Any:
    """Load a storage safely. torch's function of the same name would unpickle any object."""
    return torch.load(io.BytesIO(raw), weights_only=True)


def _get_member(owner: Any, name: str) -> Any:
    """Return an enum member, which Python 3.11 and later pickle as getattr(class, name)."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    if owner is not _MEM_FORMAT_ENCODING:
        raise NotPlainValue(f"the attribute {name} of {owner!r} is not a plain value")
    return _MEM_FORMAT_ENCODING[name]


# Finding and reading checkpoints


class FoundCheckpoint:
    """An intact checkpoint, locked against removal until `close`.

    `trust` says whether code in the checkpoint may run. If `trust` is None, the code may run only if no other user can
    have written the checkpoint.
    """

    def __init__(self, path: Path, manifest: CheckpointManifest, lock: ReadLock, trust: bool | None) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self.step, self.world, self.run = manifest.step, manifest.world, manifest.run
        self._trust, self._trusted = trust, trust is not False
        with report_disk_errors("cannot read", path), open(path / METADATA, "rb") as file:
            self._check_owner(file)
            self._metadata = self.unpickle(file.read())

    def _check_owner(self, file: IO[bytes]) -> None:
        """Stop trusting the whole checkpoint if other users may have written this file, which is one of its files."""
        self._trusted = self._trusted and (self._trust is True or is_ours(file.fileno()))

    def unpickle(self, raw: bytes) -> Any:
        """Unpickle data from this checkpoint. If the checkpoint is not trusted, accept only plain values."""
        if self._trusted:
            return pickle.loads(raw)
        try:
            return load_plain(raw)
        except NotPlainValue as error:
            raise CheckpointError(
                f"{self.path} holds more than tensors and plain values ({error})",
                hint=f"`ckpt convert --trust`, or {TRUST}=1 for training, loads it anyway and runs the code in it",
            ) from error

    @property
    def sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the size and type of every tensor."""
        items = self._metadata.state_dict_metadata.items()
        return {key: (tuple(item.size), item.properties.dtype) for key, item in items if hasattr(item, "chunks")}

    @property
    def values(self) -> list[str]:
        """Return the names of all entries that are not tensors."""
        return [key for key, item in self._metadata.state_dict_metadata.items() if not hasattr(item, "chunks")]

    @property
    def shell(self) -> bytes:
        shell: bytes | None = self.value(SHELL)
        if shell is None:
            raise CheckpointError(f"{self.path} was not written by Dal Segno", hint="load it with torch's own loader")
        return shell

    def own(self, rank: int) -> bytes | None:
        """Return the state that belonged to this rank alone; None if the rank did not exist."""
        own: bytes | None = self.value(own_key(rank))
        return own

    def value(self, key: str) -> Any:
        """Return an entry that is not a tensor; None if it does not exist."""
        info = next((info for index, info in self._metadata.storage_data.items() if index.fqn == key), None)
        if info is None:
            return None
        with report_disk_errors("cannot read", self.path), open(self.path / info.relative_path, "rb") as file:
            self._check_owner(file)
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), weights_only=not self._trusted)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill these tensors, which are full tensors or shards (DTensor).

        Only the files and chunks that they need are read.
        """
        with report_disk_errors("cannot read", self.path):
            fill(self.path, self._metadata, tensors)

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> FoundCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_newest(folder: Path, warn: Callable[[str], None], trust: bool | None = None) -> FoundCheckpoint | None:
    """Return the newest checkpoint of which every byte is intact. Warn about damaged ones and skip them.

    Return None if there is no checkpoint. If all are damaged, raise an error, because a silent start from scratch would
    discard data that may be repairable.
    """
    damaged: list[str] = []
    found = find_newest_except(damaged, folder, warn, every_byte=True, trust=trust)
    if found is None and damaged:
        raise all_damaged_error(folder, damaged)
    return found


def find_newest_except(
    damaged: list[str],
    folder: Path,
    warn: Callable[[str], None],
    every_byte: bool = False,
    trust: bool | None = None,
) -> FoundCheckpoint | None:
    """Return the newest checkpoint without faults, among those that are not in `damaged`; None if there is none.

    Warn about damaged checkpoints and add them to the list. With `every_byte`, check all bytes and not only sizes.
    """
    with report_disk_errors("cannot read", folder):
        for path in list_steps(folder):
            found, faults = _open_checked(path, every_byte, trust) if path.name not in damaged else (None, ())
            if found:
                return found
            if faults:
                warn(f"{path} is damaged, skipping it: {'; '.join(faults)}")
                damaged.append(path.name)
    return None


def all_damaged_error(folder: Path, damaged: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"all checkpoints in {folder} are damaged: {', '.join(damaged)}",
        hint="`dalsegno ckpt verify` shows details; --fresh moves them aside and starts from scratch",
    )


def open_checkpoint(path: Path, every_byte: bool = True, trust: bool | None = None) -> FoundCheckpoint:
    """Open this checkpoint. Raise CheckpointError if it is damaged.

    With `every_byte=False`, only the metadata and the sizes of files are checked, because other ranks check the rest.
    `trust` says whether code in the checkpoint may run. By default, the code may run only if no other user can have
    written the checkpoint.
    """
    with report_disk_errors("cannot read", path):
        found, faults = _open_checked(path, every_byte, trust)
    if found is None:
        raise CheckpointError(f"{path} is damaged: {'; '.join(faults) or 'it no longer exists'}")
    return found


def _open_checked(path: Path, every_byte: bool, trust: bool | None) -> tuple[FoundCheckpoint | None, tuple[str, ...]]:
    """Return the checkpoint, or None and its faults. If it was removed in the meantime, there are no faults."""
    try:
        lock = ReadLock(path)
    except FileNotFoundError:
        return (None, check(path, every_byte=False).faults) if path.exists() else (None, ())
    try:
        checked = check(path, every_byte)
        faults = checked.faults
        if (
            checked.manifest and not faults and not every_byte
        ):  # the metadata is unpickled, so it is always checked in full
            index = {name: mark for name, mark in checked.manifest.files.items() if name == METADATA}
            faults = tuple(byte_faults(path, index))
        if checked.manifest and not faults:
            return FoundCheckpoint(path, checked.manifest, lock, trust), ()
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None, faults


def fill(checkpoint: Path, metadata: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill the tensors with torch's own planner and reader, without a process group."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    _refuse_misfits(metadata.state_dict_metadata, tensors)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings(), _report_torch_errors(checkpoint):
        warnings.filterwarnings("ignore", message="torch.distributed is")  # reading without a process group is intended
        dcp.load(dict(tensors), storage_reader=MappedReader(checkpoint, metadata), planner=planner, no_dist=True)


@contextlib.contextmanager
def _report_torch_errors(checkpoint: Path) -> Iterator[None]:
    """Turn torch's error, which is a BaseException, into a CheckpointError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        why = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        raise CheckpointError(f"cannot read {checkpoint}: {why}") from error


def _refuse_misfits(items: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    missing = sorted(key for key in tensors if not hasattr(items.get(key), "chunks"))
    if missing:
        raise CheckpointError(f"the checkpoint has no {_few(missing)}", hint="has the model or the optimizer changed?")
    for key, tensor in tensors.items():
        if tuple(items[key].size) != tuple(tensor.shape):
            was, now = tuple(items[key].size), tuple(tensor.shape)
            raise CheckpointError(f"{key} has size {now}, but {was} in the checkpoint", hint="has the model changed?")


def _few(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


# Large tensors are read from the mapped file. torch.load would read each chunk in full into new memory and then copy
# it. Here only the pages that a target needs are read, and they are copied once.

_LARGE = 1 << 20  # minimum size in bytes; mapping smaller tensors saves no time
_DATA = "data/0"  # torch.save's name for the first storage of a file


class MappedReader(FileSystemReader):  # type: ignore[misc]
    """torch's reader with a faster path for large chunks.

    It can read only checkpoints in our format, with contiguous chunks.
    """

    def __init__(self, checkpoint: Path, metadata: Any) -> None:
        super().__init__(checkpoint)
        self._items = metadata.state_dict_metadata

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the large chunks, and leave the rest of the plan to torch."""
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
    """Return a mapped chunk; None if its layout differs from the one that we write."""
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
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # the buffer is only read
        return torch.frombuffer(mapping, dtype=dtype, count=elements, offset=info.offset + start).view(sizes)
