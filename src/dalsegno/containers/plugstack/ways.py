"""How a command gets to a host: here, by a step of Slurm's, over ssh, or into a virtual host."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.system.machine import program
from dalsegno.system.processes import Completed, Runner

if TYPE_CHECKING:
    from dalsegno.spec.targets import Host

TIMEOUT_S = 90.0
Entrance = Callable[[str, Sequence[str]], tuple[Sequence[str], Mapping[str, str]]]
# Never a question, which nobody would answer. Of options that are given twice ssh takes the first.
QUIET = ("-o", "BatchMode=yes")
# Those of the user's options that hold for a host on the way too. A user, a port or an address is of the last one.
FOR_ALL = frozenset(
    ("stricthostkeychecking", "userknownhostsfile", "globalknownhostsfile", "identityfile", "identitiesonly",
     "identityagent", "connecttimeout")
)  # fmt: skip
BOUNDED = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Way:
    """What to run here so that a command runs on a host, and with which environment."""

    name: str  # here, srun, ssh
    enter: Entrance
    closed: Mapping[str, str] = field(default_factory=dict)  # hosts to which it does not lead now, and why


def here(env: Mapping[str, str]) -> Way:
    return Way("here", lambda _, words: (words, env))


def by_srun(env: Mapping[str, str], partitions: Mapping[str, str], closed: Mapping[str, str]) -> Way:
    """A small step of a job of its own. It waits for no node that is full or out of service."""
    outside = {key: value for key, value in env.items() if not key.startswith(("SLURM_", "PYXIS_"))}
    if "SLURM_CONF" in env:
        outside["SLURM_CONF"] = env["SLURM_CONF"]

    def enter(node: str, words: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        where = [f"--partition={partitions[node]}"] if partitions.get(node) else []
        small = ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=64M", "--time=5", "--immediate=15"]
        return ["srun", f"--nodelist={node}", *where, *small, "--job-name=dalsegno-containers", *words], outside

    return Way("srun", enter, closed)


def by_ssh(env: Mapping[str, str], options: Sequence[str] = (), hosts: Mapping[str, Host] | None = None) -> Way:
    """As `ssh HOST` would, with the user's own settings; `options` are ssh's own, and go before those of a file."""
    given = [word for option in options for word in ("-o", option)]
    quiet = {**env, "SSH_ASKPASS": program("false") or "false", "SSH_ASKPASS_REQUIRE": "force"}

    def enter(node: str, words: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        host = (hosts or {}).get(node)
        where = [*_reach(host, options), *BOUNDED, "--", host.address or node] if host else [*BOUNDED, "--", node]
        return ["ssh", *QUIET, *given, *where, shlex.join(words)], quiet

    return Way("ssh", enter)


def _reach(host: Host, options: Sequence[str]) -> list[str]:
    """What a cluster file says of a machine, in ssh's words."""
    said = {"-l": host.user, "-p": host.port, "-i": host.key}
    words = [word for option, value in said.items() if value for word in (option, str(value))]
    return [*words, "-o", f"ProxyCommand={_through(host, options)}"] if host.jump else words


def _through(host: Host, options: Sequence[str]) -> str:
    """The way through another host, with the same key; `-J` would go there with another, and might ask."""
    to, _, port = (host.jump or "").partition(":")
    said = {"-p": port, "-i": host.key}
    words = [word for option, value in said.items() if value for word in (option, value)]
    given = [word for option in options if _name(option) in FOR_ALL for word in ("-o", option.replace("%", "%%"))]
    return shlex.join(["ssh", *QUIET, *given, *words, *BOUNDED, "-W", "[%h]:%p", "--", to])


def _name(option: str) -> str:
    return option.replace("=", " ").split()[0].lower()


def send(runner: Runner, way: Way, node: str, words: Sequence[str], stdin: str | None = None) -> Completed:
    """What came of a command on a node; one that could not be sent there has failed."""
    argv, env = way.enter(node, words)
    try:
        return runner.run(argv, stdin=stdin, env=env, timeout_s=TIMEOUT_S)
    except CommandFailed as error:
        return Completed(tuple(argv), error.command_exit_code, stderr=error.stderr)
    except DalsegnoError as error:
        return Completed(tuple(argv), 127, stderr=error.what)


def last_words(done: Completed) -> str:
    """What a command that failed said last; srun adds which task it was, after what the task itself said."""
    said = (done.stderr or done.stdout).splitlines()
    lines = [
        line for line in said if line.strip() and not line.startswith("ds:") and "Exited with exit code" not in line
    ]
    return lines[-1].strip() if lines else f"nothing was said (exit code {done.exit_code})"
