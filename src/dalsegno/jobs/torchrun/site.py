"""A torchrun as its coordinator and its agents see it: the shape, the workers' variables, what each node starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from zipfile import is_zipfile

from dalsegno.errors import UsageError
from dalsegno.jobs.frameworks import World, torch_env
from dalsegno.jobs.site import TORCH_MODULES
from dalsegno.jobs.torchrun.args import TorchrunArgs
from dalsegno.jobs.torchrun.meeting import LOOPBACK, Meeting, is_loopback, parse_endpoint
from dalsegno.launch.folder import RunFolder
from dalsegno.launch.group import Shape
from dalsegno.launch.liveness import Timing
from dalsegno.launch.site import Seats
from dalsegno.train.frames import Message

# Nothing can be below it, so nothing is kept: this coordinator lives and dies with its agent, as torchrun's does.
NOWHERE = Path(os.devnull)
JOIN_S = 600.0
LAST_CALL_S = 30.0


@dataclass(frozen=True)
class TorchrunSite:
    """`launch.site.Terms` for a torchrun command line."""

    args: TorchrunArgs
    run: str  # torchrun's run id
    id: str  # ours, of which there is only one
    nproc_per_node: int
    meeting: Meeting
    store: bool = True  # there is a torch that can hold it; else it is the first worker's part
    timing: Timing = field(default_factory=Timing)
    hang_timeout_s: float | None = 0.0
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
        """Each node has its own command line; here is only what has to be the same on all."""
        return {
            "shape": shape_flags(self.args, self.nproc_per_node),
            "store": self.store,
            "gone_s": self.timing.gone_s,
        }

    def worker_env(self, seats: Seats, rank: int, found: Mapping[str, str]) -> dict[str, str]:
        world = World(
            run=self.run,
            hosts=(self._master(seats.hosts), *seats.hosts[1:]),
            nproc_per_node=seats.nproc_per_node,
            port=seats.port,
            restarts=seats.restarts,
            max_restarts=self.max_restarts,
            role=self.args.role,
            virtual_local_rank=self.args.virtual_local_rank,
        )
        return {
            **torch_env(world, rank, found),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store),
            "TORCHELASTIC_SIGNALS_TO_HANDLE": self.args.signals_to_handle,
        }

    def _master(self, hosts: Sequence[str]) -> str:
        """Who sits on our own node comes to us by the loopback, where the others do not find it."""
        if self.args.backend == "static" and not self.args.standalone:
            return parse_endpoint(self.args.endpoint, 0)[0]
        if self.meeting.alone:
            return self.args.local_addr or LOOPBACK
        return self.meeting.host if is_loopback(hosts[0]) and not all(map(is_loopback, hosts)) else hosts[0]


def agent_setup(args: TorchrunArgs, python: str, nproc_per_node: int, join_s: float) -> Message:
    """What this node starts, and how."""
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
    """What all nodes have to be told alike."""
    return {"--nnodes": str(args.nodes), "--nproc-per-node": str(nproc_per_node)}


def _is_bundle(args: TorchrunArgs) -> bool:
    """A folder or an archive with a `__main__` in it, which Python runs like a script, and a forked one does not."""
    return not args.module and (os.path.isdir(args.training_script) or is_zipfile(args.training_script))


def fill_macros(args: Sequence[str], local_rank: int) -> list[str]:
    """As torchrun does: `${local_rank}` in a worker's arguments is its local rank, and `$$` is one dollar."""
    return [Template(each).safe_substitute(local_rank=local_rank) for each in args]


def seconds(args: TorchrunArgs, name: str, default: float) -> float:
    """A time in `--rdzv-conf`."""
    text = args.settings.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        what, hint = f"`{text}` is no number of seconds", f"write `{name}={default:g}`, which is the default"
        raise UsageError(what, where=f"--rdzv-conf {name}", hint=hint) from None
