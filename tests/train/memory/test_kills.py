"""A writer killed at any moment leaves a complete step: the last one it committed, or the next one."""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.files import list_slots, sweep
from dalsegno.train.memory.slots import Slots
from dalsegno.train.memory.snapshot import SnapshotVerdict, checksum, open_snapshot, state_of, verify
from tests.train.memory.processes import fork
from tests.train.memory.states import filled

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]  # many processes: too slow for the unit part

LONG = bool(os.environ.get("DALSEGNO_LONG"))
ROUNDS = 400 if LONG else 20
_STEP = struct.Struct("<q")


def found(folder: Path) -> list[int]:
    """Return the stored steps, after checking that each is consistent."""
    snapshots = [open_snapshot(folder / str(slot)) for slot in list_slots("a", folder)]
    for snapshot in filter(None, snapshots):
        state = state_of(snapshot)
        assert state.step == state.values["step"] == snapshot.record.step
        assert all(bool((piece.tensor == state.step).all()) for piece in state.pieces)
        assert verify(snapshot.path) != SnapshotVerdict.DAMAGED
    return [snapshot.record.step for snapshot in snapshots if snapshot]


def write_for_ever(folder: Path, generation: int, resumed: int, elements: int, pipe: int) -> None:
    slots = Slots("a", 0, generation, resumed, folder=folder)
    for step in range(resumed + 1, 1 << 40):
        record = slots.write(filled(step, elements=elements))
        assert record
        os.write(pipe, _STEP.pack(step))
        if step % 3 == 0:
            checksum(slots.slots[slots.records().index(record)].path)


def killed_after(delay_s: float, act: Callable[[int], None]) -> int:
    """Run `act` in a process until its first output and `delay_s` longer, then kill it. Return its last step."""
    reads, writes = os.pipe()
    pid = fork(lambda: act(writes))
    os.close(writes)
    select.select([reads], [], [], 100)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reads, "rb") as output:
        data = output.read()
    return int(_STEP.unpack_from(data, len(data) // _STEP.size * _STEP.size - _STEP.size)[0])


def test_writer_killed_at_random_moments_leaves_a_complete_step(shm: Path) -> None:
    drawn, newest = random.Random(), 0
    for generation in range(1, ROUNDS + 1):
        elements = drawn.choice([20_000, 100_000, 100_000, 400_000])

        def act(pipe: int, generation: int = generation, resumed: int = newest, elements: int = elements) -> None:
            write_for_ever(shm, generation, resumed, elements, pipe)

        acknowledged = killed_after(drawn.uniform(0, 0.03), act)
        left = found(shm)
        assert max(left, default=0) >= max(acknowledged, newest), f"{left} after {acknowledged} and {newest}"
        newest = max(left, default=0)  # 0 before the first was written
    assert newest
    with closing(Slots("a", 0, ROUNDS + 1, newest, folder=shm)) as slots:
        slots.write(filled(newest + 1))  # the last writer may have been killed while it replaced a slot
    assert len(os.listdir(shm)) == 2, "nothing else is left"


@pytest.mark.parametrize("elements", [1000, 50_000], ids=["a slot that fits", "a slot that must grow"])
def test_writer_killed_at_every_line_leaves_a_complete_step(shm: Path, elements: int) -> None:
    """Cover all lines that a snapshot runs; the short form covers a random sample."""
    stride = 1 if LONG else 20
    line, dies = random.Random().randrange(stride), True
    while dies:
        sweep("a", shm)
        two_steps(shm)
        line += stride
        dies = killed_at_line(line, lambda: Slots("a", 0, 1, folder=shm).write(filled(3, elements=elements)))
        assert max(found(shm)) in ((2, 3) if dies else (3,))
    assert line > 100


def two_steps(folder: Path) -> None:
    slots = Slots("a", 0, 1, folder=folder)
    for step in (1, 2):
        slots.write(filled(step))
    slots.close()


def killed_at_line(number: int, act: Callable[[], Any]) -> bool:
    """Return whether the process was killed at that line, and had not ended before."""

    def traced() -> None:
        left = number

        def at(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal left
            if "dalsegno/train/memory" not in frame.f_code.co_filename:
                return None
            left -= event == "line"
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return at

        sys.settrace(at)
        act()

    _, status = os.waitpid(fork(traced), 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code != 0
