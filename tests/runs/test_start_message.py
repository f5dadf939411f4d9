"""The message that starts a node's workers."""

from pathlib import Path

import pytest

from dalsegno.runs.agent.orders import read_start
from dalsegno.runs.coordinator.agents.agents import MAX_PROBED, Peer, PeerSample, StartMessages
from dalsegno.runs.coordinator.agents.messages import AgentHello
from dalsegno.runs.coordinator.generations.events import Start
from dalsegno.runs.coordinator.generations.group import Members, Shape, form_group
from dalsegno.runs.folder import RunFolder
from dalsegno.wire.frames import EncodedMessage, Message, parse
from tests.runs.small_site import SmallSite

SHAPE = Shape(1, 4, 2)
SITE = SmallSite(RunFolder(Path("/runs/train-k3f9x")), SHAPE)


def peer(name: str, address: str) -> Peer:
    """Return a connection that nothing is written to."""
    hello = AgentHello(name, 9000 + len(name), found={"CUDA_VISIBLE_DEVICES": "0,1"})
    return Peer(name, hello, address, b"", lambda message: None, lambda: None)


PEERS = {"n1": peer("n1", "10.0.0.1"), "n2": peer("n2", "10.0.0.2"), "spare": peer("spare", "10.0.0.9")}


def start_of(message: EncodedMessage | None) -> Message:
    assert message is not None and message.first_key == "start"
    return dict(parse(message.text)["start"])


def group() -> Members:
    formed = form_group(5, SHAPE, ["n1", "n2"])
    assert formed is not None
    return formed


def test_worker_has_its_rank_and_the_variables_of_the_run():
    message = StartMessages(SITE).message(Start("n2", group(), 4321, restarts=1), PEERS)
    start = start_of(message)
    assert start["generation"] == 5 and [worker["rank"] for worker in start["workers"]] == [2, 3]
    assert start["workers"][0]["env"] == {"RANK": "2"}
    assert read_start(start).workers[0].env == {
        "RANK": "2", "WORLD_SIZE": "4", "RESTARTS": "1", "CUDA_VISIBLE_DEVICES": "0,1",
        "DALSEGNO_RUN": "train-k3f9x", "DALSEGNO_GENERATION": "5", "DALSEGNO_WANTED_NODES": "4",
    }  # fmt: skip


def test_agent_learns_the_probe_addresses_of_all_others():
    message = StartMessages(SITE).message(Start("n2", group(), 4321, 0), PEERS)
    assert start_of(message)["peers"] == [["10.0.0.1", 9002], ["10.0.0.9", 9005]]


def test_agent_of_a_large_run_learns_the_probe_addresses_of_a_sample():
    names = [f"n{number}" for number in range(1000)]
    peers = {name: peer(name, f"10.0.{number // 250}.{number % 250}") for number, name in enumerate(names)}
    formed = form_group(1, Shape(1000, 1000, 1), names)
    assert formed is not None
    messages = StartMessages(SITE)
    for name in ("n0", "n500", "n999"):
        start = start_of(messages.message(Start(name, formed, 4321, 0), peers))
        hosts = [host for host, _ in start["peers"]]
        assert len(hosts) == len(set(hosts)) == MAX_PROBED
        assert peers[name].address not in hosts
        # The hosts come from all parts of the run
        assert {host.split(".")[2] for host in hosts} == {"0", "1", "2", "3"}


def test_nothing_starts_while_a_member_is_being_lost():
    assert StartMessages(SITE).message(Start("n1", group(), 4321, 0), {"n1": PEERS["n1"]}) is None


def test_agent_that_leaves_while_the_messages_are_sent_does_not_stop_them():
    """A spare may break its connection between two messages of one generation."""
    messages, peers, formed = StartMessages(SITE), dict(PEERS), group()
    assert messages.message(Start("n1", formed, 4321, 0), peers) is not None
    del peers["spare"]
    assert messages.message(Start("n2", formed, 4321, 0), peers) is not None


@pytest.mark.parametrize("nodes", [64, 128, 256, 1024])
def test_sample_of_each_node_includes_peers_on_both_switches(nodes: int):
    """The neighbors alternate between two switches, as when nodes join in the order of their racks."""
    sample = PeerSample({f"n{number}": str(number) for number in range(nodes)}, generation=1)
    for number in range(nodes):
        others = [int(each) for each in sample.others(f"n{number}")]
        assert len(set(others)) == MAX_PROBED and number not in others
        answering = sum((each - number) % 2 == 0 for each in others)
        assert answering < 0.85 * MAX_PROBED, f"n{number} would take itself for connected"
