"""Tests of the link to the node agents: known nodes, validation, evidence, and calls from other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from dalsegno.health.checks.late import SLOW
from dalsegno.health.messages import Finding, NodeReport, Reply, reply_message
from dalsegno.health.result import Remedy, Result, Verdict, failed, passed
from dalsegno.health.settings import ANSWER_S, PARTNER_S, PORT_S, settings_text
from dalsegno.node_agent import orders
from dalsegno.node_agent.collective import DIED
from dalsegno.node_agent.orders import check_settings
from dalsegno.recovery.agents.node_link import NodeLink, validate_node
from dalsegno.recovery.agents.probes import NodeAddress
from dalsegno.recovery.agents.server import KnownNodes
from dalsegno.recovery.agents.table import OrderAnswer, OrderEnd, Orders, PendingOrder
from dalsegno.recovery.agents.view import AgentView, views_message
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.journal.evidence import INCOMPLETE
from dalsegno.spec.facts import CheckSetting, Health
from dalsegno.wire.frames import MAX_BYTES, pack
from dalsegno.wire.liveness import Presence
from tests.recovery.played_agents import NODES, Caller, Scene, secret_of

GOOD = Finding("load-product", passed("right"), 1.0)
BAD = Finding("load-memory", failed("other bytes", Remedy.REPLACE), 1.0)


class Linked(Scene):
    """A scene whose agents belong to a NodeLink."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for node in NODES:
            (folder / node).write_bytes(secret_of(node) or b"")
        super().__init__()

    def begin(self, unauthenticated_s: float = 3.0, port: int = 0) -> None:
        self.link = NodeLink(
            self.selector, self.folder, self.folder / "none.conf", self.log.append, self.changed.append, roster_s=0.1
        )
        self.port = self.link.open("127.0.0.1", port)
        self.agents = self.link._agents

    def turn(self, most_s: float = 0.01) -> None:
        self.link.wake()
        for key, events in self.selector.select(most_s):
            key.data(events)

    def close(self) -> None:
        for caller in self.callers:
            caller.sock.close()
        self.link.close()
        assert not self.selector.get_map()

    def in_thread(self, do: Callable[[], object]) -> object:
        """Run a function in a thread while the loop runs."""
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(do()))
        thread.start()
        self.until(lambda: found)
        thread.join()
        return found[0]


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Linked]:
    one = Linked(tmp_path)
    yield one
    one.close()


def whole_order(agent: Caller) -> tuple[int, str, dict[str, str]]:
    """Return the next order to an agent: its number, its kind and its arguments."""
    while "order" not in (message := agent.receive()):
        pass
    return message["order"], message["do"], message["arguments"]


def order(agent: Caller) -> tuple[int, str]:
    return whole_order(agent)[:2]


def answer(agent: Caller, number: int, *findings: Finding, error: str = "") -> None:
    assert agent.hello is not None
    report = NodeReport(agent.hello.node, agent.hello.boot, findings)
    agent.say(reply_message(Reply(number, done=True, error=error, report=report)))


# Known nodes


def test_nodes_come_from_secrets_and_addresses_from_slurm_conf(tmp_path: Path):
    secrets, conf = tmp_path / "secrets", tmp_path / "slurm.conf"
    assert KnownNodes(secrets, conf).places() == {}
    secrets.mkdir()
    (secrets / "gpu-1").write_text("x" * 32)
    (secrets / ".gpu-1.tmp").write_text("x" * 32)
    roster = KnownNodes(secrets, conf)
    assert roster.places() == {"gpu-1": NodeAddress("")}
    conf.write_text("NodeName=gpu-[1-2] NodeAddr=10.0.0.[7-8]\n")
    assert roster.places() == {"gpu-1": NodeAddress("10.0.0.7", 6818)}
    conf.write_text("SlurmdPort=7000\nNodeName=DEFAULT CPUs=4\nNodeName=gpu-[1-2] NodeAddr=a-name\n")
    assert roster.places() == {"gpu-1": NodeAddress("", 7000, shared=True)}
    conf.write_text("NodeName=gpu-1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=17001\n")
    assert roster.places() == {"gpu-1": NodeAddress("127.0.0.1", 17001, shared=True)}
    conf.unlink()
    assert roster.places() == {"gpu-1": NodeAddress("127.0.0.1", 17001, shared=True)}, "the last contents apply"
    assert roster.secret_of("gpu-1") == b"x" * 32
    assert roster.secret_of("../gpu-1") is None and roster.secret_of("gpu-3") is None


def test_agents_get_the_check_settings_and_their_changes(linked: Linked):
    agent = linked.agent("gpu-1")
    assert agent.receive() == {"settings": {}}, "no settings: each check has its own thresholds"
    file = linked.folder / "health.json"
    file.write_text(settings_text(Health(checks={"zombies": CheckSetting(enabled=False)})))
    settings = agent.receive()["settings"]
    assert check_settings(settings) == {"zombies": CheckSetting(enabled=False)}
    file.write_text("{not json")
    linked.agent("gpu-2")
    file.write_text(settings_text(Health()))
    assert agent.receive() == {"settings": {"checks": {}}}, "a damaged file is ignored"


