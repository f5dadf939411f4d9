"""Convert a checkpoint to a single file and back. Report values that the other format cannot hold."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dalsegno.train.disk.commit import commit
from dalsegno.train.disk.files import ChecksummedFile, report_disk_errors, sync_folder
from dalsegno.train.disk.folder import lock_folder
from dalsegno.train.disk.load import FoundCheckpoint
from dalsegno.train.disk.write import write_share
from dalsegno.train.errors import CheckpointError
from dalsegno.train.state import rebuild_state, take

NOTE = "dalsegno"  # key of the entry that holds the step in a single file
_NO_PICKLE = (
    "Unsupported operand",
    "invalid load key",
    "truncated",
)  # error messages of unpicklers for files that are not pickles
_OWN = "the state of each rank: random states, position in the data"


def to_torch_file(found: FoundCheckpoint, target: Path) -> list[str]:
    """Write a file for torch.load with the nested state dicts.

    Return descriptions of the values that the file lacks.
    """
    try:
        nested = rebuild_state(found.shell, _tensors(found), found.unpickle)
    except (ImportError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{found.path} holds objects of your own classes: {error}", "set PYTHONPATH") from error
    _write_beside(target, lambda path: _torch_save({**nested, NOTE: {"step": found.step}}, path))
    return [_OWN]


def _torch_save(value: object, path: Path) -> None:
    """Save through our own file object, because torch's error for a full disk does not name the cause."""
    with ChecksummedFile(path) as file:
        torch.save(value, file)
        file.finish()


def to_safetensors(found: FoundCheckpoint, target: Path) -> list[str]:
    """Write a safetensors file with all tensors by name. Return descriptions of the values that the file lacks."""
    save_file = _safetensors().save_file
    from safetensors import SafetensorError

    tensors, metadata = _tensors(found), {"format": "pt", "step": str(found.step)}
    try:
        _write_beside(target, lambda path: save_file(tensors, path, metadata=metadata))
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {target}: {error}", hint="is there enough space?") from error
    values = [key for key in found.values if not key.startswith(f"{NOTE}.")]
    return [*([f"{len(values)} values that are not tensors: {_few(values)}"] if values else []), _OWN]


def from_torch_file(source: Path, folder: Path, step: int | None, under: str, trust: bool) -> Path:
    """Create a checkpoint from a file that torch.load can read, and return its folder."""
    try:  # `mmap` is false for files of an older torch.save, which cannot be mapped
        nested = torch.load(source, map_location="cpu", weights_only=not trust, mmap=zipfile.is_zipfile(source))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        if isinstance(error, pickle.UnpicklingError) and not any(text in str(error) for text in _NO_PICKLE):
            hint = "--trust loads it anyway and runs the code in it"
            raise CheckpointError(f"{source} holds more than tensors and plain values", hint) from error
        raise CheckpointError(f"{source} is not a torch.save file, or is damaged") from error
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"{source} holds a {type(nested).__name__}", hint="it must be a dict of state dicts")
    note = nested.get(NOTE, {})
    state = {key: value for key, value in nested.items() if key != NOTE}
    return _save(folder, {under: state} if under else state, note.get("step", 0) if step is None else step)


def from_safetensors(source: Path, folder: Path, step: int | None, under: str) -> Path:
    """Create a checkpoint from the tensors in a safetensors file, and return its folder.

    If `under` is given, all tensors become part of the object with that name. Otherwise the tensor `model.0.weight`
    becomes `0.weight` of the object `model`.
    """
    with _safetensors_file(source) as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is not a mapping
        noted = int((file.metadata() or {}).get("step", 0))
    nested: dict[str, Any] = {under: tensors} if under else {}
    for key, tensor in tensors.items() if not under else ():
        name, _, rest = key.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = tensor
        else:
            nested[name] = tensor
    return _save(folder, nested, noted if step is None else step)


def _save(folder: Path, nested: Mapping[str, Any], step: int) -> Path:
    with report_disk_errors("cannot write to", folder):
        os.makedirs(folder, exist_ok=True)
    run, generation = f"convert-{os.getpid()}", 1
    # Without the lock, another run that commits would remove our partial files.
    lock = lock_folder(folder, run, lambda warning: None)
    try:
        write_share(folder, take(nested, None, step, 0, 1), run, generation)
        return commit(folder, step, 1, run, generation, grant=lambda: True, keep=10**9)
    finally:
        lock.release()


def _tensors(found: FoundCheckpoint) -> dict[str, torch.Tensor]:
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in found.sizes.items()}
    found.fill(tensors)
    return tensors


def _write_beside(target: Path, write: Any) -> None:
    """Write a temporary file and rename it, so that the target is complete or absent."""
    beside = target.with_name(f".{target.name}.new")
    try:
        with report_disk_errors("cannot write", target):
            beside.unlink(missing_ok=True)  # a killed process may have left this file
            write(beside)
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(beside, target)
            sync_folder(target.parent)
    finally:
        beside.unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise CheckpointError("safetensors is not installed", hint="pip install safetensors") from error
    return safetensors.torch


def _safetensors_file(source: Path) -> Any:
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(source, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{source} is not a safetensors file: {error}") from error


def _few(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")
