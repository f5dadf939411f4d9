"""Two nodes try each other, as real processes: what passes, and whatever may go wrong on the way."""

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

from dalsegno.node_agent.pair import MOST_CALLERS, NotMet, answer, call
from dalsegno.system.children import MARK, marked
from dalsegno.wire.frames import pack
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
Found = dict[str, dict[str, str]] | None
Sides = Callable[[str, str], tuple[Found, Found]]
needs_torch = pytest.mark.cluster  # they need none, but Pythons that import torch and add up numbers


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """What the listener and the caller found, by the names of their findings; None of one that has died."""
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
            eventually(lambda: [each.pid for each in marked(mark)] == [process.pid])  # nothing is left
            return one and dict(one), other and dict(other)

        yield try_them


def verdicts(found: Found) -> dict[str, tuple[str, str]]:
    assert found is not None
    return {name: (each["verdict"], each["code"]) for name, each in found.items()}


@needs_torch
def test_two_nodes_exchange_bytes_and_add_up_numbers(sides: Sides):
    for found in sides("", ""):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("passed", "")}
        assert found and "32 MiB each way" in found["pair"]["text"]
        assert "all-reduce of 16 MiB by 2 ranks with gloo: right, " in found["pair-collective"]["text"]
        assert found["pair-collective"]["text"].endswith(" MB/s")


@needs_torch
def test_a_wrong_sum_is_found_on_both_sides(sides: Sides):
    """Nor can somebody take part who does not know the secret, from which the numbers are made."""
    for found in sides("", "adds other numbers"):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("failed", "wrong")}
        assert found and found["pair-collective"]["text"].startswith("48 numbers of an all-reduce")


@needs_torch
def test_a_node_that_dies_in_the_middle_is_noticed_at_once(sides: Sides):
    listener, caller = sides("", "dies")
    assert caller is None
    assert verdicts(listener)["pair-collective"] == ("failed", "broken")


@needs_torch
def test_a_torch_that_dies_is_known_where_it_died_and_the_other_hears_that_it_left(sides: Sides):
    listener, caller = sides("loses its torch", "")
    assert verdicts(listener)["pair-collective"] == ("failed", "died")
    assert verdicts(caller)["pair-collective"] == ("failed", "broken")


@needs_torch
def test_where_one_has_no_torch_both_say_that_nothing_is_known_of_a_collective(sides: Sides):
    listener, caller = sides("", "has no torch")
    for found in (listener, caller):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("unknown", "")}
    assert caller and caller["pair-collective"]["text"].startswith(f"{sys.executable} has no torch: bytes were")
    assert listener and listener["pair-collective"]["text"].startswith(f"the other node: {sys.executable} has no torch")


@needs_torch
@pytest.mark.parametrize(
    ("what", "body", "text"),
    [
        ("raises", "raise OSError('libgomp.so.1: no such file')", "torch cannot be loaded: OSError: libgomp.so.1: no"),
        ("dies", "import os; os.abort()", "the process that has torch has died"),
        ("hangs", "import time; time.sleep(1000)", "torch was not loaded in time"),
    ],
)
def test_a_torch_that_cannot_be_loaded_says_nothing_of_the_node(
    sides: Sides, tmp_path: Path, what: str, body: str, text: str
):
    (tmp_path / what).mkdir()
    (tmp_path / what / "torch.py").write_text(body)
    for found in sides(str(tmp_path / what), ""):
        assert verdicts(found) == {"pair": ("passed", ""), "pair-collective": ("unknown", "")}
        assert found and text in found["pair-collective"]["text"]


# How they meet


class Waiting:
    """One who waits for another, in a thread; `port` is where."""

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


def test_strangers_cannot_keep_the_other_out_however_many_they_are():
    waiting = Waiting()
    strangers = [socket.create_connection(("127.0.0.1", waiting.port)) for _ in range(2 * MOST_CALLERS)]
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):  # hung up on
            stranger.sendall([b"", b"\xff" * 600, pack({"nonce": "x"}), pack({"nonce": "0" * 32})][number % 4])
    with call("127.0.0.1", waiting.port, b"once") as sock:
        sock.sendall(b"hello")
        assert waiting.end() == b"hello"
    for stranger in strangers:
        stranger.close()


def test_who_does_not_know_the_secret_of_the_test_is_no_partner():
    waiting = Waiting()
    with pytest.raises(NotMet, match="does not know the secret") as info:
        call("127.0.0.1", waiting.port, b"another")
    assert info.value.result.code == "stranger"
    with socket.create_connection(("127.0.0.1", waiting.port)) as sock:  # who sends back what it hears knows it neither
        sock.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(4096):
                sock.sendall(data)
    with call("127.0.0.1", waiting.port, b"once") as sock:
        sock.sendall(b"hello")
        assert waiting.end() == b"hello"


def test_a_node_that_never_comes_is_told_and_that_others_called():
    strangers = list[socket.socket]()

    def knock(port: int) -> None:
        strangers.append(socket.create_connection(("127.0.0.1", port)))
        strangers[0].sendall(pack({"nonce": "x"}))

    with pytest.raises(NotMet) as info:
        answer("127.0.0.1", b"once", knock, 2.0)
    assert info.value.result.code == "unreachable"
    assert str(info.value) == "the other node did not come; 1 called who do not know the secret"
    strangers[0].close()


def test_a_node_that_cannot_be_reached_or_never_answers_is_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(NotMet, match=r"did not answer within 0\.2 s"):
            call("127.0.0.1", port, b"once", 0.2)
    with pytest.raises(NotMet, match="cannot be reached: "):
        call("127.0.0.1", port, b"once")
