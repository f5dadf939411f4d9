"""Start one of our helper programs: `python -I programs.py NAME …`, on any node, from any working directory.

The file is started by its path, so that neither the working directory nor the user's environment affects its imports.
The libraries of the command-line interface are not loaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = {  # maps the name of a program to the module whose `main(arguments)` is called
    "run-agent": "dalsegno.runs.agent.agent",
    "run-coordinator": "dalsegno.runs.coordinator.program",
    "step-again": "dalsegno.runs.auto_resume.program",
    "controller": "dalsegno.controller",
    "observer": "dalsegno.observer",
    "gpu-facts": "dalsegno.health.readers.nvml_process",
    "machine-room": "dalsegno.targets.local.machine_room",
    "metadata-service": "dalsegno.targets.local.metadata_service",
    "break-worker": "dalsegno.inject.worker_program",
    "undo-fault": "dalsegno.targets.local.fault_access",
    "node-agent": "dalsegno.node_agent.agent",
    "job-scratch": "dalsegno.system.job_scratch",
    "directory-accounts": "dalsegno.users.ldap_directory",
    "sudo-session": "dalsegno.system.sudo_session",
    "web-login": "dalsegno.system.passwords",
    "remove-home": "dalsegno.setup.machine_accounts",
    "storage-probe": "dalsegno.storage.probe",
    "container-plugin": "dalsegno.containers.native",
    "bench-collective": "dalsegno.bench.collectives.collective_measure",
    "bench-pairs": "dalsegno.bench.collectives.pairs_measure",
    "bench-device": "dalsegno.bench.node.device_measure",
    "bench-storage": "dalsegno.bench.node.storage_measure",
    "bench-versions": "dalsegno.bench.node.versions_measure",
    "agent-secrets": "dalsegno.targets.cloud.agent_secrets",
    "slurm-policy": "dalsegno.targets.cloud.slurm_policy",
    "hyperpod-partitions": "dalsegno.targets.hyperpod.partitions",
    "hyperpod-containers": "dalsegno.targets.hyperpod.containers",
}


# The command that starts a program on hosts where our code is installed. The caller appends the program's name. The
# first line of /usr/local/bin/dalsegno names the interpreter that was chosen for our code; `python3` may be too old.
_START_THERE = (
    "read -r python _ < /usr/local/bin/dalsegno && "
    'exec "${python#??}" -I /opt/dalsegno/current/dalsegno/programs.py "$@"'
)
HOST_LAUNCHER = ("/bin/sh", "-c", _START_THERE, "dalsegno")


def launcher() -> tuple[str, ...]:
    """Return the command that starts a program, without the program's name. The command works on all hosts that have
    this Python and these files at the same paths."""
    return (sys.executable, "-I", str(Path(__file__).resolve()))


_IMPORT = "import sys; sys.path.insert(0, {own!r}); from dalsegno.programs import start; sys.exit(start(sys.argv[1:]))"


def user_argv(python: str) -> list[str]:
    """Return the command that starts a program with a user's Python, which can import the user's packages, such as
    torch. The caller appends the program's name."""
    return [python, "-c", _IMPORT.format(own=str(Path(__file__).resolve().parents[1]))]


# `-m dalsegno` would import from the working directory or the user's PYTHONPATH, so fixed paths are used instead.
_START = "import sys; sys.path[:0] = {own!r}; sys.path += {others!r}; from dalsegno.cli.main import main; main()"


def own_argv() -> list[str]:
    """Return the command that starts this same `dalsegno` in any environment. The caller appends the arguments."""
    from importlib.util import find_spec

    own, click = Path(__file__).resolve().parents[1], find_spec("click")
    others = [str(Path(click.origin).parents[1])] if click and click.origin else []
    return [sys.executable, "-I", "-c", _START.format(own=[str(own)], others=others)]


def start(arguments: list[str]) -> int:
    name, *rest = arguments
    code: int = import_module(PROGRAMS[name]).main(rest)
    return code


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    sys.exit(start(sys.argv[1:]))
