"""Run a command on many hosts (here, in a small Slurm step, or over ssh), and ask each about its container plugins."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib import resources
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from dalsegno.containers.plugstack.facts import PluginFacts, parse_answer, plugins_in_use
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.system.machine import program
from dalsegno.system.processes import Completed, Runner

if TYPE_CHECKING:
    from dalsegno.spec.targets import SshHostSpec

TIMEOUT_S = 90.0
AT_ONCE = 16
Entrance = Callable[[str, Sequence[str]], tuple[Sequence[str], Mapping[str, str]]]
Progress = Callable[[int, int], None]  # called with the number of finished hosts and the number of all hosts
One = TypeVar("One")
Result = TypeVar("Result")

# Never prompt: nobody would answer. If an option is given twice, ssh uses the first.
QUIET = ("-o", "BatchMode=yes")
# Options from the user that also apply to a jump host. A user name, port or address applies only to the last host.
FOR_ALL = frozenset(
    ("stricthostkeychecking", "userknownhostsfile", "globalknownhostsfile", "identityfile", "identitiesonly",
     "identityagent", "connecttimeout")
)  # fmt: skip
BOUNDED = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


# Routes to hosts


@dataclass(frozen=True)
class HostRoute:
    """A way to run commands on hosts. `enter` turns a host and a command into the local command and its environment."""

    name: str  # one of here, srun, ssh
    enter: Entrance
    closed: Mapping[str, str] = field(default_factory=dict)  # hosts that cannot be reached by this route now, and why


Routes = Mapping[str, Sequence[HostRoute]]  # the routes to each host, best first


def local_route(env: Mapping[str, str]) -> HostRoute:
    """Return the route for commands on this host."""
    return HostRoute("here", lambda _, words: (words, env))


def srun_route(env: Mapping[str, str], partitions: Mapping[str, str], closed: Mapping[str, str]) -> HostRoute:
    """Return the route through a small job on the node. srun fails if the job cannot start within 15 s, as on a full
    node."""
    outside = {key: value for key, value in env.items() if not key.startswith(("SLURM_", "PYXIS_"))}
    if "SLURM_CONF" in env:
        outside["SLURM_CONF"] = env["SLURM_CONF"]

    def enter(node: str, words: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        where = [f"--partition={partitions[node]}"] if partitions.get(node) else []
        small = ["--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=64M", "--time=5", "--immediate=15"]
        return ["srun", f"--nodelist={node}", *where, *small, "--job-name=dalsegno-containers", *words], outside

    return HostRoute("srun", enter, closed)


def ssh_route(
    env: Mapping[str, str], options: Sequence[str] = (), hosts: Mapping[str, SshHostSpec] | None = None
) -> HostRoute:
    """Return the route through ssh with the user's own settings. `options` override the cluster file."""
    given = [word for option in options for word in ("-o", option)]
    quiet = {**env, "SSH_ASKPASS": program("false") or "false", "SSH_ASKPASS_REQUIRE": "force"}

    def enter(node: str, words: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        host = (hosts or {}).get(node)
        where = [*_ssh_words(host, options), *BOUNDED, "--", host.address or node] if host else [*BOUNDED, "--", node]
        return ["ssh", *QUIET, *given, *where, shlex.join(words)], quiet

    return HostRoute("ssh", enter)


def _ssh_words(host: SshHostSpec, options: Sequence[str]) -> list[str]:
    """Return a host's settings in the cluster file as ssh options."""
    values = {"-l": host.user, "-p": host.port, "-i": host.key}
    words = [word for option, value in values.items() if value for word in (option, str(value))]
    return [*words, "-o", f"ProxyCommand={_proxy_command(host, options)}"] if host.jump else words


def _proxy_command(host: SshHostSpec, options: Sequence[str]) -> str:
    """Return the ssh command for a jump host, with the same key. `-J` would use another key, and might prompt."""
    to, _, port = (host.jump or "").partition(":")
    values = {"-p": port, "-i": host.key}
    words = [word for option, value in values.items() if value for word in (option, value)]
    given = [
        word for option in options if _option_name(option) in FOR_ALL for word in ("-o", option.replace("%", "%%"))
    ]
    return shlex.join(["ssh", *QUIET, *given, *words, *BOUNDED, "-W", "[%h]:%p", "--", to])


def _option_name(option: str) -> str:
    return option.replace("=", " ").split()[0].lower()


def send(runner: Runner, route: HostRoute, node: str, words: Sequence[str]) -> Completed:
    """Run a command on a node. A command that could not be sent counts as failed."""
    argv, env = route.enter(node, words)
    try:
        return runner.run(argv, env=env, timeout_s=TIMEOUT_S)
    except CommandFailed as error:
        return Completed(tuple(argv), error.command_exit_code, stderr=error.stderr)
    except DalsegnoError as error:
        return Completed(tuple(argv), 127, stderr=error.what)


def last_line(done: Completed) -> str:
    """Return the last line of a failed command's output, without the exit code that srun adds after it."""
    output = (done.stderr or done.stdout).splitlines()
    lines = [
        line for line in output if line.strip() and not line.startswith("ds:") and "Exited with exit code" not in line
    ]
    return lines[-1].strip() if lines else f"no output (exit code {done.exit_code})"


# Many hosts at once


@dataclass(frozen=True)
class InterruptibleRunner:
    """A runner that starts no more commands after it was stopped. Commands that are already running continue."""

    runner: Runner
    stopped: Event = field(default_factory=Event)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        if self.stopped.is_set():
            raise DalsegnoError("interrupted", hint="run the command again")
        return self.runner.run(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)


def run_on_each(
    runner: Runner,
    work: Callable[[Runner, One], Result],
    items: Sequence[One],
    progress: Progress = lambda *_: None,
) -> list[Result]:
    """Run `work` for each item in threads, and return the results in order. After Ctrl-C, no more commands are
    started."""
    interruptible = InterruptibleRunner(runner)
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        started = [pool.submit(work, interruptible, item) for item in items]
        for count, _ in enumerate(as_completed(started), 1):
            progress(count, len(items))
        return [each.result() for each in started]
    finally:
        interruptible.stopped.set()
        pool.shutdown(cancel_futures=True)


# Questions


def ask_all(
    runner: Runner, routes: Routes, logins: Sequence[str], nodes: Sequence[str], progress: Progress = lambda *_: None
) -> list[PluginFacts]:
    """Return the facts that all login hosts and all nodes report. Each host also reports whether it has the plugins
    that other hosts use."""

    def ask(names: Sequence[str], plugins: Sequence[str], progress: Progress = lambda *_: None) -> list[PluginFacts]:
        return run_on_each(runner, lambda runner, name: ask_host(runner, name, routes[name], plugins), names, progress)

    answers = ask(logins, ())
    known = plugins_in_use(answers)
    found = ask(nodes, known, progress)
    if further := [each for each in plugins_in_use(found) if each not in known]:
        answers = ask(logins, further)
    return [*(replace(each, login=True) for each in answers), *found]


def ask_host(runner: Runner, name: str, routes: Sequence[HostRoute], plugins: Sequence[str]) -> PluginFacts:
    """Return a host's answer by the first route that works. If none works, `silent` says why each route failed."""
    why = []
    for route in routes:
        if name in route.closed:
            why.append(route.closed[name])
            continue
        done = send(runner, route, name, question(plugins))
        if (facts := parse_answer(name, done.stdout)) is not None:
            return facts
        why.append(f"{route.name}: {last_line(done)}")
    return PluginFacts(name, silent="; ".join(why), tried=tuple(route.name for route in routes))


def question(plugins: Sequence[str]) -> list[str]:
    """Return the command that makes a host report its facts."""
    script = resources.files("dalsegno.containers.plugstack").joinpath("ask.sh").read_text()
    return ["sh", "-c", script, "dalsegno", *plugins]
