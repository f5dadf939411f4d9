"""Tests of two nodes that test each other, as real processes: success, and all kinds of failure."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.health.checks.late import SLOW
from dalsegno.node_agent.pair import DIALLER, LISTENER, MAX_CALLERS, PartnerUnreachable, answer, call
from dalsegno.system.children import MARK, marked
from dalsegno.wire.client import read_frame
from dalsegno.wire.frames import pack, parse
from dalsegno.wire.handshake import ClientHandshake
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
Found = dict[str, dict[str, str]] | None
Sides = Callable[[str, str], tuple[Found, Found]]
needs_torch = pytest.mark.cluster  # they need no cluster, but Pythons that import torch


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """Return the findings of listener and caller by name; None for one that died."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    argv, mark = [sys.executable, "-m", "tests.node_agent.pair_sides"], str(tmp_path_factory.mktemp("sides"))
    env = {"PYTHONPATH": str(ROOT / "src"), MARK: mark}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def try_them(listens: str = "", calls: str = "") -> tuple[Found, Found]:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps({"listens": listens, "calls": calls}) + "\n")
            process.stdin.flush()
            one, other = json.loads(process.stdout.readline())
            eventually(lambda: [each.pid for each in marked(mark)] == [process.pid])  # no process is left
            return one and dict(one), other and dict(other)

        yield try_them


def verdicts(found: Found) -> dict[str, tuple[str, str]]:
    assert found is not None
    return {name: (each["verdict"], each["code"]) for name, each in found.items()}


@needs_torch
def test_two_nodes_exchange_data_and_reduce_numbers(sides: Sides):
    for found in sides("", ""):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("passed", "")}
        assert found and "32 MiB each way" in found["pair"]["text"]
        assert "all-reduce of 16 MiB by 2 ranks with gloo: right, " in found["pair-collective"]["text"]
        assert found["pair-collective"]["text"].endswith(" MB/s")


@needs_torch
def test_a_wrong_sum_is_detected_on_both_sides(sides: Sides):
    """The numbers are derived from the secret, so an intruder cannot take part either."""
    for found in sides("", "adds other numbers"):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("failed", "wrong")}
        assert found and found["pair-collective"]["text"].startswith("48 numbers of an all-reduce")


@needs_torch
def test_a_node_that_dies_during_the_test_is_detected_at_once(sides: Sides):
    listener, caller = sides("", "dies")
    assert caller is None
    assert verdicts(listener)["pair-collective"] == ("failed", "broken")


@needs_torch
def test_a_torch_crash_is_reported_as_such_only_on_its_own_node(sides: Sides):
    listener, caller = sides("loses its torch", "")
    assert verdicts(listener)["pair-collective"] == ("failed", "died")
    assert verdicts(caller)["pair-collective"] == ("failed", "broken")


@needs_torch
def test_without_torch_on_one_node_the_collective_is_unknown_on_both(sides: Sides):
    listener, caller = sides("", "has no torch")
    for found in (listener, caller):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("unknown", "")}
    assert caller and caller["pair-collective"]["text"].startswith(f"{sys.executable} has no torch: data was")
    assert listener and listener["pair-collective"]["text"].startswith(f"the other node: {sys.executable} has no torch")


@needs_torch
@pytest.mark.parametrize(
    ("what", "body", "text"),
    [
        ("raises", "raise OSError('libgomp.so.1: no such file')", "torch cannot be loaded: OSError: libgomp.so.1: no"),
        ("dies", "import os; os.abort()", "the process that runs torch has died"),
        ("hangs", "import time; time.sleep(1000)", "torch was not loaded in time"),
    ],
)
def test_a_torch_that_cannot_be_loaded_makes_the_collective_unknown(
    sides: Sides, tmp_path: Path, what: str, body: str, text: str
):
    (tmp_path / what).mkdir()
    (tmp_path / what / "torch.py").write_text(body)
    for found in sides(str(tmp_path / what), ""):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("unknown", "")}
        assert found and text in found["pair-collective"]["text"]


# Connecting


class Waiting:
    """A node that waits for another, in a thread; `port` is its port."""

    def __init__(self) -> None:
        self.port, self.met = 0, list[bytes]()
        self._listens, self._thread = threading.Event(), threading.Thread(target=self._wait)
        self._thread.start()
        assert self._listens.wait(60)

    def _wait(self) -> None:
        with answer("127.0.0.1", b"once", self._tell, 60.0) as sock:
            self.met.append(sock.recv(10))

    def _tell(self, port: int) -> None:
        self.port = port
        self._listens.set()

    def end(self) -> bytes:
        self._thread.join(60)
        return self.met[0]


def test_any_number_of_strangers_cannot_block_the_partner():
    waiting = Waiting()
    strangers = [socket.create_connection(("127.0.0.1", waiting.port)) for _ in range(2 * MAX_CALLERS)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):  # it was disconnected
            stranger.sendall([b"", b"\xff" * 600, pack({"nonce": "x"}), pack({"nonce": "0" * 32})][number % 4])
    with call("127.0.0.1", waiting.port, b"once") as sock:
        sock.sendall(b"hello")
        assert waiting.end() == b"hello"
    for stranger in strangers:
        stranger.close()


def test_a_caller_without_the_secret_is_refused():
    waiting = Waiting()
    with pytest.raises(PartnerUnreachable, match="does not know the secret") as info:
        call("127.0.0.1", waiting.port, b"another")
    assert info.value.result.code in ("stranger", SLOW)  # on a busy machine, no node is blamed
    # Echoing the data does not prove the secret either.
    with socket.create_connection(("127.0.0.1", waiting.port)) as sock:
        sock.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(4096):
                sock.sendall(data)
    with call("127.0.0.1", waiting.port, b"once") as sock:
        sock.sendall(b"hello")
        assert waiting.end() == b"hello"


@pytest.mark.waits
def test_a_missing_partner_is_reported_with_the_number_of_strangers():
    strangers = list[socket.socket]()

    def knock(port: int) -> None:
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[0].sendall(pack({"nonce": "x"}))

    with pytest.raises(PartnerUnreachable) as info:
        answer("127.0.0.1", b"once", knock, 2.0)
    assert info.value.result.code in ("unreachable", SLOW)
    assert str(info.value) == "the other node did not connect; callers without the secret: 1"
    strangers[0].close()


def test_an_unreachable_or_silent_partner_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PartnerUnreachable, match=r"did not answer within 0\.2 s"):
            call("127.0.0.1", port, b"once", 0.2)
    with pytest.raises(PartnerUnreachable, match="cannot be reached: "):
        call("127.0.0.1", port, b"once")


def test_caller_that_sends_more_than_its_proof_is_refused():
    waiting = Waiting()
    with socket.create_connection(("127.0.0.1", waiting.port)) as sock:
        proof = ClientHandshake(DIALLER, LISTENER).answer(parse(read_frame(sock, 512)), b"once")
        sock.sendall(pack(proof) + b"!")
        assert sock.recv(1) == b"", "the connection is closed before the listener proves anything"
    with call("127.0.0.1", waiting.port, b"once") as sock:
        sock.sendall(b"hello")
        assert waiting.end() == b"hello"
