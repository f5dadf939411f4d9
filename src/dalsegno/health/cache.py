"""What passed a moment ago, kept for the next job's prolog: many short jobs should not each wait for all checks.

Only what passed is kept: a node that was mended is seen so at once. The folder is ours alone, or nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.report import BadReport, Finding, Report, parse_report, report_message
from dalsegno.health.result import Verdict
from dalsegno.health.telemetry import telemetry_path
from dalsegno.system.files import write_atomic

KEPT_S = 60.0


def cache_file(node: str, env: Mapping[str, str] = os.environ) -> Path:
    """Nodes of several clusters on one machine may have one name."""
    mark = hashlib.blake2b(f"{node} {env.get('SLURM_CONF', '')}".encode(), digest_size=8).hexdigest()
    return _folder(env) / f"{mark}.json"


def _folder(env: Mapping[str, str]) -> Path:
    if told := telemetry_path(env):
        return told.parent / "health"  # a simulated node's, which goes when its cluster does
    if os.geteuid() == 0:
        return Path("/run/dalsegno-health")
    return Path(env.get("XDG_RUNTIME_DIR") or f"/tmp/dalsegno-{os.geteuid()}") / "health"


def read_kept(path: Path, now: float) -> dict[str, Finding]:
    """What was kept less than a minute ago, by its check; nothing where it cannot be trusted or understood."""
    try:
        if not _is_ours(path.parent):
            return {}
        findings = parse_report(json.loads(path.read_text())).findings
    except (OSError, ValueError, TypeError, BadReport):
        return {}
    return {each.check: each for each in findings if 0 <= now - each.at < KEPT_S}


def keep(path: Path, node: str, findings: Iterable[Finding]) -> None:
    """Not being able to is no fault of the node's."""
    passed = tuple(each for each in findings if each.result.verdict is Verdict.PASSED)
    with contextlib.suppress(OSError, DalsegnoError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(path.parent):
            write_atomic(path, json.dumps(report_message(Report(node, "", passed))), 0o600, durable=False)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
