"""Tests of the controller and its node agents: authentication, reports, presence and orders."""

from __future__ import annotations

import os
import random
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import (
    MAX_FINDINGS,
    MAX_PART,
    BadReport,
    Finding,
    GpuIdentity,
    NewFindings,
    NodeReport,
    Reply,
    findings_message,
    reply_message,
    report_message,
)
from dalsegno.health.result import Remedy, failed, passed
from dalsegno.health.wire import AGENT, CONTROLLER, NodeHello
from dalsegno.recovery.agents.probes import NodeAddress
from dalsegno.recovery.agents.server import UNAUTHENTICATED
from dalsegno.recovery.agents.table import (
    MAX_BYTES,
    MAX_ORDERS,
    RESTART_S,
    AgentTable,
    OrderAnswer,
    OrderEnd,
    merge,
    relevant,
)
from dalsegno.recovery.agents.view import NODE_LIMITS, AgentView
from dalsegno.wire.frames import Message, pack
from dalsegno.wire.handshake import ClientHandshake, nonce
from dalsegno.wire.liveness import Presence
from tests.recovery.played_agents import Caller, Scene, secret_of

XID = Finding("xid", failed("Xid 79", Remedy.REBOOT, "79"), 17.0)
WELL = Finding("disk", passed("12 % full"), 17.0)
REPORT = NodeReport("gpu-1", "boot-1", (XID, WELL), (GpuIdentity(0, "GPU-1"),))


@pytest.fixture
def scene() -> Iterator[Scene]:
    one = Scene()
    yield one
    one.close()


def view(scene: Scene, node: str = "gpu-1") -> AgentView:
    return scene.agents.view(node)


# Authentication


def test_an_authenticated_agent_is_connected_and_gets_its_settings(scene: Scene):
    scene.agents.expect({"gpu-1": NodeAddress("127.0.0.1")}, {"gpu-1": {"checks": {"xid": {"every_s": 2}}}})
    agent = scene.agent()
    assert agent.receive() == {"settings": {"checks": {"xid": {"every_s": 2}}}}
    assert (view(scene).presence, view(scene).boot, view(scene).report) == (Presence.CONNECTED, "boot-1", None)
    scene.agents.expect({"gpu-1": NodeAddress("127.0.0.1")}, {"gpu-1": {}})
    assert agent.receive() == {"settings": {}}


def untouched(scene: Scene) -> bool:
    nodes = scene.agents.views().values()
    return all(each.presence is Presence.NEVER and each.report is None and not each.boot for each in nodes)


@pytest.mark.parametrize(
    ("node", "secret"),
    [("gpu-1", b"w" * 32), ("gpu-1", secret_of("gpu-2")), ("gpu-3", b"w" * 32)],
    ids=["a wrong secret", "the secret of another node", "no node at all"],
)
def test_an_agent_without_proof_is_refused_and_nothing_changes(scene: Scene, node: str, secret: bytes):
    caller = scene.call()
    caller.introduce(node, secret=secret)
    assert not caller.welcomed and caller.cut_off() and untouched(scene) and scene.changed == []
    assert scene.log == [f"refused: a message of 127.0.0.1: no proof that the peer is {node}"]


def test_a_replayed_hello_is_refused(scene: Scene):
    honest = scene.call()
    greeting = honest.next()
    assert greeting is not None
    thief = scene.call()
    thief.next()
    hello = honest_hello(greeting)
    thief.raw(pack(hello))
    assert thief.cut_off() and untouched(scene)


def honest_hello(greeting: Message) -> Message:
    secret = secret_of("gpu-1")
    assert secret is not None
    hello = NodeHello("gpu-1", "boot-1", 1.0)
    return {**hello.fields(), **ClientHandshake(AGENT, CONTROLLER).answer(greeting, secret, *hello.proven_values())}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, pack({}), pack({"beat": True}), b"\0\0\0\2[]", b"\0\0\0\3abc",
        pack({"node": "gpu-1", "proof": "x"}), struct.pack("!I", 4000) + b"x" * 4000, b"\0\0\0\0",
        struct.pack("!I", 2000) + b"[" * 2000,
    ],
)  # fmt: skip
def test_invalid_data_before_authentication_is_refused(scene: Scene, data: bytes):
    agent = scene.agent("gpu-2")
    caller = scene.call()
    caller.next()
    caller.raw(data)
    assert caller.cut_off() and view(scene).presence is Presence.NEVER
    agent.beat()
    scene.turn()
    assert view(scene, "gpu-2").presence is Presence.CONNECTED and len(scene.log) == 1


