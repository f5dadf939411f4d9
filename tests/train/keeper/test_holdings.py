"""The snapshots of a node are listed without torch, whatever other files there are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dalsegno.train.keeper.holdings import holdings
from dalsegno.train.memory import slots
from dalsegno.train.memory.files import SlotName
from dalsegno.train.memory.slots import Slot, Slots
from dalsegno.train.memory.snapshot import Incoming, checksum, open_snapshot, pack_part
from tests.train.memory.states import filled


def test_holdings_list_snapshots_and_copies_but_not_partial_ones(shm: Path) -> None:
    slots = Slots("a", 2, 3, folder=shm)
    slots.write(filled(7, rank=2, world=4))
    slots.write(filled(8, rank=2, world=4))
    checksum(slots.slots[0].path)
    snapshot = open_snapshot(slots.slots[1].path)
    assert snapshot
    header, part = pack_part(snapshot)
    coming = Incoming(shm / str(SlotName("a", 2, 0, copy=True)), header)
    assert len(holdings("a", shm)) == 2
    coming.buffer[:] = part
    coming.commit()
    listed = [(one.record.step, one.copy, one.own, one.shared, one.summed) for one in holdings("a", shm)]
    assert listed == [(7, False, True, True, True), (7 + 1, True, True, False, True), (8, False, True, True, False)]


def test_holdings_ignore_files_that_are_not_valid_snapshots_of_the_run(shm: Path) -> None:
    slots.write(Slot(shm / str(SlotName("b", 0, 0))), filled(1), generation=1)
    slots.write(Slot(shm / str(SlotName("a", 1, 0))), filled(1, rank=0), generation=1)
    slots.write(Slot(shm / str(SlotName("a", 0, 0))), filled(1), generation=1)
    with (shm / str(SlotName("a", 0, 0))).open("r+b") as file:
        file.truncate(1000)
    (shm / str(SlotName("a", 0, 1))).write_bytes(b"")
    (shm / "else").write_bytes(b"x" * 5000)
    assert holdings("a", shm) == [] and holdings("a", shm / "nowhere") == []


def test_holdings_does_not_import_torch() -> None:
    code = "import sys, dalsegno.train.keeper.holdings, dalsegno.train.keeper; print('torch' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert output.stdout == "False\n"
