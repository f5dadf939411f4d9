"""The message that starts a node's workers."""

from pathlib import Path

from dalsegno.runs.coordinator.agents import Peer, start_message
from dalsegno.runs.coordinator.events import Start
from dalsegno.runs.coordinator.group import Members, Shape, form_group
from dalsegno.runs.coordinator.messages import AgentHello
from dalsegno.runs.folder import RunFolder
from tests.runs.small_site import SmallSite

SHAPE = Shape(1, 4, 2)
SITE = SmallSite(RunFolder(Path("/runs/train-k3f9x")), SHAPE)


def peer(name: str, address: str) -> Peer:
    """Return a connection that nothing is written to."""
    hello = AgentHello(name, 9000 + len(name), found={"CUDA_VISIBLE_DEVICES": "0,1"})
    return Peer(name, hello, address, b"", lambda message: None, lambda: None)


PEERS = {"n1": peer("n1", "10.0.0.1"), "n2": peer("n2", "10.0.0.2"), "spare": peer("spare", "10.0.0.9")}


def group() -> Members:
    formed = form_group(5, SHAPE, ["n1", "n2"])
    assert formed is not None
    return formed


def test_worker_has_its_rank_and_the_variables_of_the_run():
    message = start_message(SITE, Start("n2", group(), 4321, restarts=1), PEERS)
    assert message is not None and message["start"]["generation"] == 5
    assert [worker["rank"] for worker in message["start"]["workers"]] == [2, 3]
    assert message["start"]["workers"][0]["env"] == {
        "RANK": "2", "WORLD_SIZE": "4", "RESTARTS": "1", "CUDA_VISIBLE_DEVICES": "0,1",
        "DALSEGNO_RUN": "train-k3f9x", "DALSEGNO_GENERATION": "5", "DALSEGNO_WANTED_NODES": "4",
    }  # fmt: skip


def test_agent_learns_the_probe_addresses_of_all_others():
    message = start_message(SITE, Start("n2", group(), 4321, 0), PEERS)
    assert message is not None and message["start"]["peers"] == [["10.0.0.1", 9002], ["10.0.0.9", 9005]]


def test_nothing_starts_while_a_member_is_being_lost():
    assert start_message(SITE, Start("n1", group(), 4321, 0), {"n1": PEERS["n1"]}) is None
