"""One blob from a registry into the store: goes on where it stopped, and is there only when its digest is right."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path
from typing import Protocol

from dalsegno.containers.damage import DamagedImage
from dalsegno.containers.decompress import CHUNK
from dalsegno.containers.http_client import Answer, Unreachable
from dalsegno.containers.manifest import Descriptor
from dalsegno.containers.squash import Advance
from dalsegno.system.files import explain, in_turn
from dalsegno.system.ownership import is_ours

_TRIES = 6  # without a single byte between them
_PAUSE_S = 0.2  # doubled each time


class Blobs(Protocol):
    """Where blobs come from."""

    def blob(self, digest: str, start: int = 0) -> Answer: ...


class Stopped(Exception):
    """Someone else failed, or the user pressed Ctrl-C."""


def fetch(source: Blobs, wanted: Descriptor, target: Path, advance: Advance, stop: threading.Event) -> bool:
    """Have the blob at `target`. Others who want the same one wait for it; what is cut short is gone on with later.

    True if it was checked now against its digest; False if it is of an earlier call, and was not read.
    """
    part = _part(target)
    with in_turn(target.with_name(f".{target.name}.lock")):
        if is_ours(target, {os.geteuid()}):
            advance(wanted.size)
            return False
        try:
            with contextlib.closing(_Download(source, wanted, part, advance, stop)) as download:
                download.run()
            os.replace(part, target)
            return True
        except OSError as error:
            part.unlink(missing_ok=True)  # a full disk needs its room back
            raise explain(error, target) from error
        except DamagedImage:
            part.unlink(missing_ok=True)
            raise


def brought(target: Path) -> int:
    """How many bytes of a blob are there, whole or in part."""
    for path in (target, _part(target)):
        with contextlib.suppress(OSError):
            return path.stat().st_size
    return 0


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


class _Download:
    """A file that grows, and the digest of what it has."""

    def __init__(self, source: Blobs, wanted: Descriptor, part: Path, advance: Advance, stop: threading.Event) -> None:
        self._source, self._wanted, self._advance, self._stop = source, wanted, advance, stop
        if not is_ours(part, {os.geteuid()}):
            part.unlink(missing_ok=True)
        self._handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._digest = hashlib.sha256()
        self._have = 0

    def close(self) -> None:
        os.close(self._handle)

    def run(self) -> None:
        self._take_what_is_there()
        resumed, idle = self._have > 0, 0
        while self._have < self._wanted.size:
            before = self._have
            try:
                self._more()
            except Unreachable:
                idle = 0 if self._have > before else idle + 1
                if idle >= _TRIES:
                    raise
                if self._stop.wait(_PAUSE_S * 2**idle):
                    raise Stopped from None
        if self._digest.hexdigest() != self._wanted.hex:
            hint = (
                "what an earlier try had left is removed: try again" if resumed else "try again; else ask who keeps it"
            )
            raise DamagedImage(f"a layer is not what its digest {self._wanted.digest} says", hint=hint)

    def _take_what_is_there(self) -> None:
        """Of an earlier call."""
        while self._have <= self._wanted.size and (chunk := os.read(self._handle, CHUNK)):
            self._digest.update(chunk)
            self._have += len(chunk)
        self._advance(self._have)
        if self._have > self._wanted.size:
            self._begin_again()

    def _begin_again(self) -> None:
        os.lseek(self._handle, 0, os.SEEK_SET)
        os.ftruncate(self._handle, 0)
        self._advance(-self._have)
        self._digest, self._have = hashlib.sha256(), 0

    def _more(self) -> None:
        with self._source.blob(self._wanted.digest, self._have) as answer:
            if self._have and answer.status != 206:  # a registry that cannot go on
                self._begin_again()
            while chunk := answer.read(CHUNK):
                if self._stop.is_set():
                    raise Stopped
                self._keep(chunk)
        if self._have < self._wanted.size:
            raise Unreachable("the registry stopped in the middle of a layer", hint="try again: what came is kept")

    def _keep(self, chunk: bytes) -> None:
        if self._have + len(chunk) > self._wanted.size:
            raise DamagedImage(f"layer {self._wanted.digest} is longer than the manifest says", hint="push it again")
        left = memoryview(chunk)
        while left:  # a nearly full disk takes a part
            left = left[os.write(self._handle, left) :]
        self._digest.update(chunk)
        self._have += len(chunk)
        self._advance(len(chunk))
