"""Messages on a socket, and what is none."""

import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.train.frames import MAX_BYTES, BadFrame, FileReader, Message, Reader, pack, send


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20)), max_size=5),
    st.integers(1, 7),
)
@settings(max_examples=50, deadline=None)
def test_messages_survive_any_cutting(messages: list[Message], size: int):
    data = b"".join(pack(message) for message in messages)
    reader = Reader()
    assert [m for start in range(0, len(data), size) for m in reader.feed(data[start : start + size])] == messages


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # its first letters are a length of more than a gigabyte
        b"\xff\xff\xff\xff",
        (MAX_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\0",
        b"\0\0\0\2[]",
        b"\0\0\0\4null",
        b"\0\0\0\3{:}",
        b"\0\0\0\2\xff\xfe",
    ],
)
def test_what_is_not_our_language_is_refused(data: bytes):
    with pytest.raises(BadFrame):
        list(Reader().feed(data))


def test_a_message_of_nothing_but_brackets_is_refused_too():
    body = b'{"a":' + b"[" * 200_000
    with pytest.raises(BadFrame):
        list(Reader().feed(len(body).to_bytes(4, "big") + body))


def test_a_length_is_refused_before_anything_is_kept_for_it():
    with pytest.raises(BadFrame, match="longer than"):
        list(Reader().feed((1 << 31).to_bytes(4, "big")))


def test_who_is_told_little_may_say_so():
    assert list(Reader(most_bytes=9).feed(pack({"a": 100}))) == [{"a": 100}]
    with pytest.raises(BadFrame, match="longer than 9"):
        list(Reader(most_bytes=9).feed(pack({"a": 1000})))


def test_we_say_nothing_that_we_would_not_hear():
    with pytest.raises(BadFrame):
        pack({"text": "x" * MAX_BYTES})
    longest = {"text": "x" * (MAX_BYTES - len('{"text":""}'))}
    assert list(Reader().feed(pack(longest))) == [longest]


def test_messages_before_a_bad_one_are_heard():
    heard = []
    with pytest.raises(BadFrame):
        for message in Reader().feed(pack({"one": 1}) + b"\0\0\0\1x"):
            heard.append(message)
    assert heard == [{"one": 1}]


def test_files_travel_along():
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    send(ours, {"files": 1}, [write])
    reader = FileReader()
    assert reader.receive(theirs) == [{"files": 1}]
    (copy,) = reader.take_files(1)
    os.write(copy, b"through")
    assert os.read(read, 10) == b"through" and reader.take_files(1) == []
    ours.close()
    assert reader.receive(theirs) is None, "the other side has gone"
    theirs.close()
    for each in (read, write, copy):
        os.close(each)