def test_nodes_can_be_added_and_removed_later(linked: Linked):
    agent = linked.agent("gpu-1")
    (linked.folder / "gpu-1").unlink()
    assert agent.cut_off() and set(linked.link.views()) == {"gpu-2"}
    (linked.folder / "gpu-1").write_bytes(secret_of("gpu-1") or b"")
    linked.until(lambda: "gpu-1" in linked.link.views())
    assert linked.agent("gpu-1").welcomed


def test_a_replaced_machine_needs_the_new_secret(linked: Linked):
    (linked.folder / "gpu-1").write_bytes(b"of the new machine, which is long")
    caller = linked.call()
    caller.introduce("gpu-1")
    assert not caller.welcomed


# Validation


PAIR = Finding("pair", passed("fast"), 1.0)
BROKEN = Finding("pair-collective", failed("the all-reduce failed", Remedy.DRAIN, "broken"), 1.0)


def begun(linked: Linked, agent: Caller, partner: Caller) -> tuple[int, int]:
    """Start a validation of gpu-1 with gpu-2 and return the numbers of the orders to both."""
    linked.link.validate("gpu-1", "ask-1", "gpu-2")
    linked.link.validate("gpu-1", "ask-1", "gpu-2")  # a repeated order has no effect
    listens, do, arguments = whole_order(partner)
    assert do == "pair-listen" and set(arguments) == {"secret"} and linked.link.validating() == {"gpu-1": "ask-1"}
    partner.say(reply_message(Reply(listens, port=4000)))
    validates, do, given = whole_order(agent)
    assert (do, given) == ("validate", {"address": "127.0.0.1", "port": "4000", "secret": arguments["secret"]})
    return validates, listens


def verdicts(linked: Linked) -> dict[str, Verdict]:
    linked.until(lambda: "gpu-1" in linked.link.validations())
    assert linked.link.validating() == {}
    return {each.check: each.result.verdict for each in linked.link.validations()["gpu-1"].findings}


def test_a_node_is_validated_alone_and_with_a_listening_partner(linked: Linked):
    agent, partner = linked.agent("gpu-1"), linked.agent("gpu-2")
    number, _ = begun(linked, agent, partner)
    answer(agent, number, GOOD, PAIR)
    assert verdicts(linked) == {"load-product": Verdict.PASSED, "pair": Verdict.PASSED}
    validation = linked.link.validations()["gpu-1"]
    assert validation.ask == "ask-1" and validation.passed and validation.proof == "pair passed: fast"


def test_a_node_with_a_failed_check_does_not_pass(linked: Linked):
    agent, partner = linked.agent("gpu-1"), linked.agent("gpu-2")
    number, _ = begun(linked, agent, partner)
    answer(agent, number, GOOD, BAD)
    assert verdicts(linked)["load-memory"] is Verdict.FAILED
    assert not linked.link.validations()["gpu-1"].passed


def test_a_failure_with_a_good_partner_counts(linked: Linked):
    agent, partner = linked.agent("gpu-1"), linked.agent("gpu-2")
    number, other = begun(linked, agent, partner)
    answer(agent, number, GOOD, PAIR, BROKEN)
    answer(partner, other, PAIR, BROKEN)
    assert verdicts(linked)["pair-collective"] is Verdict.FAILED


@pytest.mark.parametrize("how", ["its connection breaks", "its order fails", "its torch dies", "it is slow"])
def test_a_failure_with_a_failed_partner_does_not_count(linked: Linked, how: str):
    agent, partner = linked.agent("gpu-1"), linked.agent("gpu-2")
    number, other = begun(linked, agent, partner)
    answer(agent, number, GOOD, PAIR, BROKEN)
    if how == "its connection breaks":
        partner.sock.close()
    elif how == "its order fails":
        answer(partner, other, error="it took too long and was stopped")
    elif how == "its torch dies":
        answer(partner, other, PAIR, Finding("pair-collective", failed("torch has died", Remedy.DRAIN, DIED), 1.0))
    else:
        slow = Result(Verdict.UNKNOWN, "it broke off, but this machine is slow", code=SLOW)
        answer(partner, other, PAIR, Finding("pair-collective", slow, 1.0))
    found = verdicts(linked)
    assert found == {"load-product": Verdict.PASSED, "pair": Verdict.PASSED, "pair-collective": Verdict.UNKNOWN}
    validation = linked.link.validations()["gpu-1"]
    assert validation.passed and "the partner gpu-2 failed: " in validation.proof


def test_without_its_partner_a_node_is_validated_alone(linked: Linked):
    agent = linked.agent("gpu-1")
    linked.link.validate("gpu-1", "ask-1", "gpu-2")  # gpu-2 was never connected
    number, do, arguments = whole_order(agent)
    assert (do, arguments) == ("validate", {})
    answer(agent, number, GOOD)
    assert verdicts(linked) == {"load-product": Verdict.PASSED, "pair": Verdict.UNKNOWN}
    assert linked.link.validations()["gpu-1"].proof == (
        "pair unknown: the partner gpu-2 failed: its agent is not connected"
    )


