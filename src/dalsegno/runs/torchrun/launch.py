"""Run `dalsegno torchrun` on one node: find the rendezvous, open it if it is on this node, and run the agent."""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs.coordinator.agents.liveness import Timing, read_gone_s
from dalsegno.runs.coordinator.generations.standbys import StandbyMode
from dalsegno.runs.submit.frameworks import torch_threads
from dalsegno.runs.submit.options import options_from_env
from dalsegno.runs.submit.program import find_python
from dalsegno.runs.submit.request import check_size
from dalsegno.runs.torchrun.agent import TorchrunAgent
from dalsegno.runs.torchrun.args import TorchrunArgs, count_processes
from dalsegno.runs.torchrun.coordinator import (
    JOIN_S,
    LAST_CALL_S,
    CoordinatorThread,
    Talk,
    TorchrunSite,
    agent_setup,
    seconds,
)
from dalsegno.runs.torchrun.logs import Logs, Tee, Write
from dalsegno.runs.torchrun.rendezvous import Keys, Rendezvous, agent_name, find_munge, find_rendezvous, is_own_address
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.machine import gpu_files
from dalsegno.system.processes import LocalRunner

SHUTDOWN_S = 10.0
# Options of `dalsegno run`, with the same values. They are variables here, because torchrun has no such options.
STANDBY = "DALSEGNO_RUN_STANDBY"
HANG_TIMEOUT = "DALSEGNO_RUN_HANG_TIMEOUT"
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


@dataclass(frozen=True)
class LaunchContext:
    """The environment and the outputs of a launch."""

    environ: Mapping[str, str]
    talk: Talk
    write: Write


def launch(args: TorchrunArgs, context: LaunchContext) -> int:
    """Run the workers of this node until the run ends, and return the exit code that torchrun would return."""
    check(args, context.environ)
    # Only the node of the rendezvous uses these. A wrong value must end every node at once, because the others would
    # wait for that node.
    standby, hang_timeout_s = read_standby(context.environ), read_hang_timeout_s(context.environ)
    seconds(args, "last_call_timeout", LAST_CALL_S)
    check_size((args.training_script, *args.training_script_args))
    for text in flag_notes(args):
        context.talk(text)
    nproc = count_processes(args.nproc_per_node, os.cpu_count() or 1, count_gpus(context.environ))
    check_devices(args, nproc, context.environ)
    os.environ.update(torch_threads(nproc, cpus_per_process(context.environ, nproc), os.environ))
    meeting = find_rendezvous(args, is_own_address)
    run = str(uuid.uuid4()) if is_single(args) else args.rdzv_id
    endpoint = f"{meeting.host}:{meeting.port}"
    keys = Keys(run, endpoint, None if meeting.alone else find_munge(context.environ), meeting.alone)
    return _Launch(args, context, nproc, meeting, run, keys, standby, hang_timeout_s).serve()


@dataclass
class _Launch:
    args: TorchrunArgs
    context: LaunchContext
    nproc: int
    meeting: Rendezvous
    run: str
    keys: Keys
    standby: StandbyMode
    hang_timeout_s: int | None

    def serve(self) -> int:
        python = choose_python(self.context.environ)
        join_s = seconds(self.args, "join_timeout", JOIN_S)
        setup = agent_setup(self.args, python, self.nproc, join_s)
        hosted, port = self._host(python) if self.meeting.ours else (None, self.meeting.port)
        known = self.keys.secret if self.meeting.alone else b""
        connect = {"run": self.keys.mark, "secret": known.hex(), "addresses": [self.meeting.host], "port": port}
        name = agent_name(self.args, self.context.environ, socket.gethostname(), os.getpid())
        logs = Logs(self.args, self.run, Tee(self.context.write))
        agent = TorchrunAgent(self.args, setup, connect, name, self.keys, logs, self.context.talk, hosted)
        try:
            return agent.serve()
        finally:
            if hosted is not None:
                hosted.stop("the node of the rendezvous has left")
                hosted.join(SHUTDOWN_S)

    def _host(self, python: str) -> tuple[CoordinatorThread | None, int]:
        """Open the rendezvous.

        Return its coordinator and port. The coordinator is None if another process on this node listens on the port,
        such as another agent of the run.
        """
        self.keys.make()
        site = TorchrunSite(
            self.args, self.run, f"torchrun-{secrets.token_hex(4)}", self.nproc, self.meeting,
            store=has_torch(python), timing=Timing(read_gone_s(self.context.environ) * slowness()),
            standby=self.standby, hang_timeout_s=self.hang_timeout_s,
        )  # fmt: skip
        hosted = CoordinatorThread(site, self.keys, self.context.talk)
        try:
            port = hosted.open()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise _cannot_listen(self.meeting.port, error) from error
            return None, self.meeting.port
        if not self.keys.private:
            who = f"anyone who can reach {self.keys.endpoint} can join, as with torchrun"
            self.context.talk(f"munge is not available: {who}. Snapshots in memory stay on their node")
        return hosted, port