def test_each_cause_is_logged_once(scene: Scene):
    for _ in range(20):
        caller = scene.call()
        caller.next()
        caller.raw(b"\xff" * 10)
        assert caller.cut_off()
    assert len(scene.log) == 1


def test_a_silent_or_slow_caller_is_disconnected():
    scene = Scene(unauthenticated_s=0.2)
    mute, slow = scene.call(), scene.call()
    slow.raw(b"\0\0\1\0")
    assert mute.cut_off() and slow.cut_off()
    assert scene.log == ["refused: a peer that did not authenticate in time: 127.0.0.1"]
    scene.close()


def test_many_strangers_do_not_block_an_agent(scene: Scene):
    callers = [scene.call() for _ in range(UNAUTHENTICATED + 20)]
    assert scene.agent().welcomed
    for caller in callers * 2:  # first the greeting, then the end of the connection
        caller.listen()
    assert [caller.hung_up for caller in callers] == [True] * 21 + [False] * (UNAUTHENTICATED - 1), (
        "the oldest are disconnected"
    )
    assert scene.log == ["refused: too many peers that have not authenticated: 127.0.0.1"]


def test_a_port_in_use_is_an_error_with_a_hint(scene: Scene):
    with selectors.DefaultSelector() as selector, pytest.raises(DalsegnoError, match="cannot listen") as caught:
        AgentTable(selector, secret_of).open("127.0.0.1", scene.port)
    assert "ss -ltnp" in caught.value.hint


@pytest.mark.parametrize("seed", range(400 if os.environ.get("DALSEGNO_LONG") else 12))
def test_random_data_of_strangers_changes_nothing(scene: Scene, seed: int):
    """Random bytes: truncated, changed and repeated pieces of valid messages, and noise."""
    lot, agent = random.Random(seed), scene.agent("gpu-2")
    before = view(scene)
    for _ in range(10):
        caller = scene.call()
        greeting = caller.next()
        assert greeting is not None
        data = bytearray(pack(honest_hello({"nonce": nonce()})) + pack({"say": "{}", "mac": "00"}) + lot.randbytes(50))
        for _ in range(lot.randrange(1, 20)):
            data[lot.randrange(len(data))] = lot.randrange(256)
        start = lot.randrange(len(data))
        caller.raw(bytes(data[start:] * lot.randrange(1, 4)))
        caller.sock.shutdown(socket.SHUT_WR)
        assert caller.cut_off()
    assert view(scene) == before and not agent.hung_up and view(scene, "gpu-2").presence is Presence.CONNECTED


# Two agents of one node


def test_an_agent_of_a_newer_boot_replaces_the_old_one_for_good(scene: Scene):
    old = scene.agent(boot="boot-1")
    old.say(findings_message(NewFindings(REPORT, frozenset({"xid", "disk"}))))
    scene.until(lambda: view(scene).report)
    scene.agent(boot="boot-2", started=0.5)
    assert old.cut_off() and view(scene).boot == "boot-2" and view(scene).report is None
    again = scene.call()
    again.introduce(boot="boot-1", started=9.0)
    assert not again.welcomed and view(scene).boot == "boot-2"
    assert scene.log == ["refused: agent of gpu-1: its host was replaced by another: 127.0.0.1"]


def test_the_later_of_two_agents_of_one_boot_stays(scene: Scene):
    first = scene.agent(started=1.0)
    second = scene.agent(started=2.0)
    assert first.cut_off() and second.welcomed
    late = scene.call()
    late.introduce(started=1.0)
    assert not late.welcomed and not second.hung_up
    scene.agent(started=2.0)  # the same agent again, because its connection broke
    assert second.cut_off() and view(scene).presence is Presence.CONNECTED


# Reports


def test_changes_are_merged_into_the_report(scene: Scene):
    agent = scene.agent()
    agent.say(findings_message(NewFindings(REPORT, frozenset({"xid", "disk"}))))
    assert scene.until(lambda: view(scene).report) == REPORT
    repaired = Finding("xid", passed("none"), 20.0)
    agent.say(findings_message(NewFindings(replace(REPORT, findings=(repaired,), gpus=()))))
    scene.until(lambda: view(scene).report != REPORT)
    assert view(scene).report == replace(REPORT, findings=(repaired, WELL))
    assert "gpu-1" in scene.changed and "gpu-2" not in scene.changed


