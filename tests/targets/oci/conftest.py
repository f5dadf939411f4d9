"""An OCI target with Resource Manager in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dalsegno.setup.delivery import CodeBundle
from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.processes import Completed, FakeRunner, Runner
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


CODE = CodeBundle("0.1-abc", ((Path(__file__), "dalsegno/x.py"),))


def open_oci(
    folder: Path,
    manager: FakeResourceManager,
    runner: Runner | None = None,
    bundle: Callable[[], CodeBundle] = lambda: CODE,
) -> OciTarget:
    return OciTarget(
        folder / "clusters" / "demo",
        lambda own: manager,
        runner or controller(),
        lambda seconds: None,
        bundle,
    )


def controller(answers: Mapping[str, Completed | str] | None = None, nodes: int = 2) -> FakeRunner:
    """Return a runner whose ssh reaches a controller with nodes in Slurm. `answers` are by a part of the command."""

    def answer(argv: tuple[str, ...], stdin: str | None) -> Completed | str:
        found = next((text for part, text in (answers or {}).items() if part in argv[-1]), None)
        if found is None and "show node" in argv[-1]:
            facts = "State=IDLE CPUTot=8 RealMemory=1000 Partitions=train"
            return "".join(f"NodeName=compute-{number} {facts}\n" for number in range(1, nodes + 1))
        return found or ""

    return FakeRunner(answer)
