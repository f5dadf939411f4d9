"""The coordinator of a torchrun command.

It runs in a thread of the agent on the rendezvous host, and ends with that agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from zipfile import is_zipfile

from dalsegno.errors import UsageError
from dalsegno.runs.coordinator.agents.agents import Peer, RunAgents
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.agents.messages import AgentMessage, Broken, LogPiece
from dalsegno.runs.coordinator.coordinator import Coordinator
from dalsegno.runs.coordinator.generations.causes import Failure
from dalsegno.runs.coordinator.generations.events import Finish
from dalsegno.runs.coordinator.generations.generations import Run
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import StandbyMode
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource, RunControl
from dalsegno.runs.coordinator.reports.report import RunFacts, StatusWriter
from dalsegno.runs.coordinator.site import GenerationLayout, NodeEnv
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.submit.frameworks import ProcessLayout, torch_env
from dalsegno.runs.submit.site import TORCH_MODULES
from dalsegno.runs.torchrun.args import TorchrunArgs
from dalsegno.runs.torchrun.hang_evidence import HangEvidence, TorchrunHangWatch
from dalsegno.runs.torchrun.rendezvous import LOOPBACK, Keys, Rendezvous, host_of, is_loopback, parse_endpoint
from dalsegno.wire.frames import Message

# The run: its shape, the variables of its workers, the setup of each node


# No path can exist below a device, so nothing is saved. As in torchrun, nothing survives the agent.
NOWHERE = Path(os.devnull)
JOIN_S = 600.0
LAST_CALL_S = 30.0


@dataclass(frozen=True)
class TorchrunSite:
    """The `RunTerms` of a torchrun command line."""

    args: TorchrunArgs
    run: str  # torchrun's run id
    id: str  # Dal Segno's own id, which is unique
    nproc_per_node: int
    meeting: Rendezvous
    store: bool = True  # whether the agent has torch and can run the store; if not, the first worker runs it
    timing: Timing = field(default_factory=Timing)
    hang_timeout_s: float | None = None
    standby: StandbyMode = StandbyMode.AUTO
    own_job: int | None = None

    @property
    def folder(self) -> RunFolder:
        return RunFolder(NOWHERE / self.id)

    @property
    def name(self) -> str:
        return self.args.training_script

    @property
    def shape(self) -> Shape:
        nodes = self.args.nodes
        return Shape(nodes.min, nodes.max, self.nproc_per_node)

    @property
    def max_restarts(self) -> int:
        return self.args.max_restarts

    def setup(self) -> Message:
        """Return the settings that must be the same on all nodes.

        All other settings come from each node's command line.
        """
        return {
            "shape": shape_flags(self.args, self.nproc_per_node),
            "store": self.store,
            "gone_s": self.timing.gone_s,
        }

    def node_env(self, layout: GenerationLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
        world = ProcessLayout(
            run=self.run,
            hosts=(self._master(layout.hosts), *layout.hosts[1:]),
            nproc_per_node=layout.nproc_per_node,
            port=layout.port,
            restarts=layout.restarts,
            max_restarts=self.max_restarts,
            role=self.args.role,
            virtual_local_rank=self.args.virtual_local_rank,
        )
        own = {
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": self.args.signals_to_handle,
        }
        return torch_env(world, group_rank, found).with_common(own)

    def _master(self, hosts: Sequence[str]) -> str:
        """Return MASTER_ADDR: the static endpoint, or the first host at an address that all nodes can reach."""
        if self.args.backend == "static" and not self.args.standalone:
            return parse_endpoint(self.args.endpoint, 0)[0]
        if self.meeting.alone:
            return self.args.local_addr or LOOPBACK
        return self.meeting.host if is_loopback(hosts[0]) and not all(map(is_loopback, hosts)) else hosts[0]


def agent_setup(args: TorchrunArgs, python: str, nproc_per_node: int, join_s: float) -> Message:
    """Return the setup for this node's workers."""
    is_python = args.run_path or not args.no_python
    return {
        "python": python,
        "modules": list(TORCH_MODULES) if is_python and not _is_bundle(args) else [],
        "script": args.training_script,
        "args": list(args.training_script_args),
        "module": args.module and not args.run_path,
        "is_python": is_python,
        "cwd": os.getcwd(),
        "folder": "",
        "shape": shape_flags(args, nproc_per_node),
        "store": True,
        "env": {},
        "stdin": True,
        "absence_s": join_s,
    }


