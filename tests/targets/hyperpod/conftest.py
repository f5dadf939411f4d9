"""A HyperPod target with AWS on loopback, and the cluster files of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dalsegno.setup.delivery import CodeBundle
from dalsegno.spec.facts import Cluster
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.system.processes import FakeRunner, Runner
from dalsegno.targets.cloud.aws import BotoApi
from dalsegno.targets.hyperpod.api import HyperPodApi
from dalsegno.targets.hyperpod.target import HyperPodTarget
from tests.targets.hyperpod.emulator import Emulator

SPEC = """
name: demo
target: hyperpod
hyperpod:
  region: us-east-1
  execution_role: arn:aws:iam::123456789012:role/demo-hyperpod
  bucket: sagemaker-demo-lifecycle
{settings}
head: {{instance: ml.m5.2xlarge}}
login: {{count: 1, instance: ml.m5.xlarge}}
partitions:
{partitions}
{rest}
"""
CPU = "  - {name: cpu, nodes: 2, instance: ml.c5.4xlarge}\n"
GPU = "  - {name: gpu, nodes: 2, instance: ml.g5.xlarge, time_limit: 7d}\n"


def cluster_of(partitions: str = CPU, settings: str = "", rest: str = "") -> Cluster:
    return resolve(parse_spec(SPEC.format(partitions=partitions, settings=settings, rest=rest), "cluster.yaml"))


def environment(server: Emulator) -> dict[str, str]:
    """Return the variables that make boto3 use the emulator, and nothing of this machine."""
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def aws(aws_server: Emulator) -> Iterator[Emulator]:
    """AWS without any cluster, and credentials for it."""
    from tests.targets.cloud_stages import empty_aws

    with empty_aws(aws_server):
        yield aws_server


def small_bundle(folder: Path) -> CodeBundle:
    file = folder / "code.py"
    file.write_text("# our code\n")
    return CodeBundle("0.1-abc", ((file, "dalsegno/code.py"),))


@cache
def one_api(region: str) -> HyperPodApi:
    """Return one client for all tests: boto3 takes a second to read its service models."""
    return HyperPodApi(BotoApi(region, pause=lambda seconds: None))


def open_hyperpod(folder: Path, runner: Runner | None = None, *, fresh: bool = False) -> HyperPodTarget:
    """Open the target of cluster `demo` in a home folder. The target never waits, and its ssh is a fake.

    With `fresh`, the target has its own client, which searches for credentials again.
    """
    root = folder / "clusters" / "demo"
    return HyperPodTarget(
        root,
        **({} if fresh else {"connect": one_api}),
        runner=runner or FakeRunner(lambda argv, stdin: ""),
        pause=lambda seconds: None,
        bundle=lambda: small_bundle(folder),
    )