def read_standby(environ: Mapping[str, str]) -> StandbyMode:
    """Return whether the user wants standby workers; AUTO if it is not set."""
    return StandbyMode(options_from_env({STANDBY: environ.get(STANDBY, "")}).get("standby", "auto"))


def read_hang_timeout_s(environ: Mapping[str, str]) -> int | None:
    """Return the hang timeout that the user has set: 0 for no timeout; None if it is not set."""
    found = options_from_env({HANG_TIMEOUT: environ.get(HANG_TIMEOUT, "")}).get("hang_timeout_s")
    return found if isinstance(found, int) else None


def _cannot_listen(port: int, error: OSError) -> DalsegnoError:
    hint = "choose another port above 1023 with `--rdzv-endpoint` or `--master-port`"
    return DalsegnoError(f"cannot listen on port {port}: {error.strerror}", where=socket.gethostname(), hint=hint)


def cpus_per_process(environ: Mapping[str, str], nproc: int) -> int:
    """Return the CPUs per process if Slurm started this task with `-c`, otherwise 0."""
    value = environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, int(value) // nproc) if value.isdigit() else 0


def is_single(args: TorchrunArgs) -> bool:
    """Return whether the flags describe a run on a single node without a rendezvous.

    torchrun then generates a run id.
    """
    bare = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    return args.standalone or (bare and args.nodes.max == 1)


def check(args: TorchrunArgs, environ: Mapping[str, str]) -> None:
    """Check the script and the flags before any process starts."""
    if args.logs_specs is not None:
        raise UsageError("custom log specs are not supported", where="--logs-specs", hint="use --log-dir, -r and -t")
    is_file = args.run_path or not (args.no_python or args.module)
    if is_file and not os.path.exists(args.training_script):
        what = f"script `{args.training_script}` not found"
        raise DalsegnoError(what, where=os.getcwd(), hint="give the path of a file, or use `-m` for a module")
    if args.no_python and not args.run_path and shutil.which(args.training_script, path=environ.get("PATH")) is None:
        what, hint = f"program `{args.training_script}` not found", "give its path, or add its folder to PATH"
        raise DalsegnoError(what, where="--no-python", hint=hint)


def check_devices(args: TorchrunArgs, nproc: int, environ: Mapping[str, str]) -> None:
    visible = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES")
    if args.virtual_local_rank and visible and len(visible.split(",")) < nproc:
        hint = "each process needs one GPU; lower `--nproc-per-node`, or remove `--virtual-local-rank`"
        what = f"{nproc} processes, but only these GPUs are visible: {visible}"
        raise DalsegnoError(what, where="--virtual-local-rank", hint=hint)


def flag_notes(args: TorchrunArgs) -> list[str]:
    """Return notes about torchrun's flags that work differently here."""
    notes = []
    if args.backend.startswith("etcd"):
        notes.append(
            f"etcd is not used: the nodes meet at {args.endpoint or 'localhost'} itself, which must be one of them"
        )
    if args.numa_binding:
        notes.append("--numa-binding has no effect here; use srun's --cpu-bind and --mem-bind")
    return notes


def choose_python(environ: Mapping[str, str]) -> str:
    """Return $PYTHON_EXEC if it is set.

    Otherwise return this process's Python if it has torch, or the user's Python.
    """
    named = environ.get("PYTHON_EXEC")
    if named:
        return shutil.which(named, path=environ.get("PATH")) or named
    return sys.executable if importlib.util.find_spec("torch") else find_python(environ)


def has_torch(python: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    try:
        return LocalRunner().run([python, "-c", _HAS_TORCH], timeout_s=60).exit_code == 0
    except DalsegnoError:
        return False


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of visible GPUs without calling the driver."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            devices = [device.strip() for device in environ[name].split(",")]
            return len(devices[: devices.index("-1")] if "-1" in devices else [device for device in devices if device])
    return len(gpu_files(os.listdir("/dev"))) or _amd_gpus()


def _amd_gpus() -> int:
    """Return the number of AMD GPUs, which are the nodes in the kernel driver's topology that have compute units."""
    nodes, count = "/sys/class/kfd/kfd/topology/nodes", 0
    for node in os.listdir(nodes) if os.path.isdir(nodes) else ():
        with open(f"{nodes}/{node}/properties") as file:
            count += any(line.startswith("simd_count ") and line.split()[1] != "0" for line in file)
    return count
