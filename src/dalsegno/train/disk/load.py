"""The newest whole checkpoint of a folder, and what is in it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from dalsegno.train.disk.files import told
from dalsegno.train.disk.manifest import Manifest
from dalsegno.train.disk.names import METADATA, SHELL, own_key
from dalsegno.train.disk.plain import TRUST, NotPlain, is_ours, load_plain
from dalsegno.train.disk.reading import ReadLock
from dalsegno.train.disk.verify import byte_faults, check, list_steps
from dalsegno.train.errors import CheckpointError


class Found:
    """A checkpoint that was found whole. It is not removed before `close`.

    `trust`: whether to run code that is in it. None: where nobody else can have written it.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: ReadLock, trust: bool | None) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self.step, self.world, self.run = manifest.step, manifest.world, manifest.run
        self._told, self._trusted = trust, trust is not False
        with told("cannot read", path), open(path / METADATA, "rb") as file:
            self._look_at(file)
            self._metadata = self.unpickle(file.read())

    def _look_at(self, file: IO[bytes]) -> None:
        """One file that others may have written is enough."""
        self._trusted = self._trusted and (self._told is True or is_ours(file.fileno()))

    def unpickle(self, raw: bytes) -> Any:
        """Load a pickle that is in this checkpoint."""
        if self._trusted:
            return pickle.loads(raw)
        try:
            return load_plain(raw)
        except NotPlain as error:
            raise CheckpointError(
                f"{self.path} holds more than tensors and plain values ({error})",
                hint=f"`ckpt convert --trust`, or {TRUST}=1 for training, loads it anyway and runs the code in it",
            ) from error

    @property
    def sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Size and type of every tensor in it."""
        items = self._metadata.state_dict_metadata.items()
        return {key: (tuple(item.size), item.properties.dtype) for key, item in items if hasattr(item, "chunks")}

    @property
    def values(self) -> list[str]:
        """The names of all that is not a tensor."""
        return [key for key, item in self._metadata.state_dict_metadata.items() if not hasattr(item, "chunks")]

    @property
    def shell(self) -> bytes:
        shell: bytes | None = self.value(SHELL)
        if shell is None:
            raise CheckpointError(f"{self.path} has tensors but no shell", hint="load it with torch's own loader")
        return shell

    def own(self, rank: int) -> bytes | None:
        """What that rank alone had; None if there was no such rank."""
        own: bytes | None = self.value(own_key(rank))
        return own

    def value(self, key: str) -> Any:
        """Anything that is not a tensor; None if it is not there."""
        info = next((info for index, info in self._metadata.storage_data.items() if index.fqn == key), None)
        if info is None:
            return None
        with told("cannot read", self.path), open(self.path / info.relative_path, "rb") as file:
            self._look_at(file)
            file.seek(info.offset)
            return torch.load(io.BytesIO(file.read(info.length)), weights_only=not self._trusted)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Reads into these tensors, whole ones or parts (DTensor): only the files and chunks they need."""
        from dalsegno.train.disk.fill import fill

        with told("cannot read", self.path):
            fill(self.path, self._metadata, tensors)

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Found:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_newest(folder: Path, warn: Callable[[str], None], trust: bool | None = None) -> Found | None:
    """The newest checkpoint that is whole to the last byte; damaged ones are told of and passed over.

    None if there has never been one. If there were some and none is whole, that is an error: to start from nothing
    without a word would throw away what can perhaps be mended.
    """
    damaged: list[str] = []
    found = newest_but(damaged, folder, warn, every_byte=True, trust=trust)
    if found is None and damaged:
        raise none_is_whole(folder, damaged)
    return found


def newest_but(
    damaged: list[str],
    folder: Path,
    warn: Callable[[str], None],
    every_byte: bool = False,
    trust: bool | None = None,
) -> Found | None:
    """The newest that is none of the damaged. Those that it finds to be so it adds to them, and tells of."""
    with told("cannot read", folder):
        for path in list_steps(folder):
            found, faults = _open_checked(path, every_byte, trust) if path.name not in damaged else (None, ())
            if found:
                return found
            if faults:
                warn(f"{path} is damaged and passed over: {'; '.join(faults)}")
                damaged.append(path.name)
    return None


def none_is_whole(folder: Path, damaged: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint in {folder} is whole: {', '.join(damaged)}",
        hint="`dalsegno ckpt verify` tells more; --fresh sets them aside and starts from the beginning",
    )


def open_checkpoint(path: Path, every_byte: bool = True, trust: bool | None = None) -> Found:
    """This checkpoint and no other. `every_byte=False` looks at sizes only: another rank has read all of it.

    `trust`: whether to run code that is in it. By default that depends on who can have written it.
    """
    with told("cannot read", path):
        found, faults = _open_checked(path, every_byte, trust)
    if found is None:
        raise CheckpointError(f"{path} is not whole: {'; '.join(faults) or 'it is gone'}")
    return found


def _open_checked(path: Path, every_byte: bool, trust: bool | None) -> tuple[Found | None, tuple[str, ...]]:
    """The checkpoint, or what is wrong with it; neither if it has been removed in this moment."""
    try:
        lock = ReadLock(path)
    except FileNotFoundError:
        return (None, check(path, every_byte=False).faults) if path.exists() else (None, ())
    try:
        checked = check(path, every_byte)
        faults = checked.faults
        if checked.manifest and not faults and not every_byte:  # what is unpickled here is read whole in any case
            index = {name: mark for name, mark in checked.manifest.files.items() if name == METADATA}
            faults = tuple(byte_faults(path, index))
        if checked.manifest and not faults:
            return Found(path, checked.manifest, lock, trust), ()
    except BaseException:
        lock.release()
        raise
    lock.release()
    return None, faults
