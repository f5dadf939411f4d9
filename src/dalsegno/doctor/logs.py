"""Find the signs of known faults in the output of a job. Pure: lines in, values out.

The messages are those of Python, PyTorch, NCCL, gloo, torchrun, Slurm, conda and the NVIDIA driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from dalsegno.printable import one_line

MAX_LINE = 2000  # only this many characters of a line are searched
MAX_SEARCHED = 8 << 20  # at most this many characters are searched, in lines that may contain a sign
SHOWN = 240  # only this many characters of a line are shown
_KEPT = 16  # at most this many lines of each sign are kept per file


class LogSign(Enum):
    """The kinds of faults that a line of a log can show."""

    TORCH_MISSING = "torch-missing"
    LAUNCHER_MISSING = "launcher-missing"
    SCRIPT_MISSING = "script-missing"
    SCRIPT_UNREADABLE = "script-unreadable"
    NOT_EXECUTABLE = "not-executable"
    SYNTAX = "syntax"
    NCCL_WITHOUT_GPU = "nccl-without-gpu"
    WRONG_DEVICE = "wrong-device"
    NO_PROCESS_GROUP = "no-process-group"
    PORT_IN_USE = "port-in-use"
    NO_CONTAINERS = "no-containers"
    CONDA_TERMS = "conda-terms"
    LAUNCHER_ARGUMENTS = "launcher-arguments"
    UNKNOWN_OPTIONS = "unknown-options"
    WORLD_SIZE = "world-size"
    GPU_MEMORY = "gpu-memory"
    HOST_MEMORY = "host-memory"
    SHARED_MEMORY = "shared-memory"
    NCCL_TIMEOUT = "nccl-timeout"
    NCCL_PROGRESS = "nccl-progress"  # how far a rank was when NCCL timed out
    GLOO_TIMEOUT = "gloo-timeout"
    NO_INTERFACE = "no-interface"
    PEER_UNREACHABLE = "peer-unreachable"
    PEER_LOST = "peer-lost"
    DUMP_WRITTEN = "dump-written"
    TOO_FEW_GPUS = "too-few-gpus"
    NO_DRIVER = "no-driver"
    LOADER_WORKERS = "loader-workers"
    NO_NUMPY = "no-numpy"


_PATTERNS: tuple[tuple[LogSign, str], ...] = (
    (LogSign.TORCH_MISSING, r"No module named '?torch'?(?![\w.])"),
    (
        LogSign.LAUNCHER_MISSING,
        r"(?P<name>torchrun):? (?:command )?not found|No such file or directory: '?(?P<name2>\S{0,200}?torchrun)"
        r"|(?P<name3>\btorchrun): No such file or directory",
    ),
    (LogSign.SCRIPT_MISSING, r"can't open file '(?P<path>[^']+)': \[Errno 2\]"),
    (LogSign.SCRIPT_UNREADABLE, r"can't open file '(?P<path>[^']+)': \[Errno 13\]"),
    (
        LogSign.NOT_EXECUTABLE,
        r"Permission denied: '?(?P<path>[^\s']{1,400}\.py)\b"
        r"|(?<![^\s:'])(?P<path2>[^\s:']{1,400}\.py): Permission denied",
    ),
    (LogSign.SYNTAX, r"^(?:\[rank\d+\]: ?)?(?:Syntax|Indentation|Tab)Error: "),
    (
        LogSign.NCCL_WITHOUT_GPU,
        r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs|Found no NVIDIA driver on your system"
        r"|Torch not compiled with CUDA enabled",
    ),
    (
        LogSign.WRONG_DEVICE,
        r"No backend type associated with device type (?P<device>\w+)|Tensors must be CUDA and dense",
    ),
    (LogSign.NO_PROCESS_GROUP, r"Default process group has not been initialized"),
    (
        LogSign.PORT_IN_USE,
        r"(?:port: (?P<port>\d+).{0,99}?)?(?:EADDRINUSE|[Aa]ddress already in use)(?:.{0,99}?port[: ]+(?P<port2>\d+))?",
    ),
    (LogSign.NO_CONTAINERS, r"unrecognized option '--container-\w+"),
    (LogSign.CONDA_TERMS, r"CondaToSNonInteractiveError|Terms of Service have not been accepted"),
    (LogSign.LAUNCHER_ARGUMENTS, r"error: the following arguments are required: training_script"),
    (LogSign.UNKNOWN_OPTIONS, r"error: unrecognized arguments: (?P<words>.+)"),
    (
        LogSign.WORLD_SIZE,
        r"world[ _]size of (?P<old>\d+).{0,80}?world[ _]size (?:is|of) (?P<new>\d+)"
        r"|saved with (?P<old2>\d+) (?:ranks|processes|GPUs).{0,80}? (?P<new2>\d+)",
    ),
    (
        LogSign.GPU_MEMORY,
        r"OutOfMemoryError|(?:CUDA|HIP)(?: driver)?(?: error:)? out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
        r"|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA (?:host )?(?:alloc|calloc|malloc)",
    ),
    (
        LogSign.SHARED_MEMORY,
        r"insufficient shared memory|unable to (?:open|allocate|mmap|write).{0,40}shared memory"
        r"|unable to write to file </torch_",
    ),
    (
        LogSign.HOST_MEMORY,
        r"oom[-_]kill event|oom_kill|DefaultCPUAllocator: can't allocate memory|^MemoryError|killed by signal: Killed"
        r"|Exceeded job memory limit|Some of (?:your processes|the step tasks) (?:may )?have been (?:OOM )?[Kk]illed"
        r"|Cannot allocate memory",
    ),
    (
        LogSign.NCCL_TIMEOUT,
        r"\[?[Rr]ank (?P<rank>\d+)\]? Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+),"
        r" OpType=(?P<operation>\w+)",
    ),
    (
        LogSign.NCCL_PROGRESS,
        r"PG ID \d+[^\]]{0,60}?Rank (?P<rank>\d+)\](?:(?!PG ID ).){0,400}?"
        r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+),"
        r" last completed (?:NCCL )?work: (?P<completed>-?\d+)",
    ),
    (LogSign.GLOO_TIMEOUT, r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send) operation to complete"),
    (
        LogSign.NO_INTERFACE,
        r"Unable to find address for:? (?P<name>[\w.@-]{1,40})"
        r"|Bootstrap : no (?:socket|NCCL_SOCKET_IFNAME) interface found"
        r"|Unable to resolve hostname to a \(local\) address|with family \d+ is neither AF_INET",
    ),
    (
        LogSign.PEER_UNREACHABLE,
        r"Gloo connectFullMesh failed|ncclSystemError: "
        r"|socket\w{0,40}: [Cc]onnect to (?P<address>\S{1,60}) (?:failed|returned)",
    ),
    (
        LogSign.PEER_LOST,
        r"gloo/transport/.{0,200}?Connection (?:reset|closed) by peer|ncclRemoteError: "
        r"|remote process exited or there was a network error",
    ),
    (LogSign.DUMP_WRITTEN, r"Finished writing Flight Recorder debug info to (?P<path>/\S+)"),
    (
        LogSign.TOO_FEW_GPUS,
        r"Duplicate GPU detected : rank (?P<rank>\d+) and rank (?P<other>\d+)|invalid device ordinal",
    ),
    (LogSign.NO_DRIVER, r"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"),
    (
        LogSign.LOADER_WORKERS,
        r"This DataLoader will create (?P<workers>\d+) worker processes in total"
        r".{0,80}in current system is (?P<cores>\d+)",
    ),
    (LogSign.NO_NUMPY, r"Failed to initialize NumPy: No module named 'numpy'"),
)
_COMPILED = tuple((sign, re.compile(pattern)) for sign, pattern in _PATTERNS)
# Every pattern contains one of these words, so lines without any of them are skipped.
_WORDS = (
    "torch", "can't open", "denied", "Error", "NCCL", "NVIDIA", "CUDA", "backend type", "initialized", "ddress already",
    "EADDR", "container-", "Terms of", "arguments", "orld", "saved with", "OutOf", "_STATUS_ALLOC", "memory", "oom",
    "illed", "Watchdog", "Timed out", "Flight Rec", "Duplicate GPU", "device ordinal", "DataLoader", "NumPy", "nccl",
    "Gloo", "gloo", "Unable to", "interface found", "AF_INET", "onnect to", "remote process",
)  # fmt: skip
_BATCH = 1000  # number of lines that are searched for these words at a time


@dataclass(frozen=True)
class SignSeen:
    """A sign and the line that shows it. `values` are parts of the line, such as a path or a port."""

    sign: LogSign
    where: str  # the place of the line, as file:line
    text: str
    values: Mapping[str, str] = field(default_factory=dict)


def find_signs(lines: Iterable[tuple[int, str]], name: str) -> Iterator[SignSeen]:
    """Yield the signs in numbered lines of a log. Each kind of sign is yielded a few times at most."""
    counts: dict[LogSign, int] = {}
    searched = 0
    for number, line in _candidates(lines):
        searched += len(line)
        if searched > MAX_SEARCHED:
            return
        for sign, pattern in _COMPILED:
            found = pattern.search(line) if counts.get(sign, 0) < _KEPT else None
            if found:
                counts[sign] = counts.get(sign, 0) + 1
                values = {
                    key.rstrip("0123456789"): one_line(value) for key, value in found.groupdict().items() if value
                }
                yield SignSeen(sign, f"{name}:{number}", _shown(line, found.start()), values)


_TRACEBACK = re.compile(r"^(?P<prefix>.{0,60}?)Traceback \(most recent call last\):\s*$")
_ERROR = re.compile(
    r"^(?:\[?rank ?\d+\]?: ?|\d+: ?)?(?:(?:\w+\.){0,9}\w*(?:Error|Exception|Interrupt)(?:$|: )|[Ff]atal(?: error)?: )"
    r"|^slurmstepd: error: |^srun: error: .{0,200}(?:[Ee]xit code|Killed|Segmentation|Aborted|Bus error|task launch)"
    r"|: command not found$|Segmentation fault|\(core dumped\)"
)
# These errors of launchers only repeat that the program failed.
_OF_LAUNCHER = re.compile(r"ChildFailedError|^srun: error: |^slurmstepd: error: ")
_END_LINES = 50  # an error within this many lines of the end of a log is the one that ended the program


@dataclass(frozen=True)
class LogEnd:
    """The end of a log. `error` is the error of the last traceback or, without a traceback, the last error; "" if there
    is neither."""

    name: str = ""
    error: str = ""
    error_line: int = 0
    at_end: bool = False  # whether the program wrote little or nothing after the error
    last: tuple[tuple[int, str], ...] = ()  # the last lines that are not blank


def find_end(lines: Iterable[tuple[int, str]], name: str) -> LogEnd:
    """Return the last error and the last lines of a log. An error of the program takes precedence over one of the
    launcher."""
    traced, plain, launchers = (0, ""), (0, ""), (0, "")
    prefix: str | None = None  # the text before each line of the current traceback; None outside tracebacks
    last = list[tuple[int, str]]()
    for number, text in lines:
        line = text[:MAX_LINE].rstrip()
        if not line:
            continue
        last = [*last[-2:], (number, line)]
        if found := _TRACEBACK.search(line):
            prefix = found["prefix"]
        elif prefix is not None and line.startswith(prefix):
            inside = line[len(prefix) :]
            if inside and not inside[0].isspace():
                prefix = None
                if _OF_LAUNCHER.search(inside):
                    launchers = number, line
                else:
                    traced = number, line
        elif _ERROR.search(line):
            if _OF_LAUNCHER.search(line):
                launchers = number, line
            else:
                plain = number, line
    at, error = next((each for each in (traced, plain, launchers) if each[0]), (0, ""))
    latest = max(traced[0], plain[0], launchers[0])
    shown = tuple((number, _shown(line, 0)) for number, line in last)
    return LogEnd(name, _shown(error, 0), at, bool(at) and last[-1][0] - latest <= _END_LINES, shown)


def _candidates(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the lines that may contain a sign, cut to the length that is searched."""
    rest = iter(lines)
    while batch := [(number, line[:MAX_LINE]) for number, line in islice(rest, _BATCH)]:
        text = "\n".join(line for _, line in batch)
        words = [word for word in _WORDS if word in text]
        if words:
            yield from ((number, line) for number, line in batch if any(word in line for word in words))


def _shown(line: str, at: int) -> str:
    """Return the part of a line around a sign, with unprintable characters escaped."""
    start = max(0, at - SHOWN // 2) if len(line) > SHOWN else 0
    cut = line[start : start + SHOWN].strip()
    return ("…" if start else "") + one_line(cut) + ("…" if start + SHOWN < len(line) else "")
