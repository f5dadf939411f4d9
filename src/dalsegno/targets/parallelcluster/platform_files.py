"""The files of ParallelCluster and CloudFormation, for people who want to read them before `dalsegno up`. Pure."""

from __future__ import annotations

import json
from dataclasses import replace

from dalsegno.spec.facts import Cluster
from dalsegno.targets.parallelcluster.config import config_text, render_config
from dalsegno.targets.parallelcluster.folder import PclusterStage, PclusterState
from dalsegno.targets.parallelcluster.prerequisites import (
    given,
    placeholders,
    render_template,
    scripts_prefix,
    settings_of,
)
from dalsegno.targets.parallelcluster.scripts import bootstrap_scripts

CONFIG, TEMPLATE, SCRIPTS = "cluster.yaml", "prerequisites.json", "scripts"
_STAND_INS = (
    "# An id of zeros, and a name with `dalsegno-new`, stand for a resource of prerequisites.json that `up` creates.\n"
)


def render_files(cluster: Cluster, state: PclusterState | None, code_key: str) -> dict[str, str]:
    """Return the text of cluster.yaml, of the template of its prerequisites, and of the scripts of all machines.

    The ids are those in the cluster file, and the bucket of the state. Other ids are known only on AWS, so placeholders
    stand for them.
    """
    known = given(cluster)
    if state is not None and state.bucket:
        known = replace(known, bucket=known.bucket or state.bucket)
    there = placeholders(known, cluster)
    config = config_text(cluster, render_config(cluster, there))
    own = settings_of(cluster)
    there_now = state or PclusterState(PclusterStage.PREPARING, "0" * 16, own.region, own.version)
    scripts = bootstrap_scripts(cluster, replace(there_now, bucket=there.bucket), code_key)
    prefix = scripts_prefix(cluster.name)
    template = render_template(cluster, given(cluster), there.bucket)
    return {
        CONFIG: f"{_STAND_INS}{config}" if there != known else config,
        TEMPLATE: json.dumps(template, indent=1) + "\n",
        **{f"{SCRIPTS}/{key.removeprefix(prefix)}": text.decode() for key, text in scripts.items()},
    }
