"""Agents' names in a torchrun: several may run on one node, and names sort by the order that was given. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dalsegno.jobs.torchrun.args import TorchrunArgs


def agent_name(args: TorchrunArgs, environ: Mapping[str, str], host: str, pid: int) -> str:
    """`ORDER@HOST#PID`. The order is `--node-rank` where that counts, else that of Slurm's tasks."""
    order = str(args.node_rank) if args.backend == "static" else environ.get("SLURM_PROCID", "")
    return f"{order if order.isdigit() else 0}@{host}#{pid}"


def host_of(agent: str) -> str:
    return agent.partition("@")[2].rpartition("#")[0] or agent
