"""Copy tensors from a GPU into a slot while training continues, with pinned memory and a separate stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterable, Sequence

import torch

from dalsegno.train.memory.layout import aligned
from dalsegno.train.memory.slots import Pair, Slot, SnapshotDraft, copy_now

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class PendingCopies:
    """Copies in progress. Commit the snapshot only when `done` returns True, or after `wait`."""

    def __init__(self, copied: torch.cuda.Event, sources: Sequence[torch.Tensor], staged: Sequence[Pair]) -> None:
        self._copied = copied
        self._sources = sources  # referenced, so that they are not freed during the copy
        self._stream_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_s = 0.0
        self._error: BaseException | None = None
        self._drain = threading.Thread(target=self._empty, args=(staged,), daemon=True) if staged else None
        if self._drain:
            self._drain.start()

    def done(self) -> bool:
        """Return whether the copies are complete, without waiting."""
        return bool(self._copied.query()) and not (self._drain and self._drain.is_alive())

    def wait(self) -> None:
        started = time.perf_counter()
        self._copied.synchronize()
        if self._drain:
            self._drain.join()
        if self._error is not None:
            raise self._error
        self.add_stall(time.perf_counter() - started)

    def before_change(self) -> None:
        """Make the stream that changes the tensors wait for the copies. The host does not wait."""
        stream = torch.cuda.current_stream()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(self._copied)
        after.record(stream)
        self._stream_waits.append((before, after))

    def add_stall(self, seconds: float) -> None:
        self._host_s += seconds

    def stall_s(self) -> float:
        """Return how long the copies have stalled this process and the training stream so far."""
        waits = self._stream_waits
        on_device = (float(before.elapsed_time(after)) / 1000 for before, after in waits if after.query())
        return self._host_s + sum(on_device)

    def _empty(self, staged: Sequence[Pair]) -> None:
        try:
            self._copied.synchronize()
            copy_now(staged)
        except BaseException as error:  # raised again by `wait`, so that an incomplete copy is not committed
            self._error = error


class Copier:
    """Copies the tensors of one device. Each slot is pinned once. If pinning fails, copies use one pinned buffer."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self._stream = torch.cuda.Stream(self.device)
        self._pinned: dict[int, torch.Tensor] = {}  # pinned memory by its address
        self._refused = False
        self._staging: torch.Tensor | None = None
        self._last: PendingCopies | None = None

    def pin(self, slot: Slot) -> bool:
        """Pin the slot's memory; return False if the driver refuses.

        The memory is unpinned before the slot is unmapped.
        """
        memory = slot.views.whole
        address = memory.data_ptr()
        if address in self._pinned or self._refused:
            return not self._refused
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostRegister(address, memory.numel(), _PORTABLE)) != 0:
                self._clear_error()
                self._refused = True
                return False
        self._pinned[address] = memory
        slot.on_release = lambda: self._unpin(address)
        return True

    def start(self, draft: SnapshotDraft, steady: Container[int] | None = None) -> PendingCopies:
        """Start copying a snapshot's tensors into its slot. Commit the draft when the copies are complete.

        `steady` contains the addresses of tensors that do not change before `before_change`; None means all tensors.
        The other tensors are copied first, and the training stream waits for their copies.
        """
        self.pin(draft.slot)
        pairs = draft.pairs
        if steady is None:
            return self.copy(pairs)
        first = [pair for pair in pairs if pair[1].data_ptr() not in steady]
        return self.copy([pair for pair in pairs if pair[1].data_ptr() in steady], first)

    def copy(self, pairs: Iterable[Pair], first: Sequence[Pair] = ()) -> PendingCopies:
        """Start copying the values that the training stream has computed so far.

        The training stream waits until the pairs in `first` are copied. Tensors in host memory are copied at once.
        """
        started = time.perf_counter()
        if self._last is not None:
            self._last.wait()  # two concurrent copies would share one staging buffer
        pairs = [(target, source) for target, source in (*first, *pairs) if source.numel()]
        waited_for = {id(source) for _, source in first}
        on_device = [(target, source) for target, source in pairs if source.device == self.device]
        staged = self._staged(on_device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        hurried = sum(id(source) in waited_for for _, source in on_device)
        sources = self._send((staged or on_device)[:hurried])
        if hurried:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        sources += self._send((staged or on_device)[hurried:])
        copied = torch.cuda.Event()
        copied.record(self._stream)
        copy_now((target, source) for target, source in pairs if source.device != self.device)
        back = [(target, stage) for (target, _), (stage, _) in zip(on_device, staged)]
        self._last = PendingCopies(copied, sources, back)
        self._last.add_stall(time.perf_counter() - started)
        return self._last

    def before_change(self) -> None:
        """Make the training stream wait for the copies. Call this before parameters change, as in a step pre-hook."""
        if self._last is not None and not self._last.done():
            self._last.before_change()

    def _send(self, pairs: Iterable[Pair]) -> list[torch.Tensor]:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            sources = []
            for target, source in pairs:
                sources.append(source.contiguous())  # a strided tensor would be copied synchronously
                target.copy_(sources[-1], non_blocking=True)
            return sources

    def _staged(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs with a pinned buffer as their targets; an empty list if all targets are pinned already."""
        if all(self._is_pinned(target) for target, _ in pairs):
            return []
        total = sum(_aligned_bytes(source) for _, source in pairs)
        if self._staging is None or self._staging.numel() < total:
            self._staging = None  # free the smaller buffer first
            self._staging = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        at, staged = 0, []
        for target, source in pairs:
            raw = self._staging[at : at + target.numel() * target.element_size()]
            staged.append((raw.view(target.dtype).view(target.shape), source))
            at += _aligned_bytes(source)
        return staged

    def _is_pinned(self, target: torch.Tensor) -> bool:
        at = target.data_ptr()
        return any(start <= at < start + memory.numel() for start, memory in self._pinned.items())

    def _unpin(self, address: int) -> None:
        if self._last is not None:
            self._last.wait()
        if self._pinned.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)

    def _clear_error(self) -> None:
        """Consume the error of a failed call, which the CUDA runtime would return to the next caller."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError:
            return


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return aligned(tensor.numel() * tensor.element_size())
