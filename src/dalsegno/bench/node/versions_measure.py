"""Report the software of one node: kernel, NVIDIA driver, Python and torch. Does not import torch.

`bench-versions` prints one JSON line. A certificate compares the lines of all nodes.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import socket
import sys
from collections.abc import Sequence
from importlib import metadata

_DRIVER = "/proc/driver/nvidia/version"
PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def versions_here() -> dict[str, str]:
    """Return the versions on this node. A missing driver or torch has the version ""; other missing packages are left
    out."""
    found = {"kernel": platform.release(), "libc": " ".join(platform.libc_ver()), "driver": _driver_version()}
    found["python"] = platform.python_version()
    return {**found, **{name: value for name in PACKAGES if (value := _package(name)) or name == "torch"}}


def _driver_version() -> str:
    try:
        with open(_DRIVER) as file:
            text = file.read()
    except OSError:
        return ""
    version = re.search(r"\d+\.\d+(\.\d+)?", text)
    return version[0] if version else ""


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def read_versions(text: str) -> dict[str, dict[str, str]]:
    """Return the versions of each node, sorted by node name. Other lines, such as warnings, are skipped."""
    found = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            value = json.loads(line)
            found[str(value["host"])] = {str(name): str(each) for name, each in value["versions"].items()}
    return dict(sorted(found.items()))


def main(arguments: Sequence[str]) -> int:
    """Print the versions on this node."""
    host = socket.gethostname().partition(".")[0]
    sys.stdout.write(json.dumps({"host": host, "versions": versions_here()}) + "\n")
    return 0
