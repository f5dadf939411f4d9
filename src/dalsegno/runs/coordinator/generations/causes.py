"""Classify worker failures as a bug in the script, a killed worker, or a result of another rank's death (noise)."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FRAMES = 3  # how many of the last frames in the user's files are part of a traceback's signature
# Errors in ranks whose peer has died. They are consequences, not causes.
_NOISE = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|NCCL|DistBackendError|DistNetworkError"
    r"|DistStoreError|ProcessGroup|gloo|Socket Timeout|recvValue failed|failed to recv|store->get|TCPStore"
)
_TIMED_OUT = re.compile(r"Timed out waiting \d+ ?ms for (recv|send)|collective operation timeout", re.IGNORECASE)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "<frozen", "/dalsegno/runs/")
_NO_PYTHON = re.compile(r"(Syntax|Indentation|Tab)Error: ")
_USAGE = re.compile(r"^(\S+: error|Error): ")  # errors from argparse and click, which exit with 2
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_PREFIX = re.compile(r"^\[rank\d+\]: ?")


# Signals that end a rank without a traceback after a peer died: SIGABRT from NCCL's watchdog, SIGPIPE from a write.
_PEER_SIGNALS = (signal.SIGABRT, signal.SIGPIPE)


class CauseKind(Enum):
    SCRIPT = "script"  # a Python traceback, or the program's own exit code
    KILLED = "killed"  # the process was ended by a signal from outside
    OOM = "oom"  # killed by the kernel for lack of memory
    CRASHED = "crashed"  # ended by a signal that the process caused itself, such as SIGSEGV


@dataclass(frozen=True)
class Failure:
    """The failure of one worker."""

    rank: int
    node: str
    code: int  # exit code; negative for a signal
    kind: CauseKind
    signature: str = ""  # identifies the fault across failures; "" if unknown
    traceback: str = ""
    noise: bool = False
    why: str = ""
    healthy: bool = True  # False if the node is down or drained in Slurm

    @property
    def hopeless(self) -> bool:
        """Whether every restart would fail because the script is not valid Python or rejects its arguments."""
        last = self.traceback.strip().rpartition("\n")[2]
        return self.kind is CauseKind.SCRIPT and bool(
            _NO_PYTHON.match(last) or (self.code == 2 and _USAGE.search(last))
        )

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it. For a signal, it is 128 plus the signal number."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def timed_out(self) -> bool:
        """Whether a collective has timed out in this rank because another rank did not arrive.

        NCCL's watchdog ends the process with SIGABRT, often without a traceback.
        """
        last = self.traceback.strip().rpartition("\n")[2]
        return bool(_TIMED_OUT.search(last)) or (not last and self.code == -signal.SIGABRT)

    def sentence(self) -> str:
        """Return a one-line description for users."""
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
    """Return a `Failure` built from an agent's report about a worker's end."""
    clean = "\n".join(_PREFIX.sub("", line) for line in traceback.splitlines())
    last = clean.strip().splitlines()[-1] if clean.strip() else ""
    return Failure(
        rank,
        node,
        code,
        _kind(code, oom),
        signature=signature(clean) or (f"exit {code}" if code > 0 else ""),
        traceback=clean,
        noise=bool(last and _NOISE.search(last)) or (not last and -code in _PEER_SIGNALS),
    )


def _kind(code: int, oom: bool) -> CauseKind:
    if oom:
        return CauseKind.OOM
    if code >= 0:
        return CauseKind.SCRIPT
    own = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    return CauseKind.CRASHED if -code in own else CauseKind.KILLED


def signature(traceback: str) -> str:
    """Return a text that identifies a fault: the last frames in the user's files, and the error without its numbers.

    Return "" if there is no traceback.
    """
    lines = traceback.strip().splitlines()
    frames = [found for line in lines if (found := _FRAME.match(line))]
    if not frames:
        return ""
    own = [each for each in frames if not any(part in each["file"] for part in _LIBRARY)] or frames
    where = [f"{each['file']}:{each['line']}:{each['name']}" for each in own[-FRAMES:]]
    return " | ".join([*where, _NUMBERS.sub("#", lines[-1])])


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure that is not noise. If all are noise, return the first; None if there are no failures."""
    return next((each for each in failures if not each.noise), failures[0] if failures else None)


def is_bug(now: Failure, before: Failure | None) -> bool:
    """Return whether the script failed twice in a row with the same fault on healthy nodes."""
    same = before is not None and now.signature != "" and now.signature == before.signature
    healthy = before is not None and now.healthy and before.healthy
    return same and healthy and now.kind is CauseKind.SCRIPT and not now.noise


def suspected_node(now: Failure, before: Failure | None) -> str:
    """Return the failure's node if the node is out of service, or had two crashes or two OOM kills in a row.

    Return "" otherwise. Failures that result from another rank's death do not count.
    """
    if not now.healthy:
        return now.node
    twice = before is not None and before.node == now.node and not now.noise and not before.noise
    same_crash = now.kind in (CauseKind.CRASHED, CauseKind.OOM) and before is not None and before.kind is now.kind
    return now.node if twice and same_crash else ""


def back_off_s(quick_failures: int) -> float:
    """Return the pause before the next start. It is 0 after one quick failure, and grows with each further one."""
    return 0.0 if quick_failures < 2 else min(2.0 ** (quick_failures - 2), 30.0)


def signal_name(number: int) -> str:
    """Return the name of a signal, or "" if the number has none."""
    return signal.Signals(number).name if number in set(signal.Signals) else ""
