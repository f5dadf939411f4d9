"""Where a cluster can run."""

from __future__ import annotations

from typing import Literal

Target = Literal["local", "ssh", "parallelcluster", "hyperpod", "oci"]
TARGETS: tuple[Target, ...] = ("local", "ssh", "parallelcluster", "hyperpod", "oci")
