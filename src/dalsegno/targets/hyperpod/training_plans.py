"""Find out when AWS takes back the machines of a training plan, and tell the nodes.

HyperPod announces nothing on the instance. So `up` reads the end of each plan, and each node writes the end of its own
instance group into the file that its agents read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dalsegno.health.checks.cloud import cloud_text
from dalsegno.setup.bootstrap import HOST, PYTHON
from dalsegno.setup.node_plan import PlannedCommand
from dalsegno.spec.facts import Cluster, Health
from dalsegno.targets.cloud.consequences import taken_at
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.hyperpod.api import HyperPodApi
from dalsegno.targets.hyperpod.lifecycle import RESOURCES
from dalsegno.targets.hyperpod.requests import planned_groups
from dalsegno.wire.cloud_notice import HYPERPOD


def find_ends(api: HyperPodApi, cluster: Cluster, now: float) -> dict[str, float]:
    """Return, for each instance group with a training plan, when AWS starts to take back its machines.

    A plan that does not exist, or that this user may not describe, is left out.
    """
    found = {}
    for group in planned_groups(cluster):
        if group.own.training_plan:
            try:
                end = next_end(api.training_plan(group.own.training_plan), group.instance_type, now)
            except CloudError as error:
                if error.refusal not in (CloudRefusal.DENIED, CloudRefusal.NOT_THERE):
                    raise
                continue
            if end is not None:
                found[group.name] = taken_at(end, group.instance_type)
    return found


def next_end(answer: Mapping[str, Any], instance_type: str, now: float) -> float | None:
    """Return the end of the plan's present or next part, or else of the whole plan.

    A plan can have parts with a gap between them. AWS takes the machines back at the end of each part.
    """
    parts = [
        each.get("EndTime")
        for each in answer.get("ReservedCapacitySummaries") or ()
        if each.get("InstanceType") == instance_type
    ]
    ends = [each.timestamp() for each in parts if isinstance(each, datetime)]
    whole = answer.get("EndTime")
    last = whole.timestamp() if isinstance(whole, datetime) else None
    return min((end for end in ends if end > now), default=last)


# This program runs on a node. It writes the end of the node's own group, or checks that the file is right.
_WRITE = """\
import json, os, subprocess, sys
mode, resources, path, text, host, ends = sys.argv[1:]
own = subprocess.run(["hostname", "-I"], stdout=subprocess.PIPE, check=True).stdout.decode().split()
with open(os.environ.get("SAGEMAKER_RESOURCE_CONFIG_PATH", resources)) as file:
    groups = json.load(file)["InstanceGroups"]
names = [each["Name"] for each in groups for one in each["Instances"] if one.get("CustomerIpAddress") in own]
value, ends = json.loads(text), json.loads(ends)
value["ends"] = {host: ends[name] for name in names if name in ends}
wanted = json.dumps(value) + "\\n"
if mode == "check":
    with open(path) as file:
        sys.exit(file.read() != wanted)
with open(path + ".new", "w") as file:
    file.write(wanted)
os.replace(path + ".new", path)
"""


def ends_command(path: str, health: Health, ends: Mapping[str, float]) -> PlannedCommand:
    """Return the command that writes the end of a node's training plan into a file for the agents of this node."""
    values = (RESOURCES, path, cloud_text(health, cloud=HYPERPOD), HOST, json.dumps(ends, sort_keys=True))
    return PlannedCommand(
        "writing the end of the training plan",
        (PYTHON, "-I", "-c", _WRITE, "write", *values),
        unless=(PYTHON, "-I", "-c", _WRITE, "check", *values),
    )
