"""Messages on a socket: valid and invalid frames."""

import gc
import os
import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.wire.frames import MAX_BYTES, MAX_DEPTH, BadFrame, FileReader, Message, Reader, encode, pack, parse, send


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20)), max_size=5),
    st.integers(1, 7),
)
def test_messages_are_parsed_from_pieces_of_any_size(messages: list[Message], size: int):
    data = b"".join(pack(message) for message in messages)
    reader = Reader()
    assert [m for start in range(0, len(data), size) for m in reader.feed(data[start : start + size])] == messages


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # read as a length, its first letters are more than a gigabyte
        b"\xff\xff\xff\xff",
        (MAX_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\0",
        b"\0\0\0\2[]",
        b"\0\0\0\4null",
        b"\0\0\0\3{:}",
        b"\0\0\0\2\xff\xfe",
    ],
)
def test_invalid_frame_is_refused(data: bytes):
    with pytest.raises(BadFrame):
        list(Reader().feed(data))


def nested(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        nested(MAX_DEPTH + 1),
        nested(200_000),
        b'{"a":' * 200,
        b'{"\\\\":"\\"","a":' + b"[" * 100,
        nested(100).decode().encode("utf-16"),
        '{"∢":'.encode("utf-16") + ("[" * 100).encode("utf-16-le"),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_deeply_nested_message_is_refused(body: bytes):
    with pytest.raises(BadFrame):
        parse(body)


def test_brackets_in_strings_and_in_a_row_are_not_nesting():
    for message in ({"a": "[" * 1000, '"[': "\\"}, {"a": [[]] * 1000}, {"\\": ["["] * 1000}):
        assert parse(encode(message)) == message
    assert parse(nested(MAX_DEPTH))


def test_garbage_collected_during_a_deeply_nested_message_is_finalized():
    """json makes one list per level, so that garbage collection starts at any depth that the sender chooses."""
    finalized: list[int] = []

    class Cycle:
        def __init__(self, number: int) -> None:
            self.number, self.itself = number, self

        def __del__(self) -> None:
            finalized.append(abs(self.number))

    thresholds = gc.get_threshold()
    gc.collect(1)  # only young objects, because all others would take a second
    gc.set_threshold(sys.getrecursionlimit(), 1000, 1000)
    try:
        for number in range(400):
            Cycle(number)
            with pytest.raises(BadFrame):
                parse(b"[" * 2000)
    finally:
        gc.set_threshold(*thresholds)
        gc.collect(1)
    assert sorted(finalized) == list(range(400))


def test_excessive_length_is_refused_before_allocation():
    with pytest.raises(BadFrame, match="longer than"):
        list(Reader().feed((1 << 31).to_bytes(4, "big")))


def test_reader_enforces_its_own_limit():
    assert list(Reader(max_bytes=9).feed(pack({"a": 100}))) == [{"a": 100}]
    with pytest.raises(BadFrame, match="longer than 9"):
        list(Reader(max_bytes=9).feed(pack({"a": 1000})))


def test_too_long_message_is_not_sent():
    with pytest.raises(BadFrame):
        pack({"text": "x" * MAX_BYTES})
    longest = {"text": "x" * (MAX_BYTES - len('{"text":""}'))}
    assert list(Reader().feed(pack(longest))) == [longest]


def test_messages_before_an_invalid_one_are_received():
    received = []
    with pytest.raises(BadFrame):
        for message in Reader().feed(pack({"one": 1}) + b"\0\0\0\1x"):
            received.append(message)
    assert received == [{"one": 1}]


def test_open_files_are_passed_with_a_message():
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    send(ours, {"files": 1}, [write])
    reader = FileReader()
    assert reader.receive(theirs) == [{"files": 1}]
    (copy,) = reader.take_files(1)
    os.write(copy, b"through")
    assert os.read(read, 10) == b"through" and reader.take_files(1) == []
    ours.close()
    assert reader.receive(theirs) is None, "the peer has closed the connection"
    theirs.close()
    for each in (read, write, copy):
        os.close(each)
