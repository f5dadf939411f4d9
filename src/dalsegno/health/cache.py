"""A cache of recently passed checks, so that a short job does not wait for all checks in its prolog.

Only passed checks are cached, so a repair is noticed at once. If other users can write to the folder, nothing is
cached: they could make a broken node look healthy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from dalsegno.health.messages import BadReport, Finding, NodeReport, parse_report, report_message
from dalsegno.health.result import Verdict
from dalsegno.health.telemetry import telemetry_path
from dalsegno.system.ownership import trusted_folder

KEPT_S = 60.0
_MAX_BYTES = 1 << 20


def cache_file(node: str, env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a node's cache. It depends on SLURM_CONF, because clusters may share node names."""
    mark = hashlib.blake2b(f"{node} {env.get('SLURM_CONF', '')}".encode(), digest_size=8).hexdigest()
    return _folder(env) / f"{mark}.json"


def _folder(env: Mapping[str, str]) -> Path:
    if telemetry := telemetry_path(env):
        return telemetry.parent / "health"  # the folder of a simulated node is removed with its cluster
    if os.geteuid() == 0:
        return Path("/run/dalsegno-health")
    return Path(env.get("XDG_RUNTIME_DIR") or f"/tmp/dalsegno-{os.geteuid()}") / "health"


def read_kept(path: Path, now: float) -> dict[str, Finding]:
    """Return the cached findings of the last minute, by check; none if the file cannot be trusted or parsed."""
    try:
        with trusted_folder(path.parent) as folder:
            handle = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                return {}
            findings = parse_report(json.loads(file.read(_MAX_BYTES))).findings
    except (OSError, ValueError, TypeError, RecursionError, BadReport):
        return {}
    return {each.check: each for each in findings if 0 <= now - each.at < KEPT_S}


def keep(path: Path, node: str, findings: Iterable[Finding]) -> None:
    """Cache the findings that passed. Errors are ignored, because they are not a fault of the node."""
    passed = tuple(each for each in findings if each.result.verdict is Verdict.PASSED)
    with contextlib.suppress(OSError), trusted_folder(path.parent, make=True) as folder:
        temp = f".{path.name}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp, dir_fd=folder)  # a killed process with the same PID may have left the file behind
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temp, flags, 0o600, dir_fd=folder), "w") as file:
            json.dump(report_message(NodeReport(node, "", passed)), file)
        os.replace(temp, path.name, src_dir_fd=folder, dst_dir_fd=folder)