def test_other_text_and_time_of_a_passed_check_start_no_round():
    later = replace(REPORT, findings=(XID, Finding("disk", passed("another text"), 99.0)))
    assert later != REPORT and relevant(later) == relevant(REPORT)


@pytest.mark.parametrize(
    "changed",
    [
        replace(REPORT, findings=(Finding("xid", passed("none"), 20.0), WELL)),
        replace(REPORT, findings=(XID, Finding("disk", failed("full", Remedy.REBOOT), 20.0))),
        replace(REPORT, findings=(replace(XID, result=failed("another fault", Remedy.REPLACE)), WELL)),
        replace(REPORT, findings=(XID,)),
        replace(REPORT, gpus=()),
    ],
    ids=["repaired", "broken", "another fault", "check removed", "other GPUs"],
)
def test_other_results_and_other_gpus_start_a_round(changed: NodeReport):
    assert relevant(changed) != relevant(REPORT)


def test_a_full_report_drops_removed_checks():
    news = NewFindings(NodeReport("gpu-1", "boot-1", (XID,)), frozenset({"xid"}))
    assert merge(REPORT, news) == NodeReport("gpu-1", "boot-1", (XID,), ())
    many = NewFindings(
        NodeReport("gpu-1", "boot-1", tuple(Finding(f"c{n}", passed(""), 1.0) for n in range(MAX_FINDINGS)))
    )
    with pytest.raises(BadReport, match="more than"):
        merge(REPORT, many)


@pytest.mark.parametrize(
    "message",
    [
        findings_message(NewFindings(replace(REPORT, node="gpu-2"))),
        findings_message(NewFindings(replace(REPORT, boot="boot-2"))),
        {"report": {**report_message(REPORT), "findings": [{"check": "xid"}]}},
        {"report": {}},
        {"drain": "gpu-2"},
    ],
    ids=["of another node", "of another boot", "half a finding", "empty", "unknown message"],
)
def test_an_agent_that_sends_an_invalid_report_is_disconnected(scene: Scene, message: Message):
    other, agent = scene.agent("gpu-2"), scene.agent("gpu-1")
    agent.say(message)
    assert agent.cut_off() and view(scene).report is None and view(scene, "gpu-2").report is None
    assert not other.hung_up and len(scene.log) == 1 and scene.log[0].startswith("refused: a message of gpu-1")


def test_unsealed_forged_and_repeated_messages_are_refused(scene: Scene):
    def forged(agent: Caller) -> bytes:
        return pack(findings_message(NewFindings(REPORT)))

    def wrong(agent: Caller) -> bytes:
        data = bytearray(agent.sealed(findings_message(NewFindings(REPORT))))
        data[-20] ^= 1
        return bytes(data)

    def twice(agent: Caller) -> bytes:
        return agent.sealed({"beat": True}) * 2

    for strange in (forged, wrong, twice):
        agent = scene.agent()
        agent.raw(strange(agent))
        assert agent.cut_off() and view(scene).report is None


def test_an_agent_that_sends_too_much_is_disconnected(scene: Scene):
    agent = scene.agent()
    for _ in range(1000):
        agent.beat()
        if agent.hung_up:
            break
    assert agent.cut_off() and "the peer sends too many messages" in scene.log[0]


def test_an_oversized_message_is_refused_by_its_length(scene: Scene):
    agent = scene.agent()
    agent.raw(struct.pack("!I", 1 << 20))
    assert agent.cut_off() and "longer than" in scene.log[0]


# Presence


def test_a_dead_agent_on_a_live_host_is_not_a_lost_node(scene: Scene):
    agent = scene.agent()
    agent.sock.close()
    scene.until(lambda: view(scene).presence is Presence.AGENT_DEAD, 1.0)
    assert view(scene).host_answers and view(scene).slurmd_answers is None
    scene.agent(started=2.0)
    assert view(scene).presence is Presence.CONNECTED


def test_a_silent_agent_is_connected_again_after_a_heartbeat(scene: Scene):
    agent = scene.agent()
    scene.until(lambda: view(scene).presence is Presence.SILENT)
    assert scene.until(lambda: view(scene).host_answers)
    agent.beat()
    scene.until(lambda: view(scene).presence is Presence.CONNECTED)


@pytest.mark.waits
def test_a_node_on_a_shared_address_is_lost_without_agent_and_slurmd(scene: Scene):
    with socket.create_server(("127.0.0.1", 0)) as slurmd:
        scene.agents.expect({"gpu-1": NodeAddress("127.0.0.1", slurmd.getsockname()[1], shared=True)})
        agent = scene.agent()
        agent.sock.close()
        scene.until(lambda: view(scene).presence is Presence.AGENT_DEAD)
    again = scene.agent(started=2.0)
    again.sock.close()
    scene.until(lambda: view(scene).presence is Presence.SILENT)
    assert scene.until(lambda: view(scene).presence is Presence.GONE)
    assert time.time() - view(scene).last_seen >= RESTART_S


