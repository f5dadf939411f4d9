"""Logs of a node that does not see the run folder."""

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from dalsegno.runs.agent.link import CoordinatorLink
from dalsegno.runs.agent.log_stream import CHUNK_BYTES, LogStream
from dalsegno.runs.coordinator.agents.agents import Peer, RunAgents
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.agents.messages import AgentMessage
from dalsegno.runs.coordinator.reports.report import StatusWriter
from dalsegno.runs.folder import RunFolder
from dalsegno.wire.frames import Message
from tests.runs.small_site import SmallSite

SECRET = b"s" * 32


def received(stream: LogStream) -> dict[str, bytes]:
    """Return what a coordinator would have written."""
    files: dict[str, bytes] = {}

    def tell(message: Message) -> bool:
        data = message["text"].encode("utf-8", "surrogateescape")
        files[message["log"]] = files.get(message["log"], b"") + data
        return True

    while stream.pump(tell):
        pass
    return files


def test_new_log_data_is_sent_once_with_any_bytes():
    stream = LogStream("train-k3f9x", "n1")
    log = Path(stream.folder, "logs", "g0001", "rank0.log")
    log.parent.mkdir(parents=True)
    log.write_bytes("schön\n".encode() + b"\xff\xfe" + b"x" * CHUNK_BYTES)
    assert received(stream) == {"logs/g0001/rank0.log": log.read_bytes()}
    with log.open("ab") as file:
        file.write(b"more")
    assert received(stream) == {"logs/g0001/rank0.log": b"more"}
    assert received(stream) == {}
    stream.close(lambda message: False)
    assert not Path(stream.folder).exists()


def test_unsent_log_data_is_sent_later():
    stream = LogStream("train-k3f9x", "n1")
    log = Path(stream.folder, "rank0.log")
    log.write_bytes(b"said while nobody listened")
    assert not stream.pump(lambda message: False)
    assert received(stream) == {"rank0.log": log.read_bytes()}
    stream.close(lambda message: False)


def test_unconfirmed_log_data_is_sent_again_after_a_reconnection():
    stream = LogStream("train-k3f9x", "n1")
    Path(stream.folder, "rank0.log").write_bytes(b"read, lost")
    assert received(stream) == {"rank0.log": b"read, lost"}
    stream.confirm("rank0.log", len(b"read, "))
    stream.confirm("rank0.log", 2)  # a late confirmation
    stream.rewind()
    assert received(stream) == {"rank0.log": b"lost"}
    stream.close(lambda message: False)


class Coordinating:
    """The part of a coordinator that writes logs. It cuts the connection after each of its first messages."""

    def __init__(self, folder: RunFolder, breaks: int) -> None:
        self.writer, self.breaks = StatusWriter(SmallSite(folder)), breaks
        self.agents = RunAgents("train-k3f9x", SECRET, Timing(), self)

    def agent_connected(self, peer: Peer) -> None:
        """Accept the agent."""

    def agent_lost(self, agent: str, why: str, silent: bool) -> None:
        """Do nothing."""

    def message_too_long(self, agent: str, detail: str) -> None:
        raise AssertionError(detail)

    def agent_message(self, peer: Peer, message: AgentMessage) -> None:
        self.writer.record_message(1, peer.name, message, None)
        if self.breaks:
            self.breaks -= 1
            self.agents.lose(peer.name, "the test cuts the connection", silent=True)


def test_log_is_complete_and_without_repetition_in_spite_of_lost_connections(tmp_path: Path):
    """Each lost connection costs the confirmation of one message, and all messages that were sent after it."""
    text = b"".join(b"line %d \xff\n" % number for number in range(20_000))

    def stream_all(port: int) -> None:
        stream, link = LogStream("train-k3f9x", "n1"), CoordinatorLink(SECRET, ["127.0.0.1"], port, "n1")
        Path(stream.folder, "logs").mkdir()
        Path(stream.folder, "logs", "rank0.log").write_bytes(text)
        confirmed = unanswered = 0
        while confirmed < len(text):
            if link.sock is None:
                assert link.connect({"run": "train-k3f9x", "probe": 1, "found": {}})
                stream.rewind()
            while stream.pump(link.send):
                pass
            answers = link.receive() if link.sock else []
            for message in answers:
                stream.confirm(*message["logged"])
                confirmed = max(confirmed, message["logged"][1])
            unanswered = 0 if answers else unanswered + 1
            assert unanswered < 4, f"{confirmed} bytes were confirmed, and nothing more is sent"
        stream.close(link.send)
        link.finish()

    async def stream_logs() -> None:
        coordinating = Coordinating(RunFolder(tmp_path), breaks=2)
        port = await coordinating.agents.open(0, host="127.0.0.1")
        await asyncio.to_thread(stream_all, port)
        coordinating.agents.close()

    asyncio.run(stream_logs())
    assert (tmp_path / "logs" / "rank0.log").read_bytes() == text


def test_agent_that_ends_with_unread_orders_has_sent_all_of_its_output():
    """The kernel resets a connection that is closed with unread data, and discards what it has not sent yet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link = CoordinatorLink(SECRET, ["127.0.0.1"], 1, "n1")
        link.sock = socket.create_connection(server.getsockname())
        coordinator, _ = server.accept()
    coordinator.sendall(b"an order that nobody reads")
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    link.sock.sendall(b"x" * 100_000)
    agent = threading.Thread(target=link.finish)
    agent.start()
    data = b""
    with coordinator:
        while piece := coordinator.recv(65536):
            data += piece
    agent.join()
    assert len(data) == 100_000 and link.sock is None


@pytest.mark.parametrize(
    ("name", "inside"),
    [("logs/g0001/rank0.log", True), ("stacks/g0001-rank0.txt", True), ("plan.json", False), ("/etc/passwd", False),
     ("logs/../connect.json", False), ("", False)],
)  # fmt: skip
def test_log_names_cannot_leave_the_folder(tmp_path: Path, name: str, inside: bool):
    assert (RunFolder(tmp_path).inside(name) is not None) is inside
