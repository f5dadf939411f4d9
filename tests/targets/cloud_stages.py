"""The stages of the cloud targets: ParallelCluster, HyperPod and OCI, each with its emulator."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from dalsegno.cluster import ClusterPlace
from dalsegno.setup.delivery import CodeBundle
from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import CanReboot, CanReplace, CanResize, Target
from dalsegno.targets.cloud.credentials import CloudRefusal
from dalsegno.targets.folder import ClusterFolder, ClusterRole
from dalsegno.targets.hyperpod.target import HyperPodTarget
from dalsegno.targets.machines import CanManageMachines, InstanceAction
from dalsegno.targets.oci.resource_manager import FakeResourceManager, ResourceManager, StackJobState
from dalsegno.targets.oci.target import OciTarget
from dalsegno.targets.parallelcluster.folder import read_state, write_state
from dalsegno.targets.parallelcluster.head import PclusterHead
from dalsegno.targets.parallelcluster.target import PclusterTarget
from tests.targets.cloud_tools import need_oci_sdk
from tests.targets.hyperpod import conftest as hyperpod_files
from tests.targets.hyperpod.emulator import Emulator
from tests.targets.oci import conftest as oci_files
from tests.targets.oci import emulator as oci_emulator
from tests.targets.parallelcluster import files as pcluster_files
from tests.targets.parallelcluster.fake_aws import FakeAccount
from tests.targets.stages import Case, PlatformFault, SlurmOnHead, TargetStage

CODE = CodeBundle("0.1-abc", ((Path(__file__), "dalsegno/x.py"),))
FAKE_PCLUSTER = Path(__file__).parent / "parallelcluster" / "fake_pcluster.py"
NO_CAPACITY = "InsufficientInstanceCapacity: we currently do not have sufficient capacity"
CHANGING = ("create-", "update-", "delete-")


class CloudStage(TargetStage):
    """A target whose cluster `demo` is on an emulated cloud, and whose Slurm answers on its head."""

    is_cloud = True
    used_here = False

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.place = ClusterPlace("demo", home)
        self.slurm = SlurmOnHead()
        self.pauses = 0

    def pause(self, seconds: float) -> None:
        """Count a pause instead of waiting. Fail if the target waits again and again."""
        self.pauses += 1
        assert self.pauses < 200

    def apply(self, plan: Any) -> list[str]:
        self.slurm.nodes = self.nodes[: len(plan.cluster.nodes)]
        return super().apply(plan)


class PclusterStage(CloudStage):
    """ParallelCluster with a stand-in for `pcluster` on PATH, and an account in memory."""

    name = "parallelcluster"
    abilities = frozenset()
    nodes = tuple(f"train-st-train-{number}" for number in (1, 2, 3))
    credentials_fix = "aws sts get-caller-identity"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.account = FakeAccount()
        for name in ("bin", "fake"):
            (home / name).mkdir()
        shutil.copy(FAKE_PCLUSTER, home / "bin" / "pcluster")
        self.env = {"PATH": str(home / "bin"), "FAKE_PCLUSTER": str(home / "fake")}

    def target(self) -> Target:
        return PclusterTarget(
            self.place.folder, lambda region: self.account, self.slurm, self.env, self.pause, lambda: CODE
        )

    def head(self) -> Target:
        state = read_state(ClusterFolder(self.place.folder))
        assert state is not None
        folder = self.home / "head" / "clusters" / "demo"
        write_state(ClusterFolder(folder), replace(state, role=ClusterRole.HEAD))
        return PclusterHead(folder, self.slurm)

    def cluster(self, nodes: int = 2) -> Cluster:
        text = pcluster_files.MINIMAL.replace("nodes: 2", f"nodes: {nodes}")
        return pcluster_files.cluster_of(text.replace("us-east-1}", "us-east-1, key: k, allowed_ips: 203.0.113.0/24}"))

    def scenario(self, **how: Any) -> None:
        (self.home / "fake" / "scenario.json").write_text(json.dumps(how))

    def fail(self, fault: PlatformFault) -> None:
        failed = ["CREATE_IN_PROGRESS", "CREATE_FAILED"]
        if fault is PlatformFault.CREATION:
            self.scenario(create=failed, failure="Failed to execute OnNodeConfigured script")
        elif fault is PlatformFault.CAPACITY:
            self.scenario(create=failed, failure=NO_CAPACITY)
        elif fault is PlatformFault.THROTTLED:
            self.scenario(throttle=3)
        else:
            self.scenario(refuse={"describe-cluster": "An error occurred (InvalidClientTokenId) when calling X: bad"})
            self.account.refusals += [("get_caller_identity", CloudRefusal.WRONG_CREDENTIALS)] * 2

    def repair(self) -> None:
        self.scenario()
        self.account.refusals.clear()

    def vanish(self) -> None:
        (self.home / "fake" / "clusters.json").write_text("{}")
        self.account.stacks.clear()

    def changes(self) -> int:
        calls = self.home / "fake" / "calls.jsonl"
        words = [json.loads(line)[0] for line in calls.read_text().splitlines()] if calls.exists() else []
        own = [name for name in self.account.calls if name.startswith(("create_", "update_", "delete_", "put_"))]
        return len(own) + sum(word.startswith(CHANGING) for word in words)

    def size(self) -> int:
        config = yaml.safe_load(json.loads((self.home / "fake" / "clusters.json").read_text())["demo"]["config"])
        found: int = config["Scheduling"]["SlurmQueues"][0]["ComputeResources"][0]["MaxCount"]
        return found

    def exists(self) -> bool:
        clusters = self.home / "fake" / "clusters.json"
        own = bool(self.account.stacks or self.account.file_systems)
        return own or (clusters.exists() and json.loads(clusters.read_text()) != {})

    def replaced(self) -> list[str]:
        return [words.split()[0].partition("=")[2] for words in self.slurm.updates() if "State=DOWN" in words]


class HyperPodStage(CloudStage):
    """HyperPod with boto3 against moto and a recorder on loopback."""

    name = "hyperpod"
    abilities = frozenset({CanReplace, CanReboot, CanResize})
    # `head` is instance 0, the workers follow in the order of their groups' names, and the login node is last
    nodes = tuple(f"ip-10-3-0-{number}" for number in (1, 2, 3))
    credentials_fix = "aws sts get-caller-identity"

    def __init__(self, home: Path, aws: Emulator) -> None:
        super().__init__(home)
        self.aws, self.slurm.partition = aws, "cpu"
        (home / "key.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me\n")

    def target(self) -> Target:
        return HyperPodTarget(
            self.place.folder,
            hyperpod_files.one_api,
            self.slurm,
            self.pause,
            lambda: hyperpod_files.small_bundle(self.home),
        )

    def cluster(self, nodes: int = 2) -> Cluster:
        partition = hyperpod_files.CPU.replace("nodes: 2", f"nodes: {nodes}")
        return hyperpod_files.cluster_of(partition, f"  ssh_key: {self.home}/key.pub\n")

    def fail(self, fault: PlatformFault) -> None:
        failed = {"ClusterStatus": "Failed", "FailureMessage": "Lifecycle scripts did not run successfully"}
        if fault is PlatformFault.CREATION:
            self.aws.statuses += [{"ClusterStatus": "Creating"}, failed]
        elif fault is PlatformFault.CAPACITY:
            self.aws.statuses += [{"ClusterStatus": "Creating"}, {**failed, "FailureMessage": NO_CAPACITY}]
        elif fault is PlatformFault.THROTTLED:
            self.aws.refusals["DescribeCluster"] = [(400, "ThrottlingException", "Rate exceeded")]
        else:
            self.aws.refusals["ListClusters"] = [(400, "UnrecognizedClientException", "no")] * 3

    def repair(self) -> None:
        self.aws.statuses.clear()
        self.aws.refusals.clear()

    def _call(self, service: str, operation: str, **parameters: Any) -> Any:
        return hyperpod_files.one_api("us-east-1").aws.call(service, operation, **parameters)

    def vanish(self) -> None:
        self._call("sagemaker", "delete_cluster", ClusterName="demo")

    def changes(self) -> int:
        return sum(name.startswith(("Create", "Update", "Delete")) for name, _ in self.aws.requests)

    def size(self) -> int:
        sent = [*self.aws.sent("CreateCluster"), *self.aws.sent("UpdateCluster")]
        groups = [each for request in sent for each in request.get("InstanceGroups", ())]
        found: int = next(each["InstanceCount"] for each in reversed(groups) if each["InstanceGroupName"] == "cpu")
        return found

    def exists(self) -> bool:
        bucket = "sagemaker-demo-lifecycle"
        clusters = self._call("sagemaker", "list_clusters")["ClusterSummaries"]
        there = [each for each in self._call("s3", "list_buckets")["Buckets"] if each["Name"] == bucket]
        return bool(clusters) or bool(there and self._call("s3", "list_objects_v2", Bucket=bucket).get("Contents"))

    def replaced(self) -> list[str]:
        return [words.split()[0].partition("=")[2] for words in self.slurm.updates() if "Action:Replace" in words]


class SlurmAndStack(SlurmOnHead):
    """A controller of OCI: Slurm, and the stack's program `mgmt` of release 3."""

    def _answer(self, text: str) -> str:
        if "mgmt nodes get names" in text:
            return json.dumps([{"status": "running", "cluster_name": "demo-train"}])
        return super()._answer(text)


