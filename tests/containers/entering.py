"""Stands in for slurmstepd, to test the helper without Slurm: `python entering.py HELPER WORD... -- COMMAND...`.

It requests a container from the helper, becomes the user that the words name, enters the container, and executes the
command. Errors go to stderr, with exit code 1. Needs only Python's standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
ANSWER_FD = 3


def ask(helper: str, words: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the words of the helper's answer and the namespaces sent with it; SystemExit with its error."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = (socket.socket(fileno=fcntl.fcntl(each.detach(), fcntl.F_DUPFD_CLOEXEC, 10)) for each in pair)
    os.closerange(ANSWER_FD, 10)
    with theirs:
        os.dup2(theirs.fileno(), ANSWER_FD)
    child = subprocess.Popen([helper, *words], pass_fds=[ANSWER_FD])
    os.close(ANSWER_FD)
    with contextlib.suppress(BrokenPipeError):  # the helper may have answered and exited without reading it
        ours.send(Path("/proc/self/cgroup").read_bytes() + b"\0")  # a task sends the same
    text, fds = receive(ours)
    child.wait()
    answer = text.rstrip(b"\0").decode()
    if not answer or answer.startswith("!"):
        raise SystemExit(answer[1:] or f"the helper exited with {child.returncode}")
    if child.returncode != 0:
        raise SystemExit(f"the helper answered and exited with {child.returncode}")
    return answer.split(), list(fds)


def receive(ours: socket.socket) -> tuple[bytes, list[int]]:
    try:
        text, fds, _, _ = socket.recv_fds(ours, 4096, 4)
    except ConnectionResetError:  # the helper exited without reading our data; its answer comes next
        text, fds, _, _ = socket.recv_fds(ours, 4096, 4)
    return text, fds


def enter(answer: Sequence[str], fds: Sequence[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [(fds[0], CLONE_NEWNS)]
    if "user" in answer:
        spaces.insert(0, (fds[1], CLONE_NEWUSER))
    for fd, kind in spaces:
        if libc.setns(fd, kind) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.chdir("/")


def main(helper: str, *rest: str) -> None:
    cut = rest.index("--")
    words, command = rest[:cut], rest[cut + 1 :]
    answer, fds = ask(helper, words)
    ids = {name: int(value) for name, _, value in (word.partition("=") for word in words) if name in ("uid", "gid")}
    if os.geteuid() == 0 and ids["uid"] != 0:
        os.setgroups([])
        os.setresgid(ids["gid"], ids["gid"], ids["gid"])
        os.setresuid(ids["uid"], ids["uid"], ids["uid"])
    enter(answer, fds)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
