"""Verify a checkpoint: its manifest, the sizes of its files, and optionally every byte.

This module does not import torch.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.disk.format import MANIFEST, CheckpointManifest, FileMark, parse, parse_step

_BLOCK = 8 << 20
_THREADS = 2


@dataclass(frozen=True)
class Checked:
    """A checkpoint's folder, its manifest (None if it is not valid), and its faults."""

    path: Path
    manifest: CheckpointManifest | None
    faults: tuple[str, ...]


def check(path: Path, every_byte: bool = True) -> Checked:
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return Checked(path, None, (f"{MANIFEST} {error}",))
    faults = [fault for name, mark in manifest.files.items() if (fault := _size_fault(path / name, mark))]
    if every_byte and not faults:
        faults = byte_faults(path, manifest.files)
    return Checked(path, manifest, tuple(faults))


def byte_faults(path: Path, files: Mapping[str, FileMark]) -> list[str]:
    """Read these files of a checkpoint in full and return the faults."""
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda item: _byte_fault(path / item[0], item[1]), files.items())
        return [fault for fault in found if fault]


def faults_of(path: Path, every_byte: bool = True) -> tuple[str, ...]:
    """Return the checkpoint's faults, each with its file; empty if it is intact."""
    return check(path, every_byte).faults


def read_manifest(path: Path) -> CheckpointManifest:
    """Read the manifest. If this folder has no valid manifest, raise ValueError with the reason."""
    try:
        text = (path / MANIFEST).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError("is not a manifest, or is damaged") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from error
    manifest = parse(text)
    if parse_step(path.name) not in (None, manifest.step):
        raise ValueError(f"is of step {manifest.step}")
    return manifest


def list_steps(folder: Path) -> list[Path]:
    """Return the folders that are named like checkpoints, newest first; none if `folder` does not exist."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = {name: step for name in names if (step := parse_step(name)) is not None}
    return [folder / name for name in sorted(steps, key=lambda name: steps[name], reverse=True)]


def _size_fault(file: Path, mark: FileMark) -> str:
    try:
        size = os.stat(file).st_size
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return "" if size == mark.bytes else f"{file.name} has {size} bytes instead of {mark.bytes}"


def _byte_fault(file: Path, mark: FileMark) -> str:
    try:
        found = _crc32(file)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return "" if found == mark.crc32 else f"{file.name} has checksum {found:08x} instead of {mark.crc32:08x}"


def _crc32(file: Path) -> int:
    crc = 0
    block = memoryview(bytearray(_BLOCK))
    with open(file, "rb", buffering=0) as stream:
        while read := stream.readinto(block):
            crc = zlib.crc32(block[:read], crc)
    return crc
