"""The programs that other programs start: `python -I programs.py NAME …`, on any node, from any folder.

A file to start by its path: neither the working folder nor the user's variables can reach into what it imports, and
the command line's own libraries are not loaded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

PROGRAMS = {  # name -> the module whose `main(arguments)` it is
    "run-agent": "dalsegno.runs.agent.agent",
    "run-coordinator": "dalsegno.runs.coordinator.program",
    "step-again": "dalsegno.runs.auto_resume.program",
    "controller": "dalsegno.controller",
    "gpu-facts": "dalsegno.health.readers.nvml_apart",
    "machine-room": "dalsegno.targets.local.machine_room",
    "break-worker": "dalsegno.inject.worker_program",
    "undo-fault": "dalsegno.targets.local.undo_fault",
    "node-agent": "dalsegno.node_agent.agent",
}


def launcher() -> tuple[str, ...]:
    """The words before a program's name that start it wherever this file and this Python can be seen."""
    return (sys.executable, "-I", str(Path(__file__).resolve()))


def start(arguments: list[str]) -> int:
    name, *rest = arguments
    code: int = import_module(PROGRAMS[name]).main(rest)
    return code


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    sys.exit(start(sys.argv[1:]))
