"""Compute the environment variables of each process for its framework."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress
from dalsegno.runs.coordinator.site import NodeEnv

LAST_PORT = 65_535


@dataclass(frozen=True)
class ProcessLayout:
    """The processes of one generation: a fixed number on each host. The hosts are in the order of their group ranks."""

    run: str
    hosts: tuple[str, ...]  # names or addresses at which the hosts reach each other
    nproc_per_node: int
    port: int  # port of the agent's store (torch), of rank 0 (jax), or of the first process on each host (tensorflow)
    restarts: int = 0
    max_restarts: int = 0
    gpus_per_node: int = 0
    cpus_per_process: int = 0  # number of CPUs for each process; 0 if unknown
    role: str = "default"
    virtual_local_rank: bool = False  # torchrun's option: each process sees only its own GPU, as device 0

    @property
    def size(self) -> int:
        return len(self.hosts) * self.nproc_per_node

    def group_rank(self, rank: int) -> int:
        return rank // self.nproc_per_node

    def local_rank(self, rank: int) -> int:
        return rank % self.nproc_per_node

    def ranks(self, group_rank: int) -> range:
        first = group_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node)


def framework_env(framework: str, world: ProcessLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
    """Return the variables for the processes on one host. `found` contains variables from the agent's environment."""
    if framework == "tensorflow":
        return NodeEnv({}, tuple(tensorflow_env(world, rank, found) for rank in world.ranks(group_rank)))
    if framework == "jax":
        return jax_env(world, group_rank)
    return torch_env(world, group_rank, found) if framework == "torch" else NodeEnv.empty(world.nproc_per_node)


def torch_env(world: ProcessLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
    """Return torchrun's variables. `TORCHELASTIC_USE_AGENT_STORE` means that rank 0 does not run the store."""
    size, local_size = str(world.size), str(world.nproc_per_node)
    common = {
        "GROUP_RANK": str(group_rank),
        "ROLE_NAME": world.role,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_WORLD_SIZE": str(len(world.hosts)),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": world.hosts[0],
        "MASTER_PORT": str(world.port),
        "TORCHELASTIC_RUN_ID": world.run,
        "TORCHELASTIC_RESTART_COUNT": str(world.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(world.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": found.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **torch_threads(world.nproc_per_node, world.cpus_per_process, found),
    }
    own = [
        {"RANK": str(rank), "ROLE_RANK": str(rank), **_local_rank(world, rank, found)}
        for rank in world.ranks(group_rank)
    ]
    return NodeEnv(common, tuple(own))


def _local_rank(world: ProcessLayout, rank: int, found: Mapping[str, str]) -> dict[str, str]:
    local = world.local_rank(rank)
    if not world.virtual_local_rank:
        return {"LOCAL_RANK": str(local)}
    # On AMD machines HIP_VISIBLE_DEVICES takes precedence over CUDA_VISIBLE_DEVICES.
    known = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if found.get(name)]
    devices = found[known[0]].split(",") if known else [str(each) for each in range(world.nproc_per_node)]
    if local >= len(devices):
        what = f"no GPU for local rank {local}: {known[0]} lists {len(devices)}"
        raise DalsegnoError(what, hint=f"request {len(devices)} processes per node, or remove `--virtual-local-rank`")
    return {"LOCAL_RANK": "0", **dict.fromkeys([*known[:1], "CUDA_VISIBLE_DEVICES"], devices[local].strip())}


def torch_threads(nproc_per_node: int, cpus_per_process: int, found: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS: the agent's value, else the CPUs of a process, else 1 for several processes per node.

    The value 1 is torchrun's default. torch reads the variable when torch is imported, so the variable is set before
    the warm parent starts. Without it, torch uses every core of the machine, including the cores of other jobs.
    """
    if "OMP_NUM_THREADS" in found:
        return {"OMP_NUM_THREADS": found["OMP_NUM_THREADS"]}
    threads = cpus_per_process or (1 if nproc_per_node > 1 else 0)
    return {"OMP_NUM_THREADS": str(threads)} if threads else {}


def tensorflow_env(world: ProcessLayout, rank: int, found: Mapping[str, str]) -> dict[str, str]:
    """Return TF_CONFIG for MultiWorkerMirroredStrategy: the addresses of all workers, and the index of this one.

    If the agent has a list of GPUs, also return this worker's share of it.
    """
    workers = [_worker_address(world, each) for each in range(world.size)]
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    devices = share_of_devices(found.get("CUDA_VISIBLE_DEVICES", ""), world.nproc_per_node, world.local_rank(rank))
    return {"TF_CONFIG": json.dumps(config), **({"CUDA_VISIBLE_DEVICES": devices} if devices else {})}


def _worker_address(world: ProcessLayout, rank: int) -> str:
    port = world.port + world.local_rank(rank)
    if port > LAST_PORT:
        what = f"there are fewer than {world.nproc_per_node} ports from {world.port} on"
        raise DalsegnoError(what, hint="each process needs its own port; request fewer per node, or try again")
    return host_port(world.hosts[world.group_rank(rank)], port)


def jax_env(world: ProcessLayout, group_rank: int) -> NodeEnv:
    """Return variables for `jax.distributed.initialize()` without arguments, and for scripts that read them directly.

    JAX reads the coordinator's address and the devices from its own variables, but the number and the ids of processes
    from Slurm's. In the step's own variables, Slurm counts the agents, including spares. Therefore each process gets
    the values that srun would set for it.
    """
    size = str(world.size)
    common = {
        "JAX_COORDINATOR_ADDRESS": host_port(world.hosts[0], world.port),
        "JAX_NUM_PROCESSES": size,
        "SLURM_NTASKS": size,
        "SLURM_NPROCS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_NUM_NODES": str(len(world.hosts)),
        "SLURM_STEP_NODELIST": _hostlist(world.hosts),
        "SLURM_NODEID": str(group_rank),
    }
    return NodeEnv(common, tuple(_jax_process_env(world, rank) for rank in world.ranks(group_rank)))


def _jax_process_env(world: ProcessLayout, rank: int) -> dict[str, str]:
    local = world.local_rank(rank)
    devices = share_of_devices(",".join(map(str, range(world.gpus_per_node))), world.nproc_per_node, local)
    return {
        "JAX_PROCESS_ID": str(rank),
        **({"JAX_LOCAL_DEVICE_IDS": devices} if devices else {}),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
    }


@lru_cache(maxsize=2)
def _hostlist(hosts: tuple[str, ...]) -> str:
    """Return the hosts as a hostlist.

    The result is cached, because the computation is slow and all nodes have the same hostlist.
    """
    return compress(hosts)


def share_of_devices(devices: str, processes: int, index: int) -> str:
    """Return one process's devices from a list such as `0,1,2,3`; the whole list if there are too few devices."""
    each = [device for device in devices.split(",") if device]
    share = len(each) // processes
    return ",".join(each[index * share : (index + 1) * share]) if share else devices


def host_port(host: str, port: int) -> str:
    """Return `host:port` for URLs and gRPC, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
