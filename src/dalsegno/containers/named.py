"""Named containers of a user, listed and removed by our plugin in a small step on each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dalsegno.containers.plugstack.hosts import HostRoute, Progress, last_line, run_on_each, send
from dalsegno.system.processes import Completed, Runner

OURS = "dalsegno: "  # before what the plugin says


@dataclass(frozen=True)
class NamedContainer:
    """One container that a node keeps."""

    node: str
    name: str
    image: str  # as it was named
    in_use: bool
    used: float  # when a step last used it, in seconds since 1970


@dataclass(frozen=True)
class NodeAnswer:
    """What a node said; `error` is empty if it did what it was asked."""

    node: str
    lines: tuple[str, ...] = ()
    error: str = ""


def list_named(runner: Runner, route: HostRoute, nodes: Sequence[str], progress: Progress) -> list[NodeAnswer]:
    """Ask every node which named containers of this user it keeps."""
    return run_on_each(runner, lambda runner, node: _step(runner, route, node, "--container-list"), nodes, progress)


def remove_named(
    runner: Runner, route: HostRoute, nodes: Sequence[str], names: Sequence[str], progress: Progress
) -> list[NodeAnswer]:
    """Remove named containers of this user from every node that keeps them; the lines are the names removed."""
    word = f"--container-remove={','.join(names)}"
    return run_on_each(runner, lambda runner, node: _step(runner, route, node, word), nodes, progress)


def parse_listing(answer: NodeAnswer) -> list[NamedContainer]:
    """Read `NAME, in use, last used, image`, with tabs between; a line of another form is skipped."""
    found = []
    for line in answer.lines:
        words = line.split("\t", 3)
        if len(words) == 4 and words[1] in ("0", "1") and words[2].isdecimal():
            found.append(NamedContainer(answer.node, words[0], words[3], words[1] == "1", float(words[2])))
    return found


def _step(runner: Runner, route: HostRoute, node: str, word: str) -> NodeAnswer:
    if node in route.closed:
        return NodeAnswer(node, error=route.closed[node])
    done = send(runner, route, node, [word, "true"])
    if done.exit_code == 0:
        return NodeAnswer(node, tuple(done.stdout.splitlines()))
    return NodeAnswer(node, error=_why(done))


def _why(done: Completed) -> str:
    """The plugin's own line names the node, which its reader knows; srun without the plugin refuses the option."""
    ours = [line for line in done.stderr.splitlines() if line.startswith(OURS)]
    if ours:
        return ours[0].removeprefix(OURS).partition(": container: ")[2] or ours[0]
    if "unrecognized option" in done.stderr:
        return "its Slurm has no plugin of Dal Segno's, or an older one"
    return last_line(done)