def shape_flags(args: TorchrunArgs, nproc_per_node: int) -> dict[str, str]:
    """Return the flags that must be equal on all nodes."""
    return {"--nnodes": str(args.nodes), "--nproc-per-node": str(nproc_per_node)}


def _is_bundle(args: TorchrunArgs) -> bool:
    """Return whether the script is a folder or an archive with a `__main__`, which Python runs like a script."""
    return not args.module and (os.path.isdir(args.training_script) or is_zipfile(args.training_script))


def fill_macros(args: Sequence[str], local_rank: int) -> list[str]:
    """Substitute as torchrun does: replace `${local_rank}` in arguments with the local rank, and `$$` with `$`."""
    return [Template(each).safe_substitute(local_rank=local_rank) for each in args]


def seconds(args: TorchrunArgs, name: str, default: float) -> float:
    """Return a time from `--rdzv-conf`; raise UsageError if it is not a number."""
    text = args.settings.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        what, hint = f"`{text}` is not a number of seconds", f"write `{name}={default:g}`, which is the default"
        raise UsageError(what, where=f"--rdzv-conf {name}", hint=hint) from None


# The coordinator in its own thread


Talk = Callable[[str], None]


class CoordinatorThread:
    """A coordinator in a thread. `open` returns its port; `join` waits until it has shut down."""

    def __init__(self, site: TorchrunSite, keys: Keys, talk: Talk) -> None:
        self._site, self._keys, self._talk = site, keys, talk
        self._opened: Future[int] = Future()
        self._coordinator: TorchrunCoordinator | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    def open(self) -> int:
        """Start the coordinator and return its port. Raise OSError if it cannot listen."""
        self._thread.start()
        return self._opened.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # `open` raises the error if it still waits; a later error ends the thread
            if not self._opened.done():
                self._opened.set_exception(error)
            else:
                raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._coordinator = TorchrunCoordinator(self._site, self._keys, self._talk, self._opened.set_result)
        await self._coordinator.serve()

    def leave(self, signal_name: str) -> None:
        """Make all agents leave, because the run ends with this host's agent. Workers may still save."""
        self._call(lambda coordinator: coordinator.leave(signal_name))

    def stop(self, why: str) -> None:
        self._call(lambda coordinator: coordinator.stop(1, why))

    def _call(self, do: Callable[[TorchrunCoordinator], None]) -> None:
        loop, coordinator = self._loop, self._coordinator
        if loop is not None and coordinator is not None:
            with contextlib.suppress(RuntimeError):  # if the loop is closed, the coordinator has ended already
                loop.call_soon_threadsafe(do, coordinator)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class TorchrunCoordinator(Coordinator):
    """A coordinator that counts restarts as torchrun does, listens on torchrun's endpoint, and saves nothing."""

    def __init__(self, site: TorchrunSite, keys: Keys, talk: Talk, opened: Callable[[int], None]) -> None:
        join_timeout = JoinTimeout(site.shape.min_nodes, seconds(site.args, "join_timeout", JOIN_S))
        gather_s = seconds(site.args, "last_call_timeout", LAST_CALL_S)
        self._output = OutputWriter(site, talk)
        super().__init__(site, join_timeout.attach, gather_s, self._output)
        self.run = Run(site.shape, site.max_restarts, literal=True)
        self.hangs = TorchrunHangWatch(self, site.hang_timeout_s, self._output.evidence, self._output.tell)
        self._terms, self._keys, self._opened = site, keys, opened

    async def open(self) -> None:
        meeting, secret = self._terms.meeting, self._keys.secret
        self.agents = RunAgents(self._keys.mark, secret, self._terms.timing, self)
        greeting = None if meeting.alone else self._keys.greeting
        self._opened(await self.agents.open(meeting.port, greeting, LOOPBACK if meeting.alone else "0.0.0.0"))

    def _write_state(self, durable: bool) -> bool:
        """Do nothing, because no other coordinator could read the state."""
        return True

    def leave(self, signal_name: str) -> None:
        """Tell all agents to leave. Do not report them as lost."""
        self._output.quiet = True
        self.agents.send_all({"leave": signal_name})

    def agent_message(self, peer: Peer, message: AgentMessage) -> None:
        """Handle a message. If a node cannot start workers, end the run, because no other node can replace it."""
        if isinstance(message, Broken):
            self.stop(1, f"{host_of(peer.name)}: {message.why}")
        else:
            super().agent_message(peer, message)


