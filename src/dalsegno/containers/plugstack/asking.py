"""Every host is asked, each in the first way that leads to it: a step of Slurm's, ssh, or into a virtual host."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources

from dalsegno.containers.plugstack.facts import HostFacts, parse_answer, plugins_in_use
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.system.processes import Completed, Runner

AT_ONCE = 16
TIMEOUT_S = 90.0
Entrance = Callable[[str, Sequence[str]], tuple[Sequence[str], Mapping[str, str]]]


@dataclass(frozen=True)
class Way:
    """How a command gets to a node: what to run here instead, and with which environment."""

    name: str  # srun, ssh
    enter: Entrance
    closed: Mapping[str, str] = field(default_factory=dict)  # nodes to which it does not lead now, and why


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


def by_ssh(env: Mapping[str, str]) -> Way:
    def enter(node: str, words: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        quiet = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
        return ["ssh", *quiet, node, shlex.join(words)], env

    return Way("ssh", enter)


def ask_all(
    runner: Runner, here: str, env: Mapping[str, str], nodes: Sequence[str], ways: Sequence[Way]
) -> list[HostFacts]:
    """This host first, then the nodes; plugins that one of them uses are looked for on all."""
    own = ask_here(runner, here, env, ())
    known = plugins_in_use([own])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        theirs = list(pool.map(lambda node: ask_node(runner, node, ways, known), nodes))
    if news := [each for each in plugins_in_use(theirs) if each not in known]:
        own = ask_here(runner, here, env, news)
    return [own, *theirs]


def ask_here(runner: Runner, here: str, env: Mapping[str, str], plugins: Sequence[str]) -> HostFacts:
    try:
        done = runner.run(question(plugins), env=env, timeout_s=TIMEOUT_S)
    except DalsegnoError as error:
        return HostFacts(here, login=True, silent=error.what)
    return parse_answer(here, done.stdout, login=True) or HostFacts(here, login=True, silent=last_words(done))


def ask_node(runner: Runner, node: str, ways: Sequence[Way], plugins: Sequence[str]) -> HostFacts:
    """Its answer, in the first way that gives one; else what each way said."""
    why = []
    for way in ways:
        if node in way.closed:
            why.append(way.closed[node])
            continue
        done = send(runner, way, node, question(plugins))
        if (facts := parse_answer(node, done.stdout)) is not None:
            return facts
        why.append(f"{way.name}: {last_words(done)}")
    return HostFacts(node, silent="; ".join(why))


def send(runner: Runner, way: Way, node: str, words: Sequence[str], stdin: str | None = None) -> Completed:
    """What came of a command on a node; one that could not be sent there has failed."""
    argv, env = way.enter(node, words)
    try:
        return runner.run(argv, stdin=stdin, env=env, timeout_s=TIMEOUT_S)
    except CommandFailed as error:
        return Completed(tuple(argv), error.command_exit_code, stderr=error.stderr)
    except DalsegnoError as error:
        return Completed(tuple(argv), 127, stderr=error.what)


def question(plugins: Sequence[str]) -> list[str]:
    return ["sh", "-c", script("ask.sh"), "dalsegno", *plugins]


def script(name: str) -> str:
    return resources.files("dalsegno.containers.plugstack").joinpath(name).read_text()


def last_words(done: Completed) -> str:
    """What a command that failed said last; srun adds which task it was, after what the task itself said."""
    said = (done.stderr or done.stdout).splitlines()
    lines = [
        line for line in said if line.strip() and not line.startswith("ds:") and "Exited with exit code" not in line
    ]
    return lines[-1].strip() if lines else f"nothing was said (exit code {done.exit_code})"
