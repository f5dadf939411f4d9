"""Tests of rendered files with ParallelCluster itself, CloudFormation's linter and an emulator of AWS.

`tests/targets/cloud_tools.py` installs these tools in environments of their own.
"""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dalsegno.targets.parallelcluster.config import render_config
from dalsegno.targets.parallelcluster.platform_files import render_files
from dalsegno.targets.parallelcluster.prerequisites import Prerequisites, render_template, settings_of
from tests.targets.cloud_tools import python_of
from tests.targets.parallelcluster.files import FILES, MINIMAL, cluster_of, known_for

PRODUCT, OLD_PRODUCT = "pcluster-3.16.1", "pcluster-3.13.1"
HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "golden" / "parallelcluster"
PROGRAM = HERE / "product_schema.py"
POLICIES = HERE.parents[2] / "src" / "dalsegno" / "targets" / "parallelcluster" / "update_policies.csv"
pytestmark = pytest.mark.timeout(1800)  # pip may download the tools first
DRY = """
name: demo
target: parallelcluster
parallelcluster:
  region: us-east-1
  key: my-key
  allowed_ips: 203.0.113.0/24
  capacity_reservation: cr-0123456789abcdef0
  queues: {cpu: {capacity_type: SPOT, instances: [c5.2xlarge, m5.2xlarge], max_count: 4}}
head: {instance: m5.2xlarge}
login: {count: 1, instance: m5.large}
partitions:
  - {name: train, nodes: 2, instance: p5.48xlarge, time_limit: 7d}
  - {name: cpu, nodes: 1, instance: c6i.2xlarge}
storage:
  - {name: scratch, mount: /scratch, type: scratch}
  - {name: tools, mount: /tools, type: efs}
"""


def ask_product(*words: str, stdin: str = "", product: str = PRODUCT) -> str:
    return subprocess.run(
        [python_of(product), PROGRAM, *words], input=stdin, capture_output=True, text=True, check=True, timeout=170
    ).stdout


@pytest.mark.parametrize("product", [PRODUCT, pytest.param(OLD_PRODUCT, marks=pytest.mark.long)])
def test_every_config_passes_the_schema_of_the_product(product):
    clusters = {name: cluster_of(text) for name, text in FILES.items()}
    configs = [yaml.safe_load(render_files(each, None, "0.1-abc")["cluster.yaml"]) for each in clusters.values()]
    broken = {**configs[0], "HeadNode": {**configs[0]["HeadNode"], "InstanceTyp": "m5.large"}}
    *faults, wrong = json.loads(ask_product("check", stdin=json.dumps([*configs, broken]), product=product))
    assert dict(zip(clusters, faults, strict=True)) == dict.fromkeys(FILES)
    assert wrong == {"HeadNode": {"InstanceTyp": ["Unknown field."]}}, "the schema finds what is wrong"


def test_update_policies_are_those_of_the_product():
    assert ask_product("policies") == POLICIES.read_text()


@pytest.mark.long
def test_update_policies_of_an_old_release_differ_only_where_the_page_says():
    """ParallelCluster itself refuses what it does not support, so a difference costs a clear message and no cluster."""
    old, new = (dict(csv.reader(text.splitlines())) for text in (
        ask_product("policies", product=OLD_PRODUCT), POLICIES.read_text(),
    ))  # fmt: skip
    different = {path: (old[path], new[path]) for path in old if path in new and old[path] != new[path]}
    assert different == {
        "HeadNode/LocalStorage": ("SUPPORTED", "UNSUPPORTED"),
        "HeadNode/LocalStorage/RootVolume": ("SUPPORTED", "UNSUPPORTED"),
        "Tags": ("UNSUPPORTED", "SUPPORTED_UNLESS_ADC"),
        "Tags/Value": ("UNSUPPORTED", "SUPPORTED_UNLESS_ADC"),
    }


