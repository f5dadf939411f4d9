"""Docker's daemon on one node for as long as a scene is played, with nothing of it outside its own namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.errors import NotThere, TargetError
from dalsegno.system.children import Child, start
from dalsegno.system.machine import program
from dalsegno.system.processes import Completed, LocalRunner, Runner
from dalsegno.system.procfs import MARK, Process, descendants, end, marked, start_ticks

START_S = 60.0
END_S = 20.0
# Images, sockets, pid files and the key that it writes to /etc are in memory, and seen by the daemon alone: they go
# with it.
PRIVATE = """mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/etc /run/work &&
    mount -t overlay -o lowerdir=/etc,upperdir=/run/etc,workdir=/run/work overlay /etc && exec "$@"
"""
ALONE = ("unshare", "--mount", "--", "/bin/sh", "-c", PRIVATE, "sh")
# A small root file system and no network of its own: nothing of the machine's is changed.
PLAIN = (
    "--data-root=/run/data", "--exec-root=/run/docker", "--pidfile=/run/docker.pid", "--storage-driver=vfs",
    "--exec-opt=native.cgroupdriver=cgroupfs", "--default-cgroupns-mode=private", "--bridge=none",
    "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
)  # fmt: skip

OnNode = Callable[[Sequence[str], Mapping[str, str]], tuple[list[str], dict[str, str]]]


def find_programs() -> tuple[str, str]:
    """The daemon, and the client that came with it."""
    daemon = program("dockerd")
    if daemon is None:
        raise NotThere(
            "there is no Docker on this machine to compare with",
            hint="`./dalsegno demo --scene docker` from a clone installs it, or: "
            "sudo apt-get install --no-install-recommends docker.io",
        )
    beside = os.pathsep.join([os.path.dirname(daemon), "/usr/bin"])
    return daemon, shutil.which("docker", path=beside) or program("docker") or "docker"


@dataclass(frozen=True)
class Docker:
    """A client of the daemon, from anywhere on the machine. As a Runner it is the `docker` of an import."""

    client: str
    socket: Path
    inner: Runner

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"

    def ask(self, *args: str) -> str:
        done = self.run(["docker", *args], timeout_s=START_S)
        return done.checked(hint="`dalsegno demo --keep` leaves the cluster up to look at").stdout

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        words = [self.client, "--host", self.host, *argv[1:]]
        return self.inner.run(words, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)


@contextlib.contextmanager
def daemon(on_node: OnNode, folder: Path, group: str, cgroup: str) -> Iterator[Docker]:
    """Runs on the node while the block does. `group` may speak to it, which is as much as to be root there."""
    dockerd, client = find_programs()
    docker = Docker(client, folder / "docker.sock", LocalRunner())
    log = folder / "dockerd.log"
    words = [*ALONE, dockerd, *PLAIN, f"--host={docker.host}", f"--group={group}", f"--cgroup-parent={cgroup}"]
    mark = str(docker.socket)
    argv, env = on_node(words, {"PATH": os.environ.get("PATH", os.defpath), MARK: mark})
    child = start(argv, env, output=log)
    try:
        _wait_until_it_answers(docker, child, log)
        yield docker
    finally:
        _end_all(mark)
        child.close()


def _wait_until_it_answers(docker: Docker, child: Child, log: Path) -> None:
    until = time.monotonic() + START_S
    while docker.run(["docker", "version"], timeout_s=START_S).exit_code != 0:
        if not child.alive() or time.monotonic() > until:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise TargetError(
                f"Docker's daemon does not run on this machine: {' '.join(last) or 'it said nothing'}",
                where=str(log),
                hint="it needs root, cgroups and mounts of its own; `dalsegno demo --keep` leaves its log to read",
            )
        time.sleep(0.1)


def _end_all(mark: str) -> None:
    """The daemon, its helpers, and what they have started in containers: until nothing of it is left."""
    until = time.monotonic() + END_S
    while processes := marked(mark):
        below = {pid for process in processes for pid in descendants(process.pid)}
        below_it = [Process(pid, ticks) for pid in below if (ticks := start_ticks(pid)) is not None]
        end([*processes, *below_it], timeout_s=1.0)
        if time.monotonic() > until:
            raise TargetError("Docker's daemon does not end", hint="`dalsegno down dalsegno-demo` ends its host")
