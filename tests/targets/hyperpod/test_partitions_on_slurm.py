"""The partitions service of HyperPod's controller, on a real slurmctld whose slurm.conf lacks a partition."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dalsegno.cluster import ClusterPlace
from dalsegno.recovery.decisions.reason import SLURM_USERS, Owner, find_owner
from dalsegno.slurm.facts import JobState
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.files import write_atomic
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.hyperpod.head import repair_words
from dalsegno.targets.hyperpod.partitions import PartitionGuard
from dalsegno.targets.machines import InstanceAction
from dalsegno.targets.registry import open_target
from tests.cluster.conftest import make_home
from tests.targets.hyperpod.conftest import CPU, cluster_of
from tests.waiting import eventually

pytestmark = pytest.mark.cluster
LIMITED = CPU.replace("}", ", time_limit: 2h, priority_tier: 7}")
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


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, f"#!/bin/sh\n{text}\n", 0o755)


def test_prologs_partitions_reservations_and_orders_to_hyperpod_on_a_real_slurmctld(tmp_path):
    place = ClusterPlace("one", make_home("ds-"))
    target = open_target("local", place.folder)
    try:
        with place.lock():
            target.apply(target.plan(resolve(parse_spec(SPEC, "cluster.yaml"))), lambda text: None)
        conf = ClusterFolder(place.folder).slurm_conf
        # Reproduces the fault of HyperPod's agent: a partition is missing
        theirs = re.sub(r"(?m)^PartitionName=cpu .*\n", "", conf.read_text())
        groups = [{"Name": "cpu", "Instances": [{"CustomerIpAddress": f"10.4.33.{number}"} for number in (1, 2)]}]
        (tmp_path / "resources.json").write_text(json.dumps({"InstanceGroups": groups}))
        folder = ClusterFolder(tmp_path / "demo")
        folder.root.mkdir()
        write_applied(folder, cluster_of(LIMITED, "", CARE + "health: {mode: auto}\n"))
        prologs = place.home / "prologs"  # takes the place of /usr/bin
        write_script(prologs / "true", "exit 0")
        guard = PartitionGuard(folder.root, target.slurm, conf, tmp_path / "resources.json", prologs=f"{prologs}/true*")

        def partitions() -> dict[str, tuple[str, ...]]:
            return {each.name: each.nodes for each in target.slurm.partition_settings()}

        for _ in range(2):
            conf.write_text(theirs)
            target.slurm.reconfigure()
            assert set(partitions()) == {"dev"}
            assert guard.turn().added == ("cpu",)
            assert partitions()["cpu"] == ("ip-10-4-33-1", "ip-10-4-33-2")
        assert guard.turn().added == ()

        def settings(name: str) -> dict[str, str]:
            return dict(target.slurm.raw_partitions()[name])

        # A partition that HyperPod has written without the settings of the file
        block = conf.read_text()
        conf.write_text(theirs + "PartitionName=cpu Nodes=ip-10-4-33-[1-2] State=UP\n")
        target.slurm.reconfigure()
        assert settings("cpu")["MaxTime"] == "UNLIMITED"
        guard.turn()
        assert (settings("cpu")["MaxTime"], settings("cpu")["PriorityTier"]) == ("02:00:00", "7")
        assert (settings("cpu")["Default"], settings("dev")["Default"]) == ("YES", "NO")
        write_applied(folder, cluster_of(CPU, "", CARE + "health: {mode: auto}\n"))
        guard.turn()
        assert settings("cpu")["MaxTime"] == "UNLIMITED", "the limit left the cluster file"
        conf.write_text(block)
        target.slurm.reconfigure()
        guard.turn()
        (reservation,) = target.slurm.reservations()
        assert reservation.name == "care", "it is created once"
        node = "ip-10-4-33-1"
        target.slurm.scontrol("delete", "ReservationName=care")
        target.slurm.scontrol(*repair_words(InstanceAction.REPLACE, node))
        assert find_owner(target.slurm.node(node), SLURM_USERS) is Owner.PLATFORM
        target.slurm.resume(node)
        assert target.slurm.node(node).in_service, "slurmctld clears FAIL, as recovery expects"

        def submit() -> int:
            return target.slurm.submit(args=["--chdir=/tmp", "--output=/dev/null", "--nodelist", node, "--wrap=true"])

        early = submit()
        eventually(lambda: target.slurm.job(early).state is JobState.COMPLETED)  # the node has no prolog of ours yet
        write_script(prologs / "true.dalsegno-prolog", "exit 1")
        refused = submit()
        eventually(lambda: not target.slurm.node(node).in_service)
        write_script(prologs / "true.dalsegno-prolog", "exit 0")
        target.slurm.resume(node)
        eventually(lambda: target.slurm.job(refused).state is JobState.COMPLETED)  # nobody had to release it
    finally:
        target.destroy(lambda text: None)
        shutil.rmtree(place.home)