class OciStage(CloudStage):
    """OCI with Resource Manager in memory."""

    name = "oci"
    abilities = frozenset()
    nodes = ("compute-1", "compute-2", "compute-3")
    lacks: ClassVar[Mapping[Case, str]] = {
        Case.THROTTLED: "the client of the SDK repeats requests, which the stage oci-sdk runs",
    }
    credentials_fix = "~/.oci/config"

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        (home / "key.pub").write_text("ssh-ed25519 AAAA me\n")
        (home / "stack.zip").write_bytes(b"PK\3\4 the stack")
        self.memory = FakeResourceManager()
        self.slurm = SlurmAndStack()

    def connect(self) -> ResourceManager:
        return self.memory

    def target(self) -> Target:
        return OciTarget(self.place.folder, lambda own: self.connect(), self.slurm, self.pause, lambda: CODE)

    def cluster(self, nodes: int = 2) -> Cluster:
        return oci_files.cluster_of(self.home, oci_files.GPUS.replace("nodes: 2", f"nodes: {nodes}"))

    def fail(self, fault: PlatformFault) -> None:
        planned = (StackJobState.SUCCEEDED, "")
        if fault is PlatformFault.CREATION:
            self.memory.ends = [planned, (StackJobState.FAILED, "Error: remote-exec provisioner error")]
        elif fault is PlatformFault.CAPACITY:
            self.memory.ends = [planned, (StackJobState.FAILED, "500-InternalError, Out of host capacity.")]
        elif fault is PlatformFault.THROTTLED:
            self.memory.refusals = [("create-stack", CloudRefusal.THROTTLED), ("get-job", CloudRefusal.THROTTLED)]
        else:
            self.memory.refusals = [("list-stacks", CloudRefusal.WRONG_CREDENTIALS)]

    def repair(self) -> None:
        self.memory.ends, self.memory.refusals = [], []

    def vanish(self) -> None:
        self.memory.stacks.clear()
        self.slurm.silent = True

    def changes(self) -> int:
        return len(self.memory.started) + len(self.memory.stacks)

    def size(self) -> int:
        return int(next(iter(self.memory.stacks.values()))["node_count"])

    def exists(self) -> bool:
        return bool(self.memory.stacks)

    def replace(self, node: str) -> None:
        """Replace a node as `dalsegno nodes replace` does.

        The new machine may have another name, so the controller, which repairs nodes by name, leaves this to people.
        """
        target = self.target()
        assert isinstance(target, CanManageMachines) and not isinstance(self.target(), CanReplace)
        target.act_on_machines(InstanceAction.REPLACE, [node], through_api=False)

    def replaced(self) -> list[str]:
        ended = [text.rpartition(" ")[2] for text in self.slurm.commands if "mgmt nodes tag-and-terminate" in text]
        begun = sum("mgmt clusters add node --count 1 --cluster demo-train" in text for text in self.slurm.commands)
        assert begun == len(ended), "each terminated machine gets a successor in its cluster"
        return ended


