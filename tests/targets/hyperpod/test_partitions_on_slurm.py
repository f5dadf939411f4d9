"""The partitions service of HyperPod's controller, on a real slurmctld whose slurm.conf lacks a partition."""

from __future__ import annotations

import json
import re

import pytest

from dalsegno.cluster import ClusterPlace
from dalsegno.recovery.decisions.reason import SLURM_USERS, Owner, find_owner
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.hyperpod.head import repair_words
from dalsegno.targets.hyperpod.partitions import PartitionGuard
from dalsegno.targets.machines import InstanceAction
from dalsegno.targets.registry import open_target
from tests.cluster.conftest import make_home
from tests.targets.hyperpod.conftest import CPU, cluster_of

pytestmark = pytest.mark.cluster
CARE = "reservations: [{name: care, nodes: [cpu-1, cpu-2], users: [root], duration: 2h}]\n"
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


def test_partitions_reservations_and_orders_to_hyperpod_on_a_real_slurmctld(tmp_path):
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
        write_applied(folder, cluster_of(CPU, "", CARE))
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
        (reservation,) = target.slurm.reservations()
        assert reservation.name == "care", "it is created once"
        node = "ip-10-4-33-1"
        target.slurm.scontrol("delete", "ReservationName=care")
        target.slurm.scontrol(*repair_words(InstanceAction.REPLACE, node))
        assert find_owner(target.slurm.node(node), SLURM_USERS) is Owner.PLATFORM
        target.slurm.resume(node)
        assert target.slurm.node(node).in_service, "slurmctld clears FAIL, as recovery expects"
    finally:
        target.destroy(lambda text: None)