def test_with_a_partner_that_opens_no_port_a_node_is_validated_alone(linked: Linked):
    agent, partner = linked.agent("gpu-1"), linked.agent("gpu-2")
    ends: list[tuple[OrderAnswer, tuple[Finding, ...]]] = []
    validate_node(linked.agents, "gpu-1", "gpu-2", lambda end, findings: ends.append((end, findings)), port_s=0.1)
    listens, _, _ = whole_order(partner)
    number, do, arguments = whole_order(agent)
    assert (do, arguments) == ("validate", {})
    partner.say(reply_message(Reply(listens, port=4000)))  # too late, so it is ignored
    answer(agent, number, GOOD)
    linked.until(lambda: ends)
    assert ends[0][0].end is OrderEnd.ANSWERED and ends[0][1][0] == GOOD
    assert ends[0][1][1].result.verdict is Verdict.UNKNOWN
    assert ends[0][1][1].result.text == ("the partner gpu-2 failed: it did not open a port in time")


def test_a_listening_partner_is_waited_for_until_the_end():
    ends: list[OrderAnswer] = []
    orders = Orders(0)
    number = orders.add(PendingOrder("gpu-2", PARTNER_S, ends.append, lambda port: None, PORT_S))
    assert orders.wake(0.0) == PORT_S
    orders.take("gpu-2", Reply(number, port=4000))
    assert orders.wake(PORT_S) == PARTNER_S and not ends
    assert orders.wake(PARTNER_S) is None and ends[0].end is OrderEnd.LATE


def test_each_side_of_a_validation_waits_longer_than_the_one_it_waits_for():
    """All times start at the order to validate. The partner uses its whole time limit."""
    ends = {
        "the partner opens its port": PORT_S,
        "the node's agent stops": PORT_S + orders.TIMEOUT_S["validate"],
        "the controller stops waiting for the node": PORT_S + ANSWER_S,
        "the partner's agent stops": orders.TIMEOUT_S["pair-listen"],
        "the controller stops waiting for the partner": PARTNER_S,
        "the validation has failed": Policy().validate_s,
    }
    assert all(before < after for before, after in pairwise(ends.values())), ends
    assert orders.TIMEOUT_S["validate"] < ANSWER_S, (
        "the partner waits longer for the first message than the node may take"
    )


def test_an_unfinished_validation_does_not_pass(linked: Linked):
    agent = linked.agent("gpu-1")
    linked.link.validate("gpu-1", "ask-1")
    answer(agent, order(agent)[0], error="it took too long and was stopped")
    linked.until(lambda: "gpu-1" in linked.link.validations())
    validation = linked.link.validations()["gpu-1"]
    assert not validation.passed and validation.findings[0].result.verdict is Verdict.UNKNOWN


def test_a_validation_of_a_lost_node_can_be_repeated(linked: Linked):
    agent = linked.agent("gpu-1")
    linked.link.validate("gpu-1", "ask-1")
    order(agent)
    agent.sock.close()
    linked.until(lambda: linked.link.validating() == {})
    assert linked.link.validations() == {}
    linked.link.validate("gpu-2", "ask-2")  # gpu-2 was never connected
    assert linked.link.validating() == {}


# Calls from other threads


def test_evidence_is_waited_for_in_another_thread(linked: Linked):
    agent = linked.agent("gpu-1")

    def reply() -> None:
        number, do = order(agent)
        assert do == "evidence"
        agent.say(reply_message(Reply(number, file="ps.txt", part="1 init")))
        agent.say(reply_message(Reply(number, done=True)))

    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(linked.link.evidence("gpu-1")))
    thread.start()
    reply()
    linked.until(lambda: found)
    thread.join()
    assert found == [{"ps.txt": "1 init"}]


def test_a_disconnected_node_gives_no_evidence_at_once(linked: Linked):
    began = time.monotonic()
    found = linked.in_thread(lambda: linked.link.evidence("gpu-1"))
    assert found == {INCOMPLETE: "agent: its agent is not connected"} and time.monotonic() - began < 60
    with pytest.raises(RuntimeError):
        linked.link.evidence("gpu-1")


def test_views_are_the_same_from_every_thread(linked: Linked):
    linked.agent("gpu-1")
    views = linked.in_thread(linked.link.views)
    assert views == linked.link.views()
    assert linked.link.views()["gpu-1"].presence is Presence.CONNECTED
    with pytest.raises(KeyError):
        linked.link._agents.view("gpu-9")


def test_the_list_of_agents_fits_into_one_answer_for_any_number_of_nodes():
    findings = tuple(Finding(f"check-{n}", failed("ü" * 500, Remedy.DRAIN), 1.0) for n in range(32))
    views = [AgentView(f"n{n}", report=NodeReport(f"n{n}", "b", findings)) for n in range(1000)]
    assert len(pack(views_message(views))) < MAX_BYTES and len(pack(views_message(views * 3))) < MAX_BYTES
    (one,) = views_message(views[:1])["agents"]
    assert (one["presence"], one["checks"], len(one["findings"])) == ("never seen", 32, 16)