class OciSdkStage(OciStage):
    """OCI with the real SDK against Resource Manager on loopback."""

    name = "oci-sdk"
    lacks: ClassVar[Mapping[Case, str]] = {}

    def __init__(self, home: Path, server: oci_emulator.OciServer) -> None:
        super().__init__(home)
        self.memory, self._manager = server.memory, server.connect()

    def connect(self) -> ResourceManager:
        return self._manager


@contextmanager
def cloud_stage(name: str, home: Path, request: pytest.FixtureRequest) -> Iterator[TargetStage]:
    """Yield a stage whose platform is empty."""
    if name == PclusterStage.name:
        yield PclusterStage(home)
    elif name == OciStage.name:
        yield OciStage(home)
    elif name == OciSdkStage.name:
        need_oci_sdk()
        with oci_emulator.serving(home) as server:
            yield OciSdkStage(home, server)
    else:
        server = request.getfixturevalue("aws_server")
        with empty_aws(server):
            yield HyperPodStage(home, server)


@contextmanager
def empty_aws(server: Emulator) -> Iterator[None]:
    """Remove everything from the emulator, and set credentials for it."""
    urllib.request.urlopen(urllib.request.Request(f"{server.moto}/moto-api/reset", method="POST"), timeout=30)
    server.reset()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hyperpod_files.environment(server).items():
            patch.setenv(name, value)
        yield
