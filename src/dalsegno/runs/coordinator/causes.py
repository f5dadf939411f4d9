"""Telling causes apart: a bug in the script, a worker that was killed, noise from peers whose partner died. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FRAMES = 3  # the last ones in the user's own files make a traceback's signature
# What ranks say when another one has gone: true, but not the reason.
_NOISE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|NCCL|DistBackendError|DistNetworkError"
    r"|DistStoreError|ProcessGroup|gloo|Socket Timeout|recvValue failed|failed to recv|store->get|TCPStore"
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "<frozen", "/dalsegno/runs/")
_NO_PYTHON = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_USAGE = re.compile(r"^(\S+: error|Error): ")  # argparse and click; both end with 2
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")


# Without a traceback: how NCCL's watchdog, and writers to a closed socket, end.
_OF_PEERS = (signal.SIGABRT, signal.SIGPIPE)


class CauseKind(Enum):
    SCRIPT = "script"  # a Python traceback, or an exit code of the program's own
    KILLED = "killed"  # by a signal from outside
    OOM = "oom"  # by the kernel, for memory
    CRASHED = "crashed"  # by a signal of its own making: SEGV, ABRT, BUS


@dataclass(frozen=True)
class Failure:
    """The end of one worker that did not end well."""

    rank: int
    node: str
    code: int  # negative: a signal
    kind: CauseKind
    signature: str = ""  # equal for equal faults; "" where nothing tells
    traceback: str = ""
    noise: bool = False
    why: str = ""
    healthy: bool = True  # its node, as far as Slurm tells: neither down nor drained

    @property
    def hopeless(self) -> bool:
        """Whether every start ends so: the script is no Python, or its own parser refuses its arguments."""
        last = self.traceback.strip().rpartition("\n")[2]
        return self.kind is CauseKind.SCRIPT and bool(
            _NO_PYTHON.match(last) or (self.code == 2 and _USAGE.search(last))
        )

    @property
    def exit_code(self) -> int:
        """As a shell tells it: a signal's number is added to 128."""
        return 128 - self.code if self.code < 0 else self.code

    def sentence(self) -> str:
        """One line for people."""
        return f"rank {self.rank} on {self.node} {self.what()}"

    def what(self) -> str:
        if self.why:
            return f"ended: {self.why}"
        if self.kind is CauseKind.OOM:
            return "was killed by the kernel: out of memory"
        if self.code < 0:
            return f"was ended by {signal_name(-self.code) or f'signal {-self.code}'}"
        last = self.traceback.strip().splitlines()[-1:] if self.traceback else []
        return f"failed: {_PREFIX.sub('', last[0])}" if last else f"ended with exit code {self.code}"


def read_failure(rank: int, node: str, code: int, traceback: str = "", oom: bool = False) -> Failure:
    """What an agent's report of an end comes to."""
    clean = "\n".join(_PREFIX.sub("", line) for line in traceback.splitlines())
    last = clean.strip().splitlines()[-1] if clean.strip() else ""
    return Failure(
        rank,
        node,
        code,
        _kind(code, oom),
        signature=signature(clean) or (f"exit {code}" if code > 0 else ""),
        traceback=clean,
        noise=bool(last and _NOISE.search(last)) or (not last and -code in _OF_PEERS),
    )


def _kind(code: int, oom: bool) -> CauseKind:
    if oom:
        return CauseKind.OOM
    if code >= 0:
        return CauseKind.SCRIPT
    own = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    return CauseKind.CRASHED if -code in own else CauseKind.KILLED


def signature(traceback: str) -> str:
    """Type, last frames in the user's own files, and the message without its numbers; "" if there is no traceback."""
    lines = traceback.strip().splitlines()
    frames = [found for line in lines if (found := _FRAME.match(line))]
    if not frames:
        return ""
    own = [each for each in frames if not any(part in each["file"] for part in _LIBRARY)] or frames
    where = [f"{each['file']}:{each['line']}:{each['name']}" for each in own[-FRAMES:]]
    return " | ".join([*where, _NUMBERS.sub("#", lines[-1])])


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The one to show: the first that is not merely a peer's complaint, in the order in which they became known."""
    return next((each for each in failures if not each.noise), failures[0] if failures else None)


def is_bug(now: Failure, before: Failure | None) -> bool:
    """The same fault twice running, on healthy nodes: starting again would only find it a third time."""
    same = before is not None and now.signature != "" and now.signature == before.signature
    healthy = before is not None and now.healthy and before.healthy
    return same and healthy and now.kind is CauseKind.SCRIPT and not now.noise


def suspected_node(now: Failure, before: Failure | None) -> str:
    """A node that Slurm has given up, or on which the last two failures began without the script's doing; else ""."""
    if not now.healthy:
        return now.node
    twice = before is not None and before.node == now.node and not now.noise and not before.noise
    of_itself = now.kind in (CauseKind.CRASHED, CauseKind.OOM) and before is not None and before.kind is now.kind
    return now.node if twice and of_itself else ""


def back_off_s(quick_failures: int) -> float:
    """How long to wait before the next start: not at all after one, longer after each further that came at once."""
    return 0.0 if quick_failures < 2 else min(2.0 ** (quick_failures - 2), 30.0)


def signal_name(number: int) -> str:
    """ "" for a number that has none."""
    return signal.Signals(number).name if number in set(signal.Signals) else ""
