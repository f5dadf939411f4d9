"""Tests of the protocol between agent and controller: authentication, and refusal of everything else."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import (
    BEAT,
    AgentBeat,
    BadReport,
    Finding,
    NewFindings,
    NodeReport,
    Order,
    Reply,
    findings_message,
    order_message,
    parse_agent_message,
    read_order,
    reply_message,
    report_message,
)
from dalsegno.health.result import Remedy, failed
from dalsegno.health.wire import AGENT, CONTROLLER, MAX_MESSAGE_BYTES, NodeHello, read_hello, read_secret
from dalsegno.wire.frames import MAX_BYTES, BadFrame, Message, Reader, encode, pack
from dalsegno.wire.handshake import BadProof, ClientHandshake, Seal, ServerHandshake, nonce, read_nonce

EXAMPLES = 100_000 if os.environ.get("DALSEGNO_LONG") else 2_000
SECRET = b"s" * 32
HELLO = NodeHello("gpu-1", "boot-1", 12.5)
SERVER = ServerHandshake(CONTROLLER, AGENT)
TRANSCRIPT = (nonce(), nonce(), *HELLO.proven_values())
REPORT = NodeReport("gpu-1", "boot-1", (Finding("xid", failed("Xid 79", Remedy.REBOOT, "79"), 17.0),))


# Authentication


def hello_message(secret: bytes = SECRET, greeting: Message | None = None) -> Message:
    client = ClientHandshake(AGENT, CONTROLLER)
    return {**HELLO.fields(), **client.answer(greeting or SERVER.greeting(), secret, *HELLO.proven_values())}


def test_agent_and_controller_authenticate_each_other():
    client = ClientHandshake(AGENT, CONTROLLER)
    message = {**HELLO.fields(), **client.answer(SERVER.greeting(), SECRET, *HELLO.proven_values())}
    assert read_hello(message) == HELLO
    session = SERVER.check(message, SECRET, *HELLO.proven_values())
    assert client.finish(SERVER.welcome(session)).transcript == session.transcript


@pytest.mark.parametrize(
    "changed", [{"node": "gpu-2"}, {"boot": "boot-2"}, {"started": 13.0}, {"nonce": nonce()}, {"proof": "x"}]
)
def test_a_changed_hello_is_not_proved(changed: Message):
    message = {**hello_message(), **changed}
    with pytest.raises(BadProof):
        SERVER.check(message, SECRET, *read_hello(message).proven_values())


def test_a_hello_of_an_earlier_connection_is_not_proved():
    with pytest.raises(BadProof):
        SERVER.check(
            hello_message(greeting=ServerHandshake(CONTROLLER, AGENT).greeting()), SECRET, *HELLO.proven_values()
        )


def test_another_secret_does_not_prove_the_node():
    with pytest.raises(BadProof):
        SERVER.check(hello_message(b"t" * 32), SECRET, *HELLO.proven_values())


def test_an_echoed_proof_is_not_a_welcome():
    client = ClientHandshake(AGENT, CONTROLLER)
    hello = client.answer(SERVER.greeting(), SECRET, *HELLO.proven_values())
    with pytest.raises(BadProof):
        client.finish({"proof": hello["proof"]})


@pytest.mark.parametrize(
    "changed",
    [
        {"node": ""}, {"node": "../etc"}, {"node": "a b"}, {"node": "x" * 64}, {"node": 3}, {"node": "\ud800"},
        {"boot": ""}, {"boot": "ü"}, {"started": 1}, {"started": float("nan")}, {"started": "1"}, {"nonce": "g" * 32},
        {"nonce": None}, {"more": 1},
    ],
)  # fmt: skip
def test_an_invalid_hello_is_refused(changed: Message):
    message = {**hello_message(), **changed}
    with pytest.raises(BadFrame):
        SERVER.check(message, SECRET, *read_hello(message).proven_values())


def test_an_invalid_greeting_is_refused():
    for greeting in ({}, {"nonce": 1}, {"nonce": "\ud800" * 32}):
        with pytest.raises(BadFrame):
            read_nonce(greeting)


def test_a_missing_or_short_secret_is_an_error(tmp_path: Path):
    with pytest.raises(DalsegnoError, match="cannot be read"):
        read_secret(tmp_path / "none")
    (tmp_path / "short").write_text("abc\n")
    with pytest.raises(DalsegnoError, match="shorter than"):
        read_secret(tmp_path / "short")
    (tmp_path / "good").write_text("ab" * 32 + "\n")
    assert read_secret(tmp_path / "good") == b"ab" * 32


# Sealed messages


def seals(side: str = AGENT) -> tuple[Seal, Seal]:
    return Seal(SECRET, side, *TRANSCRIPT), Seal(SECRET, side, *TRANSCRIPT)


def frame(data: bytes) -> bytes:
    (body,) = Reader().bodies(data)
    return body


def test_sealed_messages_are_opened_in_order():
    ours, theirs = seals()
    messages: list[Message] = [BEAT, {"ü": "\ud800"}, {}]
    assert [theirs.open(frame(ours.close(message))) for message in messages] == messages


def test_a_repeated_or_reordered_message_is_refused():
    ours, theirs = seals()
    first, second = frame(ours.close({"one": 1})), frame(ours.close({"two": 2}))
    theirs.open(first)
    with pytest.raises(BadFrame, match="seal"):
        theirs.open(first)
    _, late = seals()
    with pytest.raises(BadFrame, match="seal"):
        late.open(second)


@pytest.mark.parametrize(
    "other",
    [
        Seal(b"t" * 32, AGENT, *TRANSCRIPT),
        Seal(SECRET, AGENT, nonce(), *TRANSCRIPT[1:]),
        Seal(SECRET, CONTROLLER, *TRANSCRIPT),
        Seal(SECRET, AGENT, *TRANSCRIPT[:2], *replace(HELLO, node="gpu-2").proven_values()),
        Seal(SECRET, AGENT, *TRANSCRIPT[:2], *replace(HELLO, boot="boot-2").proven_values()),
    ],
)
def test_a_seal_of_another_secret_connection_side_or_node_is_refused(other: Seal):
    _, theirs = seals()
    with pytest.raises(BadFrame, match="seal"):
        theirs.open(frame(other.close(BEAT)))


@pytest.mark.parametrize("strange", [b"", b"{}", b"x" * 31, b"x" * 32, b"x" * 100, frame(pack(BEAT))])
def test_unsealed_data_is_refused(strange: bytes):
    with pytest.raises(BadFrame):
        seals()[0].open(strange)


def test_sealed_messages_hide_their_text_and_never_repeat():
    ours, theirs = seals()
    first, second = (frame(ours.close({"token": "hf_abcdef"})) for _ in range(2))
    assert b"hf_abcdef" not in first + second and b"token" not in first + second
    assert first[32:] != second[32:], "the second uses another part of the key stream"
    backwards = frame(seals(CONTROLLER)[0].close({"token": "hf_abcdef"}))
    assert first[32:] != backwards[32:], "so does the other side"
    assert theirs.open(first) == theirs.open(second) == {"token": "hf_abcdef"}


def test_a_message_that_is_too_long_does_not_affect_later_ones():
    ours, theirs = seals()
    with pytest.raises(BadFrame, match="longer"):
        ours.close({"text": "x" * MAX_BYTES})
    assert theirs.open(frame(ours.close(BEAT))) == BEAT


# Messages


@pytest.mark.parametrize(
    "word",
    [
        NewFindings(REPORT),
        NewFindings(REPORT, frozenset({"xid", "ecc"})),
        Reply(3, True),
        Reply(3, report=REPORT, error="no", port=4000),
        Reply(4, file="dmesg.txt", part="a\nb\0"),
    ],
)
def test_messages_survive_encoding_and_parsing(word: NewFindings | Reply):
    message = findings_message(word) if isinstance(word, NewFindings) else reply_message(word)
    ours, theirs = seals()
    assert parse_agent_message(theirs.open(frame(ours.close(message)))) == word


def test_orders_survive_encoding_and_parsing():
    order = Order(5, "check", {"context": "validation"})
    assert read_order(order_message(order)) == order
    for strange in ({}, {**order_message(order), "do": 1}, {**order_message(order), "arguments": {"a": 1}}):
        with pytest.raises(BadReport):
            read_order(strange)


@pytest.mark.parametrize(
    "strange",
    [
        {}, {"beat": 1.5}, {"beat": True, "x": 1}, {"report": []}, {"report": {"node": "a"}},
        {**findings_message(NewFindings(REPORT)), "all": "xid"}, {**findings_message(NewFindings(REPORT)), "all": [1]},
        {**reply_message(Reply(1)), "answer": True}, {**reply_message(Reply(1)), "answer": -1},
        {**reply_message(Reply(1)), "port": 65536}, {**reply_message(Reply(1)), "file": "../../etc/passwd"},
        {**reply_message(Reply(1)), "file": ".."}, {**reply_message(Reply(1)), "part": "x" * 40000},
        {**reply_message(Reply(1)), "more": 1},
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(strange: Message):
    with pytest.raises(BadReport):
        parse_agent_message(strange)


# Random messages; more of them with DALSEGNO_LONG=1

GOOD: tuple[Message, ...] = (
    BEAT,
    findings_message(NewFindings(REPORT, frozenset({"xid"}))),
    reply_message(Reply(1, report=REPORT)),
    hello_message(),
    order_message(Order(1, "check", {"context": "idle"})),
)
STRANGE: tuple[object, ...] = (
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**400, "", "x" * 600, "\ud800", "\0", "../x", [], [[]], [{}],
    {}, {"a": {}}, ["xid"] * 300, [None], REPORT.node, report_message(REPORT),
)  # fmt: skip


def randomly_changed(message: object, rng: random.Random) -> object:
    """Return the message with a random part replaced, removed or added, at any depth."""
    if isinstance(message, dict) and message and rng.random() < 0.85:
        key = rng.choice(list(message))
        what = rng.random()
        if what < 0.15:
            return {name: value for name, value in message.items() if name != key}
        if what < 0.3:
            return {**message, rng.choice([*KEYS, "", "x"]): rng.choice(STRANGE)}
        return {**message, key: randomly_changed(message[key], rng)}
    if isinstance(message, list) and message and rng.random() < 0.8:
        at = rng.randrange(len(message))
        return [*message[:at], randomly_changed(message[at], rng), *message[at + 1 :]]
    return rng.choice(STRANGE)


KEYS = ("beat", "report", "all", "answer", "done", "error", "port", "file", "part", "node", "boot", "nonce", "proof",
        "started", "order", "do", "arguments", "say", "mac", "findings", "gpus")  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_random_messages_are_parsed_or_refused(seed: int):
    rng, theirs = random.Random(seed), seals()[1]
    for _ in range(EXAMPLES):
        message = randomly_changed(randomly_changed(rng.choice(GOOD), rng), rng)
        if not isinstance(message, dict):
            continue
        with contextlib.suppress(BadReport):
            assert isinstance(parse_agent_message(message), (AgentBeat, NewFindings, Reply))
        with contextlib.suppress(BadFrame):
            SERVER.check(message, b"t" * 32, *read_hello(message).proven_values())
            raise AssertionError("a message without the secret was taken for a proof")
        with contextlib.suppress(BadReport):
            assert isinstance(read_order(message), Order)
        with contextlib.suppress(BadFrame):
            theirs.open(encode(message))
            raise AssertionError("accepted without a seal")


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(1, 50))
@settings(max_examples=min(EXAMPLES, 5_000) // 20, deadline=None)
def test_removed_changed_or_inserted_bytes_are_never_accepted(noise: bytes, at: int, cut: int):
    """Whatever happens to the bytes, the messages read are a prefix of those sent."""
    ours, theirs = seals()
    said: list[Message] = [{"n": n} for n in range(4)]
    whole = b"".join(ours.close(message) for message in said)
    heard: list[Message] = []
    reader = Reader(MAX_MESSAGE_BYTES)
    try:
        for body in reader.bodies(whole[:at] + noise + whole[at + cut :]):
            heard.append(theirs.open(body))
    except BadFrame:
        pass
    assert heard == said[: len(heard)]


def test_a_long_message_is_refused_before_it_is_buffered():
    with pytest.raises(BadFrame, match="longer"):
        list(Reader(MAX_MESSAGE_BYTES).feed(pack({"say": "x" * MAX_MESSAGE_BYTES})[:10]))
