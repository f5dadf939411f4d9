"""The service that applies a cluster file's policy on OCI, on a real slurmctld and slurmdbd that know nothing of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dalsegno
from dalsegno.cluster import ClusterPlace
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.folder import ClusterFolder, write_applied
from dalsegno.targets.registry import open_target
from tests.cluster.conftest import make_home

pytestmark = pytest.mark.cluster
PLATFORM = """
name: stack
target: local
partitions: [{name: train, nodes: 2, cpus: 1, memory: 512M}]
slurm: {enforce: [associations, limits, qos]}
containers: {enabled: false}
health: {mode: 'off'}
monitoring: {enabled: false}
local: {hosts: loopback}
"""
SPEC = """
name: demo
target: oci
oci: {region: eu-frankfurt-1, ad: "Uocm:EU-FRANKFURT-1-AD-1", compartment: ocid1.compartment.oc1..aaaa}
head: {instance: VM.Standard.E4.Flex, cpus: 16, memory: 128G}
partitions:
  - {name: train, nodes: 2, instance: BM.GPU.H100.8, time_limit: 2h, priority_tier: 5, allow_accounts: ml,
     allow_qos: night, hidden: true, extra: {LLN: 'YES'}}
slurm: {enforce: [associations, limits, qos], qos: [{name: night, max_time: 1h}]}
accounts: [{name: ml, qos: [night], group_tres: {cpu: 4}}]
users: [{name: ann, accounts: [ml], max_gpus: 4}]
"""


def test_accounts_and_partition_settings_reach_a_real_slurm_and_are_not_added_twice(tmp_path):
    place = ClusterPlace("stack", make_home("ds-"))
    target = open_target("local", place.folder)
    folder = ClusterFolder(tmp_path / "demo")
    folder.root.mkdir()
    write_applied(folder, resolve(parse_spec(SPEC, "cluster.yaml")))
    try:
        with place.lock():
            target.apply(target.plan(resolve(parse_spec(PLATFORM, "cluster.yaml"))), lambda text: None)
        target.slurm.sacctmgr(["add", "user", "boss", "account=root", "AdminLevel=Administrator"])
        program = str(Path(dalsegno.__file__).parent / "programs.py")
        env = {**target.user_env(os.environ), "LC_ALL": "C.UTF-8"}

        def run(option: str) -> None:
            argv = [sys.executable, "-I", program, "slurm-policy", str(folder.root), option]
            subprocess.run(argv, env=env, check=True)

        run("--accounts")
        run("--accounts")
        found = target.slurm.accounts("stack")
        assert found.accounts["ml"]["GrpTRES"] == "cpu=4" and found.qos["night"]["MaxWall"] == "01:00:00"
        assert found.members["ann", "ml"]["GrpTRES"] == "gres/gpu=4"
        assert found.users["boss"]["AdminLevel"] == "Administrator", "somebody else has made the administrator"
        run("--once")
        facts = target.slurm.raw_partitions()["train"]
        assert (facts["MaxTime"], facts["PriorityTier"], facts["Hidden"]) == ("02:00:00", "5", "YES")
        assert (facts["AllowAccounts"], facts["AllowQos"], facts["LLN"]) == ("ml", "night", "YES")
    finally:
        target.destroy(lambda text: None)
        shutil.rmtree(place.home)
