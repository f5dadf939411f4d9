"""The manifest survives parsing, and a change of any byte is detected."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dalsegno.train.disk.format import CheckpointManifest, FileMark, parse, render

MANIFEST = CheckpointManifest(
    step=1234,
    world=2,
    run="gpt-k3f9x",
    generation=3,
    torch="2.13.0",
    time="2026-01-31T23:59:59+00:00",
    files={"__0_0.distcp": FileMark(1000, 0xDEADBEEF), ".metadata": FileMark(77, 5)},
)


def test_manifest_survives_parsing() -> None:
    assert parse(render(MANIFEST)) == MANIFEST
    assert MANIFEST.bytes == 1077


@given(some.integers(0, len(render(MANIFEST).encode()) - 1), some.integers(1, 255))
def test_any_changed_byte_is_detected(place: int, change: int) -> None:
    text = bytearray(render(MANIFEST).encode())
    text[place] ^= change
    with pytest.raises(ValueError):
        parse(text.decode())


@given(some.integers(0, len(render(MANIFEST)) - 1))
def test_truncated_manifest_is_refused(length: int) -> None:
    with pytest.raises(ValueError):
        parse(render(MANIFEST)[:length])


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 1}', '{"format": 1, "files": 3}', "[" * 5000])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a manifest"):
        parse(text)


def test_manifest_of_a_newer_version_is_recognized() -> None:
    with pytest.raises(ValueError, match="newer version"):
        parse(render(MANIFEST).replace('"format": 1', '"format": 2'))
