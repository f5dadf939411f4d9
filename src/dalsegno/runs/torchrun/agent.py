"""The agent of a torchrun command. It runs the program in its own command line and exits with torchrun's exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from dalsegno.runs.agent.agent import RunAgent
from dalsegno.runs.agent.evidence import MAX_ERROR_FILE_BYTES, open_regular
from dalsegno.runs.agent.orders import read_setup
from dalsegno.runs.coordinator.generations.causes import signal_name
from dalsegno.runs.torchrun.args import TorchrunArgs
from dalsegno.runs.torchrun.coordinator import CoordinatorThread, Talk, fill_macros, seconds
from dalsegno.runs.torchrun.hang_evidence import evidence_messages
from dalsegno.runs.torchrun.logs import Logs
from dalsegno.runs.torchrun.rendezvous import Keys, host_of
from dalsegno.wire.frames import Message

# The failure report has torchrun's layout, because tools parse it


MAX_WIDTH = 60
_NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@dataclass(frozen=True)
class FailedWorker:
    rank: int
    local_rank: int
    pid: int
    exit_code: int  # exit code; negative for a signal
    at: float
    error_file: str = ""  # "" if none was written
    traceback: str = ""


def render_report(name: str, host: str, root: FailedWorker, others: Sequence[FailedWorker] = ()) -> str:
    """Render torchrun's failure report. `root` failed first and is printed last, where readers look first.

    `others` are later failures on the same node.
    """
    cause = _render_failure(0, host, root)
    rest = [_render_failure(number, host, each) for number, each in enumerate(others, 1)]
    title = f"{name} FAILED"
    lines = [title, *(line for block in (cause, *rest) for line in block.splitlines())]
    width = min(max(map(len, lines)), MAX_WIDTH)
    border, section = "=" * width, "-" * width
    return "\n".join(
        [border, title, section, "Failures:", *(rest or ["  <NO_OTHER_FAILURES>"]), section,
         "Root Cause (first observed failure):", cause, border]
    )  # fmt: skip


def _render_failure(number: int, host: str, failed: FailedWorker) -> str:
    by = f" ({_signal_name(-failed.exit_code)})" if failed.exit_code < 0 else ""
    traceback = failed.traceback.strip().replace("\n", "\n  ") or _no_traceback(failed)
    return (
        f"[{number}]:\n"
        f"  time      : {datetime.fromtimestamp(int(failed.at)).isoformat(sep='_')}\n"
        f"  host      : {host}\n"
        f"  rank      : {failed.rank} (local_rank: {failed.local_rank})\n"
        f"  exitcode  : {failed.exit_code} (pid: {failed.pid}) {by}\n"
        f"  error_file: {failed.error_file or '<N/A>'}\n"
        f"  traceback : {traceback}"
    )


def _no_traceback(failed: FailedWorker) -> str:
    if failed.exit_code < 0:
        return f"Signal {-failed.exit_code} ({_signal_name(-failed.exit_code)}) received by PID {failed.pid}"
    return _NO_TRACEBACK


def _signal_name(number: int) -> str:
    return signal_name(number) or "<N/A>"


# The agent of one node


GRACE_S = 30.0
# After a signal, an agent stays connected for this long. Slurm does not signal all nodes at the same instant, so the
# other nodes should get the signal before they lose a peer.
LINGER_S = 0.5
FAILED = 1
# Signals that are always handled, because they would otherwise kill the agent and leave orphans.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class ShutdownSignal:
    """The signal that made the agent leave, and the monotonic time when it arrived."""

    number: int
    since: float


class TorchrunAgent(RunAgent):
    """The agent of a torchrun command on one node. `hosted` is the coordinator, if it runs on this node."""

    def __init__(
        self, args: TorchrunArgs, setup: Message, connect: Message, name: str, keys: Keys, logs: Logs, talk: Talk,
        hosted: CoordinatorThread | None,
    ) -> None:  # fmt: skip
        super().__init__(connect, name, None if connect["secret"] else keys.unlock)
        self.args, self._setup, self._logs, self._talk = args, setup, logs, talk
        self._keys, self._hosted = keys, hosted
        if not keys.private:
            self.snapshots.keep_local()
        self._handled = {*ENDING, *signals_named(args.signals_to_handle)}
        self.caught |= self._handled
        self._leaving: ShutdownSignal | None = None
        self._failed: dict[int, FailedWorker] = {}
        self._why = f"no response from {keys.endpoint}"
        self._reported = False
        self._absence_s = _absence_s(args)
        self.orders.update(setup=self._set_up, end=self._handle_end, leave=self._leave_too)

    def serve(self) -> int:
        """Serve until the run ends, and return the exit code. Import torch while waiting for other nodes."""
        self.workers.set_up(read_setup(self._setup))
        code = super().serve()
        self.link.close()
        self._logs.close(ended_well=code == 0)
        if code and not self._reported:
            self._talk(f"failed: {self._keys.trouble or self._why}")
        return FAILED if code else 0

    # Orders from the coordinator

    def _set_up(self, data: Message) -> None:
        mine = self._setup["shape"]
        differs = [f"{flag} is {mine[flag]} here and {value} on the others" for flag, value in data["shape"].items()
                   if mine[flag] != value]  # fmt: skip
        if differs:
            self._why, self.exit_code = f"the nodes disagree: {' and '.join(differs)}", FAILED
            return
        self._why = f"{self._keys.endpoint} does not respond any more"
        self._setup.update(store=data["store"], gone_s=data["gone_s"], absence_s=self._absence_s)
        self.heartbeats.interval_s = data["beat_s"]
        self.workers.set_up(read_setup(self._setup))

    def _hello(self) -> Message:
        return {**super()._hello(), "address": self.args.local_addr or ""}

    def _execute(self, message: Message) -> None:
        if self._leaving is None:
            super()._execute(message)

    def _find_coordinator(self) -> None:
        if self._leaving is None:
            super()._find_coordinator()
        else:
            self._disconnect()

    def _start(self, order: Message) -> None:
        self._failed.clear()
        restarts = int(order["env"]["TORCHELASTIC_RESTART_COUNT"])
        for local_rank, each in enumerate(order["workers"]):
            each["files"] = self._logs.files(restarts, local_rank, int(each["rank"]))
            each["args"] = fill_macros(self._setup["args"], local_rank)
        super()._start(order)

    def _send(self, message: Message) -> None:
        """Send a message to the coordinator. If it says that stacks were captured, send the captured evidence first.

        Send nothing while leaving, because the end of a worker is then not a failure.
        """
        if "ended" in message and message["ended"]["code"]:
            self._note_failure(message["ended"])
        if self._leaving is None:
            for evidence in evidence_messages(self.workers.current) if "stacks" in message else ():
                super()._send(evidence)
            super()._send(message)

    def _note_failure(self, report: Message) -> None:
        rank, worker = int(report["rank"]), self.workers.current.workers.get(int(report["rank"]))
        if worker is None or rank in self._failed:
            return
        local_rank = list(self.workers.current.workers).index(rank)
        written = worker.error_file if worker.error_file and os.path.exists(worker.error_file) else ""
        self._failed[rank] = FailedWorker(
            rank, local_rank, worker.pid, int(report["code"]), float(report.get("at") or time.time()), written,
            str(report.get("traceback", "")),
        )  # fmt: skip

    def _handle_end(self, data: Message) -> None:
        self.exit_code = FAILED if data["code"] else 0
        self._why = str(data["why"])
        root = self._failed.get(data.get("rank", -1))
        if root is not None and data.get("node") == self.node:
            others = [each for each in self._failed.values() if each is not root]
            self._talk("\n" + render_report(self.args.training_script, socket.getfqdn(), root, others))
            pass_on(root.error_file)
            self._reported = True
        elif "rank" in data:
            self._why = f"rank {data['rank']} on {host_of(data['node'])} failed; see the report on that node"

    # Leaving after a signal

    def _handle_signals(self) -> None:
        while self.signals:
            number = self.signals.pop(0)
            if number not in self._handled:
                # torchrun would die of this signal. This agent forwards the signal, so that workers with a handler can
                # save their state.
                self.workers.signal(number)
            elif self._leaving is None:
                self._leave(number)
            elif number == signal.SIGINT:
                self.exit_code = FAILED  # a second Ctrl-C ends the agent at once

    def _leave(self, number: int) -> None:
        self._leaving = ShutdownSignal(number, time.monotonic())
        self._why = f"ended by {signal.Signals(number).name}"
        if self._hosted is not None:
            self._hosted.leave(signal.Signals(number).name)
        for worker in self.workers.current.running():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if worker.pid:
                    os.killpg(worker.pid, number)

    def _leave_too(self, name: str) -> None:
        self._leave(int(signal.Signals[name]))

    def _check_silence(self) -> None:
        if self._leaving is None:
            super()._check_silence()
            return
        gone_s = time.monotonic() - self._leaving.since
        grace_s = GRACE_S if self.args.shutdown_timeout is None else self.args.shutdown_timeout
        linger_s = LINGER_S if self.args.nodes.max > 1 else 0.0
        if gone_s >= grace_s or (gone_s >= linger_s and not self.workers.current.running()):
            self.exit_code = FAILED


def signals_named(text: str) -> set[signal.Signals]:
    """Parse `--signals-to-handle`. As in torchrun, unknown names are skipped."""
    names = {word.strip() for word in text.split(",")} - {"SIGKILL", "SIGSTOP"}
    return {signal.Signals[name] for name in names if name in signal.Signals.__members__}


def _absence_s(args: TorchrunArgs) -> float:
    """Return how long the agent waits for a lost rendezvous. torchrun retries for the same time."""
    return seconds(args, "keep_alive_interval", 5.0) * seconds(args, "keep_alive_max_attempt", 3.0)


def pass_on(error_file: str) -> None:
    """Copy a worker's error file to $TORCHELASTIC_ERROR_FILE, as torchrun does for its own parent process.

    A file that is too large to be an error file is not copied.
    """
    target = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if target and error_file:
        with contextlib.suppress(OSError), open_regular(error_file) as source:
            content = source.read(MAX_ERROR_FILE_BYTES + 1)
            if len(content) <= MAX_ERROR_FILE_BYTES:
                with open(target, "wb") as file:
                    file.write(content)
