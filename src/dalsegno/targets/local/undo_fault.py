"""The program `undo-fault FOLDER NODE MARK WHEN`: undoes an injected fault when its time is over."""

from __future__ import annotations

import time
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.inject.injection import undo_when_due
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.local.fault_access import LocalAccess
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.nodes import open_nodes

PATIENCE_S = 60.0


def main(arguments: list[str]) -> int:
    root, node, mark, when = arguments
    time.sleep(max(float(when) - time.time(), 0.0))
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            undo_when_due(LocalAccess(open_nodes(LocalRunner(), Folder(Path(root)))), node, mark)
            return 0
        except DalsegnoError:  # an `up` may be changing the cluster
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
