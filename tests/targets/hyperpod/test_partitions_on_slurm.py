"""The partitions service of HyperPod's controller, on a real slurmctld whose slurm.conf lacks a partition."""

from __future__ import annotations

import json
import re

import pytest

from dalsegno.cluster import ClusterPlace
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.hyperpod.partitions import PartitionGuard
from dalsegno.targets.registry import open_target
from tests.cluster.conftest import make_home
from tests.targets.hyperpod.conftest import CPU, cluster_of

pytestmark = pytest.mark.cluster
SPEC = """
name: one
target: local
partitions:
  - {name: dev, nodes: 'ip-10-4-33-[1-2]', cpus: 1, memory: 512M, default: true}
  - {name: cpu, nodes_from: [dev]}
slurm: {accounting: false}
containers: {enabled: false}
health: {mode: 'off'}
monitoring: {enabled: false}
local: {hosts: loopback}
"""


def test_missing_partition_appears_in_slurm_and_returns_after_an_agent_overwrote_it(tmp_path):
    place = ClusterPlace("one", make_home("ds-"))
    target = open_target("local", place.folder)
    try:
        with place.lock():
            target.apply(target.plan(resolve(parse_spec(SPEC, "cluster.yaml"))), lambda text: None)
        conf = ClusterFolder(place.folder).slurm_conf
        # Reproduces the fault of HyperPod's agent
        theirs = re.sub(r"(?m)^PartitionName=cpu .*\n", "", conf.read_text())
        groups = [{"Name": "cpu", "Instances": [{"CustomerIpAddress": f"10.4.33.{number}"} for number in (1, 2)]}]
        (tmp_path / "resources.json").write_text(json.dumps({"InstanceGroups": groups}))
        folder = ClusterFolder(tmp_path / "demo")
        folder.root.mkdir()
        write_applied(folder, cluster_of(CPU))
        guard = PartitionGuard(folder.root, target.slurm, conf, tmp_path / "resources.json")

        def partitions() -> dict[str, tuple[str, ...]]:
            return {each.name: each.nodes for each in target.slurm.partition_settings()}

        for _ in range(2):
            conf.write_text(theirs)
            target.slurm.reconfigure()
            assert set(partitions()) == {"dev"}
            assert guard.turn().added == ("cpu",)
            assert partitions()["cpu"] == ("ip-10-4-33-1", "ip-10-4-33-2")
        assert guard.turn().added == ()
    finally:
        target.destroy(lambda text: None)
