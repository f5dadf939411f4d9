"""Images that nobody could run."""

from __future__ import annotations

from dalsegno.spec.checks.report import Report
from dalsegno.spec.model import ClusterSpec


def check_containers(spec: ClusterSpec, report: Report) -> None:
    if spec.containers.images and spec.containers.enabled is False:
        what = "`images` are to be imported, but the cluster is to run no containers"
        report.add(spec.containers, "images", what, "remove `enabled: false`, or `images`", reads=("enabled",))
