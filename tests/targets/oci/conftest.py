"""An OCI target with Resource Manager in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.processes import FakeRunner
from dalsegno.targets.oci.resource_manager import FakeResourceManager
from dalsegno.targets.oci.target import OciTarget

SPEC = """
name: demo
target: oci
oci:
  region: eu-frankfurt-1
  compartment: ocid1.compartment.oc1..aaaaaaaaexample
  ad: xYzA:EU-FRANKFURT-1-AD-1
  ssh_key: {folder}/key.pub
  template: {folder}/stack.zip
{settings}
head: {{instance: VM.Standard.E4.Flex, cpus: 16, memory: 128G}}
partitions: [{partitions}]
{rest}
"""
GPUS = "{name: train, nodes: 2, instance: BM.GPU.H100.8}"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ"
FULL = (
    "storage: [{name: home, mount: /mnt/home, type: fss, home: true}]\n"
    "containers: {enabled: true}\n"
    f"users: [{{name: ann, ssh_keys: ['{KEY}']}}]\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "key.pub").write_text("ssh-ed25519 AAAA me\n")
    (tmp_path / "stack.zip").write_bytes(b"PK\3\4 the stack")
    return tmp_path


def cluster_of(folder: Path, partitions: str = GPUS, settings: str = "", rest: str = "") -> Cluster:
    text = SPEC.format(folder=folder, partitions=partitions, settings=settings, rest=rest)
    return resolve(parse_spec(text, "cluster.yaml"))


def open_oci(folder: Path, manager: FakeResourceManager) -> OciTarget:
    return OciTarget(
        folder / "clusters" / "demo", lambda own: manager, FakeRunner(lambda argv, stdin: ""), lambda seconds: None
    )
