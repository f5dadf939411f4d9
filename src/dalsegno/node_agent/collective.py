"""Run an all-reduce as a check: torch sums the numbers of several ranks, and the correct sum is known.

torch is large, takes seconds to load, and may hang or crash. It runs in a separate process, which is started early,
loads in the background, and is killed when it is no longer needed. If torch is missing or cannot be loaded, the result
is unknown.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from dalsegno.health.checks.late import blame
from dalsegno.health.result import Remedy, Result, failed, passed, unknown
from dalsegno.system.hanging_calls import fork
from dalsegno.wire.frames import BadFrame, FileReader, Message, Reader, send

LOAD_S = 80.0  # time limit for loading torch on a very busy machine
REDUCE_S = 30.0  # time limit for all rounds, after both sides have loaded torch
LATER_S = 5.0  # extra time in which the process itself can report a timeout
DIED, DIED_TEXT = "died", "the process that runs torch has died"  # this is a fault of this node, not of its partner

if TYPE_CHECKING:
    from dalsegno.node_agent.all_reduce import Numbers

Body = Callable[[socket.socket], None]


class Collective:
    """A process that runs torch. Use this class in one thread only, because it forks. `body` is the function that the
    process runs. If `off` is set, no process is started, and every result is unknown."""

    def __init__(
        self, body: Body | None = None, *, off: bool = False, load_s: float = LOAD_S, reduce_s: float = REDUCE_S
    ) -> None:
        self.off = off
        self._load_until, self._reduce_s = time.monotonic() + load_s, reduce_s
        self._reader, self._forked = Reader(), None
        self._kind, self._why = "", ""
        if off:
            self._why = "it is off in the cluster file"
        elif importlib.util.find_spec("torch") is None:
            self._why = f"{sys.executable} has no torch"
        else:
            self._forked = fork(body or serve)

    def __enter__(self) -> Collective:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        if self._forked:
            self._forked.kill()
            self._forked.wait(2.0)
            self._forked = None

    def kind(self) -> tuple[str, str]:
        """Wait until torch is loaded, and return its backend (`gloo` or `nccl`) and "". If torch cannot be used, return
        "" and the reason."""
        if self._forked and not self._kind and not self._why:
            answer = self._receive(self._load_until, "torch was not loaded in time")
            self._kind, self._why = str(answer.get("kind", "")), str(answer.get("error", answer.get("died", "")))
        return self._kind, self._why

    def alone(self) -> Result:
        """Run an all-reduce on this node alone."""
        kind, why = self.kind()
        return self._ask({"kind": kind}) if kind else unknown(why)

    def together(self, channel: socket.socket, rank: int, kind: str, secret: bytes) -> Result:
        """Run an all-reduce with the node at the other end of `channel`. Both nodes must call this."""
        return self._ask({"kind": kind, "rank": rank, "secret": secret.hex()}, channel)

    def _ask(self, order: Message, channel: socket.socket | None = None) -> Result:
        assert self._forked
        try:
            self._forked.sock.settimeout(LATER_S)
            send(self._forked.sock, {**order, "within_s": self._reduce_s}, [channel.fileno()] if channel else [])
        except OSError:
            return _judge({"died": DIED_TEXT})
        return _judge(self._receive(time.monotonic() + self._reduce_s + LATER_S, "the all-reduce did not end"))

    def _receive(self, until: float, late: str) -> Message:
        assert self._forked
        sock = self._forked.sock
        try:
            while (left := until - time.monotonic()) > 0:
                sock.settimeout(left)
                if not (data := sock.recv(65536)):
                    return {"died": DIED_TEXT}
                for message in self._reader.feed(data):
                    return message
        except TimeoutError:
            pass
        except (OSError, BadFrame) as error:
            return {"error": f"the process that runs torch has failed: {error}"}
        return {"error": late}


def _judge(answer: Message) -> Result:
    if "died" in answer:
        return failed(answer["died"], Remedy.DRAIN, DIED)
    if "error" in answer:
        return blame(str(answer["error"]), Remedy.DRAIN, "broken")
    kind, size, took_s = answer["kind"], answer["size"], answer["took_s"]
    what = f"all-reduce of {size >> 20} MiB by {answer['ranks']} ranks with {kind}"
    if answer["wrong"]:
        return failed(f"{answer['wrong']} numbers of an {what} are wrong", Remedy.REPLACE, "wrong")
    if not answer["theirs_right"]:
        return failed(f"the other node has a different sum of an {what}", Remedy.REPLACE, "wrong")
    return passed(f"{what}: right, {took_s:.2g} s, {size / 1e6 / took_s:.4g} MB/s")


# The code that runs in the separate process


def serve(sock: socket.socket, numbers: Numbers | None = None) -> None:
    """Load torch, report its backend, and carry out orders until the other side disconnects."""
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread is enough, because only the network is tested
    # this monitoring is not needed, because the parent process watches this one
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    gc.disable()  # torch creates many objects that stay in use, so garbage collection would only cost time
    with contextlib.suppress(OSError):
        _volunteer_for_oom_kill()
    try:
        from dalsegno.node_agent import all_reduce

        kind = all_reduce.kind()
    except Exception as error:  # a broken torch may raise anything
        send(sock, {"error": f"torch cannot be loaded: {_one_line(error)}"})
        return
    send(sock, {"kind": kind} if kind else {"error": "this torch has no collectives"})
    files = FileReader()
    while messages := files.receive(sock):
        for order in messages:
            channels = [socket.socket(fileno=fd) for fd in files.take_files(1)]
            send(sock, _carry_out(order, channels, numbers or all_reduce.numbers))


def _carry_out(order: Message, channels: list[socket.socket], numbers: Numbers) -> Message:
    from dalsegno.node_agent import all_reduce

    kind, within_s = str(order["kind"]), float(order["within_s"])
    try:
        if not channels:
            sums = all_reduce.on_this_node(kind, within_s)
        else:
            channels[0].settimeout(None)
            secret = bytes.fromhex(order["secret"])
            sums = all_reduce.with_other(channels[0], order["rank"], kind, secret, within_s, numbers)
    except Exception as error:  # any library may raise this, and the error must be reported
        return {"error": f"the all-reduce failed: {_one_line(error)}"}
    return {**asdict(sums), "size": sums.size}


def _one_line(error: Exception) -> str:
    """Return the error in one line. NCCL's errors start with source locations and end with the cause."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:60]} … {text[-230:]}"


def _volunteer_for_oom_kill() -> None:
    """Make this process the first to be killed when memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