def test_templates_pass_cloudformations_linter():
    # W3010: the zone is in the template because the cluster file names it, or the capacity is there.
    lint = [
        python_of("tools").with_name("cfn-lint"),
        "--ignore-checks",
        "W3010",
        "--regions",
        "us-east-1",
        "us-west-2",
        "--",
    ]
    templates = sorted(GOLDEN.glob("*-prerequisites.json"))
    done = subprocess.run([*lint, *templates], capture_output=True, text=True, timeout=170)
    assert len(templates) == len(FILES) and (done.returncode, done.stdout) == (0, "")


def in_emulator(program: str, folder: Path, *words: Path | str, stdin: str = "") -> Any:
    """Run a program with moto and the real `pcluster`, and return what it prints."""
    words = (HERE / program, folder, python_of(PRODUCT).with_name("pcluster"), *words)
    source = {"PYTHONPATH": str(HERE.parents[2] / "src"), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        [python_of("tools"), *words], input=stdin, capture_output=True, text=True, timeout=900, env=source
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_valid(stdout: str) -> None:
    """A successful dry run ends with code 1 and this message."""
    dry = json.loads(stdout)
    assert dry["message"] == "Request would have succeeded, but DryRun flag is set.", dry
    assert {each["level"] for each in dry.get("validationMessages", ())} <= {"INFO", "WARNING"}


@pytest.mark.long
def test_every_config_passes_all_validators_of_the_product(tmp_path):
    cases = []
    for name, text in FILES.items():
        cluster = cluster_of(text)
        own = settings_of(cluster)
        zone = own.availability_zone or f"{own.region}a"
        alone = cluster_of(MINIMAL.replace("us-east-1", own.region))
        kind = own.queues[0].capacity_type
        cases.append({
            "name": name,
            "config": render_config(cluster, known_for(cluster)),
            "template": render_template(alone, Prerequisites(), f"network-of-{name}", zone),
            "reservation": {
                "AvailabilityZone": zone, "InstanceType": own.queues[0].instances[0],
                "ReservationType": "capacity-block" if kind == "CAPACITY_BLOCK" else "default",
            },
        })  # fmt: skip
    found = in_emulator("moto_dry_runs.py", tmp_path, stdin=json.dumps(cases))
    assert list(found) == list(FILES)
    for each in found.values():
        assert_valid(each["stdout"] or each["stderr"])


@pytest.mark.long
def test_up_dry_run_and_down_against_an_emulator(tmp_path):
    """The stack, the key pair and the scripts are made through boto3 on moto, and the real `pcluster` validates the
    config that was sent, with all its validators. It creates nothing: moto cannot run ParallelCluster's own stack."""
    file = tmp_path / "cluster.yaml"
    file.write_text(DRY)
    found = in_emulator("moto_scenario.py", tmp_path, HERE / "fake_pcluster.py", file)
    assert_valid(found["dryrun"] or found["dryrun_errors"])
    assert found["plan"][0].startswith("creates demo on parallelcluster: 3 nodes")
    assert found["again"] == ["nothing to do: the cluster is as the file says"]
    assert found["objects"] == ["compute.sh", "dalsegno-0.1-abc.tar.gz", "head.sh", "login.sh"]
    assert (found["phase"], found["key"], found["down"], found["down_again"]) == ("up", ["my-key"], True, False)
    assert found["stacks"] == {"dalsegno-demo": "CREATE_COMPLETE", "dalsegno-second": "DELETE_COMPLETE"}
    assert found["throttled"] == [True, 1], "boto3 gave up once, and the request was repeated after one pause"
    assert found["refusals"] == {
        "ExpiredToken": "expired credentials", "AuthFailure": "wrong credentials",
        "UnauthorizedOperation": "not allowed", "InsufficientInstanceCapacity": "no capacity",
    }  # fmt: skip
    assert found["bucket_stays"] and found["without_credentials"][0] == "no credentials"
