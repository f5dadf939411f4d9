"""What torchrun was told, with torchrun's own names, defaults and readings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.errors import UsageError
from dalsegno.jobs.values import Nodes, parse_nodes, shown

MASTER_PORT = 29_500
_STREAMS = re.compile(r"[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*", re.ASCII)


@dataclass(frozen=True)
class TorchrunArgs:
    """A torchrun command line. One that exists is one that torchrun would take."""

    training_script: str
    training_script_args: tuple[str, ...] = ()
    nnodes: str = "1:1"
    nproc_per_node: str = "1"  # a number, auto, cpu, gpu, xpu, or the name of another accelerator
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_id: str = "none"
    rdzv_conf: str = ""
    standalone: bool = False
    max_restarts: int = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    event_log_handler: str = "null"
    role: str = "default"
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    log_line_prefix_template: str = ""
    local_ranks_filter: str = ""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    local_addr: str | None = None
    logs_specs: str | None = None
    numa_binding: str | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    shutdown_timeout: int | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.module and self.no_python and not self.run_path:
            raise UsageError("`--no-python` and `--module` exclude each other", hint="leave one out")
        for flag, value in (("--max-restarts", self.max_restarts), ("--shutdown-timeout", self.shutdown_timeout or 0)):
            if value < 0:
                raise UsageError(f"`{value}` is less than 0", where=flag, hint="write 0 for none")
        _ = self.nodes, self.settings, self.shown_ranks
        parse_streams(self.redirects, "--redirects")
        parse_streams(self.tee, "--tee")

    @property
    def nodes(self) -> Nodes:
        return parse_nodes(self.nnodes)

    @property
    def backend(self) -> str:
        return "c10d" if self.standalone else self.rdzv_backend

    @property
    def endpoint(self) -> str:
        """Where the rendezvous is: a static one is at the master, a standalone one wherever there is a port."""
        if self.standalone:
            return "localhost:0"
        if self.rdzv_backend == "static" and not self.rdzv_endpoint:
            return f"{self.master_addr}:{self.master_port or MASTER_PORT}"
        return self.rdzv_endpoint

    @property
    def settings(self) -> dict[str, str]:
        """`--rdzv-conf` as a mapping."""
        pairs = [pair.partition("=") for pair in self.rdzv_conf.split(",") if pair.strip()]
        if any(not key.strip() or not value.strip() for key, _, value in pairs):
            what = f"{shown(self.rdzv_conf)} is not `key=value,key=value`"
            raise UsageError(what, where="--rdzv-conf", hint="write `join_timeout=600,last_call_timeout=30`")
        return {key.strip(): value.strip() for key, _, value in pairs}

    @property
    def shown_ranks(self) -> tuple[int, ...]:
        """Local ranks whose output is shown; none: all."""
        words = self.local_ranks_filter.split(",") if self.local_ranks_filter else []
        if not all(word.strip().isdigit() for word in words):
            what = f"{shown(self.local_ranks_filter)} is not a list of local ranks"
            raise UsageError(what, where="--local-ranks-filter", hint="write `0,1`")
        return tuple(int(word) for word in words)


def parse_streams(text: str, where: str = "") -> dict[int | None, int]:
    """`3`, or `0:1,1:2`: local rank (None: all) to 0 none, 1 stdout, 2 stderr, 3 both."""
    if not _STREAMS.fullmatch(text):
        hint = "write `3`, or `0:1,1:2` by local rank"
        raise UsageError(f"{shown(text)} does not say which output", where=where, hint=hint)
    if ":" not in text:
        return {None: int(text)}
    return {int(rank): int(what) for rank, what in (pair.split(":") for pair in text.split(","))}


def count_processes(nproc_per_node: str, cpus: int, gpus: int) -> int:
    """`--nproc-per-node` on a node with so many CPUs and accelerators."""
    if nproc_per_node.isascii() and nproc_per_node.isdigit():
        return int(nproc_per_node)
    known = {"cpu": cpus, "gpu": gpus, "xpu": gpus, "auto": gpus or cpus}
    if not known.get(nproc_per_node):
        hint = "write a number, or `auto`, `cpu`, `gpu`"
        raise UsageError(f"there is no {shown(nproc_per_node)} here to count", where="--nproc-per-node", hint=hint)
    return known[nproc_per_node]
