"""Fetch and scan the layers of an image, several at once."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dalsegno.containers.http import TransferStopped
from dalsegno.containers.manifest import DamagedImage, Descriptor
from dalsegno.containers.sources import FoundImage, ImageSource
from dalsegno.containers.store import ImportProgress
from dalsegno.containers.tar import FileSlice, Stream, TarEntry, read_entries, unpacked

AT_ONCE = 4
_DAMAGED_HINT = "remove the stored layers with `dalsegno image gc --layers`, then try again"
_ENTRY_COST = 500  # memory of one entry in bytes, without its strings
_Task = TypeVar("_Task")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Layer:
    """A layer on this machine, and its entries.

    `blob.digest` is the digest of the scanned bytes, to verify a second read; "" if only this user can change the file.
    """

    blob: FileSlice
    entries: Sequence[TarEntry]


def fetch_layers(source: ImageSource, found: FoundImage, progress: ImportProgress) -> list[Layer]:
    """Fetch every layer, read its headers and check all known digests."""
    count = len(found.layers)
    here = sum(min(source.here(layer), layer.size) for layer in set(found.layers))
    progress.stage(f"fetching {count} layer{'s' * (count != 1)}", sum(layer.size for layer in found.layers), here)
    diff_ids = found.config.diff_ids
    if diff_ids and len(diff_ids) != len(found.layers):
        raise DamagedImage("the manifest and the configuration name different numbers of layers")
    wanted = [(each, diff_ids[number] if diff_ids else "") for number, each in enumerate(found.layers)]
    distinct = list(dict.fromkeys(wanted))  # an image may have the same empty layer many times
    limits = ImageLimits()

    def one(task: tuple[Descriptor, str], stop: threading.Event) -> Layer:
        return scan(source.layer(task[0], progress.advance, stop), task[1], stop, limits)

    at_hand = dict(zip(distinct, in_parallel(one, distinct), strict=True))
    return [at_hand[each] for each in wanted]


@dataclass
class ImageLimits:
    """Limits for an unpacked image, because a few compressed megabytes can unpack to more than any machine can store.

    Several threads count at once, so the limits are not exact.
    """

    unpacked: int = 1 << 40  # maximum size of all files in bytes
    headers: int = 2 << 30  # maximum memory of the list of files in bytes: about four million files

    def take_bytes(self, count: int) -> None:
        self.unpacked -= count
        if self.unpacked < 0:
            raise DamagedImage("the image unpacks to more than a tebibyte", hint="it may be built to fill disks")

    def take_entry(self, entry: TarEntry) -> TarEntry:
        self.headers -= _ENTRY_COST + len(entry.path) + len(entry.link) + sum(len(value) for _, value in entry.xattrs)
        if self.headers < 0:
            raise DamagedImage("the image has more files than fit into memory", hint="it may be built to fill memory")
        return entry


def scan(blob: FileSlice, diff_id: str, stop: threading.Event, limits: ImageLimits) -> Layer:
    """Read the entries of a layer, and check the digests of the packed bytes (in `blob`) and of the unpacked bytes
    (`diff_id`). An empty digest is not checked."""
    packed, plain = hashlib.sha256(), hashlib.sha256()
    needed = bool(blob.digest) or not blob.private
    raw = _through(blob.raw(), packed, stop) if needed else blob.raw()
    tar = _through(unpacked(raw), plain, stop, limits.take_bytes)
    entries = [limits.take_entry(entry) for entry in read_entries(Stream(tar))]
    for _ in raw:  # read to the end, because the digest also covers bytes after the packed stream
        pass
    for hash_, wanted in ((packed, blob.digest), (plain, diff_id)):
        if wanted and f"sha256:{hash_.hexdigest()}" != wanted:
            raise DamagedImage(f"a layer in {blob.path} does not match its digest {wanted}", hint=_DAMAGED_HINT)
    return Layer(replace(blob, digest="" if blob.private else f"sha256:{packed.hexdigest()}"), entries)


def _through(
    chunks: Iterable[bytes],
    digest: hashlib._Hash,
    stop: threading.Event,
    count: Callable[[int], None] = lambda _: None,
) -> Iterator[bytes]:
    for chunk in chunks:
        if stop.is_set():
            raise TransferStopped
        count(len(chunk))
        digest.update(chunk)
        yield chunk


def in_parallel(
    work: Callable[[_Task, threading.Event], _Value], tasks: Sequence[_Task], at_once: int = AT_ONCE
) -> list[_Value]:
    """Run `work` for each task, in at most `at_once` threads, and return the results in order.

    The first failure, or Ctrl-C, stops all other tasks. The threads are daemons, because a thread that waits for a
    silent registry must not keep the program from exiting.
    """
    todo: queue.SimpleQueue[tuple[int, _Task]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, _Value | None, BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()
    for numbered in enumerate(tasks):
        todo.put(numbered)

    def run() -> None:
        while not stop.is_set():
            try:
                number, task = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, work(task, stop), None))
            except BaseException as error:  # passed to the calling thread, which raises it
                done.put((number, None, error))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(min(at_once, len(tasks)))]
    for thread in threads:
        thread.start()
    values: dict[int, _Value] = {}
    try:
        while len(values) < len(tasks):
            number, value, error = done.get()
            if error is not None:
                raise error
            values[number] = value  # type: ignore[assignment]
    finally:
        stop.set()
    return [values[number] for number in range(len(tasks))]
