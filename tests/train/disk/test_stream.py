"""A file whose size and checksum are computed while it is written."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.files import ChecksummedFile
from dalsegno.train.disk.format import FileMark


@pytest.mark.parametrize("sizes", [[], [0], [1, 2, 3], [1 << 20, 5], [5, (33 << 20) + 1, 5, 1 << 20], [700_000] * 7])
def test_mark_matches_the_file(tmp_path: Path, sizes: list[int]) -> None:
    chance = random.Random(1)
    pieces = [chance.randbytes(size) for size in sizes]
    with ChecksummedFile(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
        mark = file.finish()
    written = (tmp_path / "file").read_bytes()
    assert written == b"".join(pieces)
    assert mark == FileMark(len(written), zlib.crc32(written))


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        ChecksummedFile(tmp_path / "file")
