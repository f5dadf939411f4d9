"""Two nodes that test each other, each in a child process of this program.

The program loads torch once, because that takes seconds. For each test it reads one line of JSON with the kinds of both
sides, and writes the findings of both: null for a node that died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dalsegno import node_agent
from dalsegno.node_agent import all_reduce
from dalsegno.node_agent.collective import Collective, serve
from dalsegno.node_agent.pair import answer, call, run_pair_tests

SECRET = b"for this test"


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(both(**json.loads(line))) + "\n")
        sys.stdout.flush()


def both(listens: str, calls: str) -> list[object]:
    """Return the findings of the listening and the calling side."""
    reads, writes = os.pipe()
    waits = in_a_process(lambda: found(listens, 1, lambda: answer("127.0.0.1", SECRET, partial(tell, writes))))
    port = int(os.read(reads, 10))
    comes = in_a_process(lambda: found(calls, 0, lambda: call("127.0.0.1", port, SECRET)))
    os.close(reads)
    os.close(writes)
    return [waits(), comes()]


def tell(pipe: int, port: int) -> None:
    os.write(pipe, b"%d" % port)


def found(kind: str, rank: int, meet: Callable[[], Any]) -> list[Any]:
    if kind == "has no torch":
        forget_torch()
    elif kind.startswith("/"):  # a path selects the torch in that folder
        forget_torch()
        sys.path.insert(0, kind)
    numbers, load_s = NUMBERS.get(kind, all_reduce.numbers), 1.0 if kind.endswith("/hangs") else 60.0
    with Collective(lambda sock: serve(sock, numbers), load_s=load_s) as collective, meet() as sock:
        results = list(run_pair_tests(sock, SECRET, rank, collective))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        raise AssertionError("a process is left")
    return [[name, {"verdict": each.verdict.value, "code": each.code, "text": each.text}] for name, each in results]


def forget_torch() -> None:
    sys.path[:] = [folder for folder in sys.path if not Path(folder, "torch").is_dir()]
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch" or name == all_reduce.__name__]:
        del sys.modules[name]
    del node_agent.all_reduce


def other_numbers(secret: bytes, rank: int) -> torch.Tensor:
    """Return the right numbers with one changed."""
    right = all_reduce.numbers(secret, rank)
    right[1234] += 1
    return right


def dies(secret: bytes, rank: int) -> torch.Tensor:
    """Kill the node when both are connected; this process ends with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
    raise AssertionError


def torch_dies(secret: bytes, rank: int) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


NUMBERS = {"adds other numbers": other_numbers, "dies": dies, "loses its torch": torch_dies}


def in_a_process(body: Callable[[], object]) -> Callable[[], object]:
    """Start a process and return a function that waits for it and returns its result."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, json.dumps(body()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writes)

    def ended() -> object:
        with os.fdopen(reads) as pipe:
            output = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(output) if output else None

    return ended


if __name__ == "__main__":
    main()