class JoinTimeout(NoNodeSource):
    """A node source that starts no agents. Like torchrun, it ends the run after `join_s` with too few agents."""

    def __init__(self, least: int, join_s: float) -> None:
        super().__init__()
        self._least, self._join_s = least, join_s
        self._short_since: float | None = None
        self._coordinator: RunControl | None = None

    def attach(self, coordinator: RunControl) -> JoinTimeout:
        self._coordinator = coordinator
        return self

    def check_agents(self) -> None:
        coordinator, now = self._coordinator, time.monotonic()
        if coordinator is None or len(coordinator.present) >= self._least:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > self._join_s and not coordinator.closing:
            coordinator.stop(
                1, f"only {len(coordinator.present)} of {self._least} nodes joined within {self._join_s:.0f} s"
            )


def _reason(last: Failure | None) -> str:
    """Return a clause with the reason for a restart. After a hang, no rank has failed by itself."""
    if last is None:
        return ""
    return f": {last.why}" if last.why else f": rank {last.rank} on {host_of(last.node)} {last.what()}"


class OutputWriter(StatusWriter):
    """Prints losses and restarts to torchrun's output instead of writing a status file and a journal."""

    def __init__(self, site: TorchrunSite, talk: Talk) -> None:
        super().__init__(site)
        self._talk = talk
        self.evidence = HangEvidence()
        self.quiet = False

    def journal(self, event: RunEvent, **what: object) -> None:
        if event == RunEvent.LOST and not self.quiet:
            self._talk(f"lost {host_of(str(what['node']))}: {what['why']}")
        elif event == RunEvent.FAILED and what["timed_out"]:
            self.evidence.record_timeout(int(str(what["generation"])), int(str(what["rank"])))

    def _write_log(self, piece: LogPiece) -> None:
        """Keep the evidence about a hang. Agents of torchrun send no logs."""
        self.evidence.add(piece)

    def note(self, text: str) -> None:
        """Do nothing: most notes are about warm parents or snapshots, which torchrun's users did not request."""

    def name_of(self, agent: str) -> str:
        return host_of(agent)

    def note_standby(self, text: str) -> None:
        """Print a line about standby workers, because they hold GPU memory that torchrun would leave free."""
        if text:
            self.tell(text)

    def tell(self, text: str) -> None:
        """Print a line, unless the agents were told to leave."""
        if not self.quiet:
            self._talk(text)

    def last_output(self, generation: int) -> float:
        """Return 0, because workers write to the terminal themselves."""
        return 0.0

    def generation(self, run: Run) -> None:
        if run.group is not None:
            places = {rank: host_of(run.group.agent_of(rank)) for rank in run.group.ranks}
            self.evidence.start(run.generation, places)
        if run.generation > 1 and run.group is not None:
            nodes = len(run.group.places)
            budget = f"{run.restarts} of {run.max_restarts} restarts used"
            self._talk(f"restarting on {nodes} node{'s' if nodes > 1 else ''} ({budget}){_reason(run.last)}")

    def status(self, facts: RunFacts) -> None:
        """Do nothing, because there is no status file."""

    def ended(self, facts: RunFacts, end: Finish) -> None:
        """Do nothing, because each agent reports the end on its own node."""
