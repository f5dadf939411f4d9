"""Tar headers, read and written, compared with Python's tarfile."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.containers import tar
from dalsegno.containers.manifest import DamagedImage
from dalsegno.containers.tar import Stream, TarEntry, TarType, read_entries

TYPES = [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
LETTERS = st.characters(exclude_characters="\0/", exclude_categories=("Cs",))
NAMES = st.lists(st.text(LETTERS, min_size=1, max_size=60), min_size=1, max_size=6).map("/".join)
MEMBERS = st.builds(
    lambda name, kind, mode, uid, mtime, size, link: (name, kind, mode, uid, mtime, size, link),
    NAMES, st.sampled_from(TYPES), st.integers(0, 0o7777), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1),
    st.integers(0, 2000), NAMES,
)  # fmt: skip
Member = tuple[str, bytes, int, int, int, int, str]


def packed(members: list[Member], tar_format: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for name, kind, mode, uid, mtime, size, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid, info.mtime = kind, mode, uid, uid // 2, mtime
            info.linkname = link if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            info.size = size if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"x" * info.size))
    return buffer.getvalue()


def in_chunks(data: bytes, size: int) -> Stream:
    return Stream(data[at : at + size] for at in range(0, len(data), size))


@given(st.lists(MEMBERS, max_size=5), st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]), st.integers(1, 5000))
def test_headers_are_parsed_as_by_tarfile(members: list[Member], tar_format: int, chunk: int):
    data = packed(members, tar_format)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [
            (i.name, i.mode, i.uid, i.gid, int(i.mtime), i.size, i.linkname, i.offset_data) for i in archive
        ]  # fmt: skip
    found = read_entries(in_chunks(data, chunk))
    assert [(e.path.rstrip("/"), e.mode, e.uid, e.gid, e.mtime, e.size, e.link, e.offset) for e in found] == expected


ENTRIES = st.builds(
    lambda path, kind, mode, uid, mtime, size, link, xattrs: TarEntry(
        path, kind, mode, uid, uid // 3, mtime, size if kind is TarType.FILE else 0, 0,
        link if kind is TarType.SYMLINK else "", tuple(xattrs.items()),
    ),
    NAMES, st.sampled_from([TarType.FILE, TarType.FOLDER, TarType.SYMLINK, TarType.FIFO]), st.integers(0, 0o7777),
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40), NAMES,
    st.dictionaries(st.just("user.note"), st.binary(max_size=30), max_size=1),
)  # fmt: skip


@given(ENTRIES)
def test_written_headers_are_read_back_unchanged(entry: TarEntry):
    data = tar.header(entry, entry.path, entry.link)
    info = tarfile.TarInfo.frombuf(data[-512:], "utf-8", "surrogateescape")  # this also verifies the checksum
    assert info.size == entry.size % 8**11
    sparse = Stream([data, *([bytes(entry.size + -entry.size % 512)] if entry.size < 10**6 else [])])
    back = next(read_entries(sparse))
    assert back._replace(path=back.path.rstrip("/"), offset=0) == entry


def test_names_that_are_not_utf8_survive():
    (entry,) = read_entries(Stream([packed([("x", tarfile.REGTYPE, 0o644, 0, 0, 0, "")], tarfile.USTAR_FORMAT)]))
    odd = entry._replace(path=b"caf\xe9".decode("utf-8", "surrogateescape"))
    (back,) = read_entries(Stream([tar.header(odd, odd.path), tar.END]))
    assert back.path == odd.path


ONE = packed([("a" * 120, tarfile.REGTYPE, 0o644, 0, 0, 700, "")], tarfile.PAX_FORMAT)


@pytest.mark.parametrize("length", [1, 511, 513, 1024, 1030, 1537, 2100])
def test_truncated_layer_is_damaged(length: int):
    with pytest.raises(DamagedImage):
        list(read_entries(Stream([ONE[:length]])))


@pytest.mark.parametrize("length", [1536 + 700, 1536 + 701, 1536 + 1024])
def test_only_padding_of_the_last_block_may_be_missing(length: int):
    (entry,) = read_entries(Stream([ONE[:length]]))
    assert (entry.path, entry.size, entry.offset) == ("a" * 120, 700, 1536)
    with pytest.raises(DamagedImage, match="in the middle of"):
        list(read_entries(Stream([ONE[: 1536 + 699]])))


@given(st.binary(max_size=20), st.integers(0, len(ONE) - 1))
def test_any_damage_is_reported_as_a_damaged_image_or_ignored(noise: bytes, at: int):
    data = ONE[:at] + noise + ONE[at + len(noise) :]
    try:
        list(read_entries(Stream([data])))
    except DamagedImage as error:
        assert error.hint