def test_a_lost_node_is_disconnected(scene: Scene):
    agent = scene.agent()
    scene.agents._liveness.disconnected("gpu-1", 0.0)
    assert scene.agents._liveness.look(0.0).probe == ("gpu-1",)
    scene.agents._probed("gpu-1", False, False)
    assert view(scene).presence is Presence.GONE and agent.cut_off()


def test_the_agent_of_a_removed_node_is_refused(scene: Scene):
    agent = scene.agent()
    scene.agents.expect({"gpu-2": NodeAddress("127.0.0.1")})
    assert agent.cut_off() and set(scene.agents.views()) == {"gpu-2"}
    again = scene.call()
    again.introduce("gpu-1")
    assert not again.welcomed


def test_slurmd_is_probed_on_request(scene: Scene):
    scene.agents.expect({"gpu-1": NodeAddress("127.0.0.1", scene.port)})
    agent = scene.agent()
    scene.agents.ask_slurmd("gpu-1")
    scene.until(lambda: view(scene).slurmd_answers)
    agent.beat()
    assert view(scene).presence is Presence.CONNECTED


def test_the_loop_wakes_often_enough_to_detect_silence(scene: Scene):
    scene.agent()
    due = scene.agents.wake()
    assert due is not None and due - time.monotonic() <= NODE_LIMITS.look_s


# Orders


def ordered(scene: Scene, do: str = "evidence", timeout_s: float = 60.0, **arguments: str) -> list[OrderAnswer]:
    answers: list[OrderAnswer] = []
    scene.agents.order("gpu-1", do, answers.append, timeout_s=timeout_s, arguments=arguments)
    return answers


def test_the_parts_of_an_answer_are_joined(scene: Scene):
    agent = scene.agent()
    agent.receive()
    answers = ordered(scene, "check", context="validation")
    order = agent.receive()
    assert (order["do"], order["arguments"]) == ("check", {"context": "validation"})
    number = order["order"]
    for reply in (
        Reply(number, file="ps.txt", part="a\n"),
        Reply(number, report=REPORT),
        Reply(number, file="ps.txt", part="b\n"),
        Reply(number, done=True),
    ):
        agent.say(reply_message(reply))
    scene.until(lambda: answers)
    assert answers == [OrderAnswer("gpu-1", report=REPORT, files={"ps.txt": "a\nb\n"})]
    agent.say(reply_message(Reply(number, done=True)))
    scene.until(lambda: scene.log)
    assert len(answers) == 1 and scene.log == ["refused: unexpected answer of gpu-1"]


def test_a_long_answer_is_truncated(scene: Scene):
    agent = scene.agent()
    agent.receive()
    answers = ordered(scene)
    number = agent.receive()["order"]
    for _ in range(MAX_BYTES // MAX_PART + 5):
        agent.say(reply_message(Reply(number, file="ps.txt", part="x" * MAX_PART)))
    agent.say(reply_message(Reply(number, done=True)))
    scene.until(lambda: answers)
    assert len(answers[0].files["ps.txt"]) == MAX_BYTES and answers[0].end is OrderEnd.TRUNCATED


def test_orders_that_cannot_be_answered_fail_with_their_cause(scene: Scene):
    assert ordered(scene)[0].end is OrderEnd.NOT_CONNECTED
    agent = scene.agent()
    late = ordered(scene, timeout_s=0.05)
    scene.until(lambda: late)
    assert late[0].end is OrderEnd.LATE and not late[0].end.undecided
    lost = [ordered(scene) for _ in range(MAX_ORDERS)]
    assert ordered(scene)[0].end is OrderEnd.OVERLOADED
    agent.sock.close()
    scene.until(lambda: all(lost))
    assert {each[0].end for each in lost} == {OrderEnd.DISCONNECTED} and OrderEnd.DISCONNECTED.undecided


def test_one_node_cannot_answer_for_another(scene: Scene):
    agent, other = scene.agent(), scene.agent("gpu-2")
    agent.receive()
    answers = ordered(scene)
    number = agent.receive()["order"]
    other.say(reply_message(Reply(number, done=True)))
    scene.until(lambda: scene.log)
    assert answers == []
