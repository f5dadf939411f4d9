"""Decompressing layers, and data that is not a layer."""

import gzip
import lzma
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.tar import FileSlice, unpacked
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.system.processes import Sink, through

PLAIN = os.urandom(300_000) + bytes(3_000_000)


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout


def pieces(data: bytes, size: int = 70_000) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstd, bytes, lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])]
)
def test_compressed_data_is_decompressed(pack: object):
    assert b"".join(unpacked(pieces(pack(PLAIN)))) == PLAIN  # type: ignore[operator]


def test_highly_compressed_chunk_is_decompressed_in_parts():
    assert max(map(len, unpacked(pieces(gzip.compress(bytes(50_000_000)))))) <= 4 << 20


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_truncated_or_changed_data_is_damaged(pack: object):
    packed = pack(PLAIN)  # type: ignore[operator]
    for data in (packed[:-5], packed[: len(packed) // 2], packed[:-2000] + b"x" * 2000):
        with pytest.raises(DamagedImage, match="cannot be unpacked"):
            list(unpacked(pieces(data)))


def test_unsupported_compression_is_named():
    with pytest.raises(DamagedImage, match="packed with xz"):
        unpacked(iter([lzma.compress(b"x")]))


def test_file_slice_reads_part_of_a_file(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"0123456789")
    assert FileSlice(tmp_path / "file", 2, 3).read(3) == b"234"
    assert FileSlice(tmp_path / "file", 8).read(9) == b"89"
    assert FileSlice(tmp_path / "file", 8, 0).read(9) == b""
    with pytest.raises(DamagedImage, match="longer than 9 bytes"):
        FileSlice(tmp_path / "file").read(9)


def test_filter_ends_when_its_output_is_not_read_to_the_end():
    stream = through(["cat"], pieces(PLAIN))
    assert next(stream)
    stream.close()  # type: ignore[attr-defined]


def test_error_in_the_input_of_a_filter_is_raised_to_its_reader():
    def broken() -> Iterator[bytes]:
        yield b"x"
        raise DamagedImage("broken")

    with pytest.raises(DamagedImage, match="broken"):
        list(through(["cat"], broken()))
    with pytest.raises(DalsegnoError, match="is not installed"):
        list(through(["no-such-program"], iter([])))


def test_sink_reports_the_stderr_of_a_failed_program():
    with (
        pytest.raises(CommandFailed, match="no more") as caught,
        Sink(["sh", "-c", "echo no more >&2; exit 3"]) as sink,
    ):
        for _ in range(100):
            sink.write(bytes(100_000))
    assert caught.value.command_exit_code == 3
    with pytest.raises(KeyboardInterrupt), Sink(["sleep", "100"]):
        raise KeyboardInterrupt
