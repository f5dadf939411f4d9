"""What ParallelCluster itself, CloudFormation's linter and an emulator of AWS say about what we render.

The tools are heavy and hold each other's packages back, so they have environments of their own in a cache folder
($DALSEGNO_CLOUD_TOOLS). Tests marked `long` create them. Where they exist, the other tests use them too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.targets.parallelcluster.config import render_config
from tests.targets.parallelcluster.files import FILES, cluster_of, known_for, product_python, tools_python

HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "golden" / "parallelcluster"
PROGRAM = HERE / "product_schema.py"
POLICIES = HERE.parents[2] / "src" / "dalsegno" / "targets" / "parallelcluster" / "update_policies.csv"
ENVIRONMENTS = {
    product_python: ["aws-parallelcluster==3.16.1"],
    tools_python: ["moto[server]==5.2.5", "boto3", "cfn-lint", "pydantic>=2.10", "click>=8.1"],
}
has_product = pytest.mark.skipif(not product_python().exists(), reason="aws-parallelcluster is not in the cache folder")
has_tools = pytest.mark.skipif(not tools_python().exists(), reason="moto and cfn-lint are not in the cache folder")
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


def ask_product(*words: str, stdin: str = "") -> str:
    return subprocess.run(
        [product_python(), PROGRAM, *words], input=stdin, capture_output=True, text=True, check=True, timeout=170
    ).stdout


@has_product
def test_every_config_passes_the_schema_of_the_product():
    clusters = {name: cluster_of(text) for name, text in FILES.items()}
    configs = [render_config(each, known_for(each)) for each in clusters.values()]
    broken = {**configs[0], "HeadNode": {**configs[0]["HeadNode"], "InstanceTyp": "m5.large"}}
    *faults, wrong = json.loads(ask_product("check", stdin=json.dumps([*configs, broken])))
    assert dict(zip(clusters, faults, strict=True)) == dict.fromkeys(FILES)
    assert wrong == {"HeadNode": {"InstanceTyp": ["Unknown field."]}}, "the schema finds what is wrong"


@has_product
def test_update_policies_are_those_of_the_product():
    assert ask_product("policies") == POLICIES.read_text()


@has_tools
def test_templates_pass_cloudformations_linter():
    # W3010: the zone is in the template because the cluster file names it, or the capacity is there.
    lint = [
        tools_python().with_name("cfn-lint"),
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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_up_dry_run_and_down_against_an_emulator(tmp_path):
    """The stack, the key pair and the scripts are made through boto3 on moto, and the real `pcluster` validates the
    config that was sent, with all its validators. It creates nothing: moto cannot run ParallelCluster's own stack."""
    for python, packages in ENVIRONMENTS.items():
        if not python().exists():
            subprocess.run([sys.executable, "-m", "venv", python().parents[1]], check=True)
            subprocess.run([python(), "-m", "pip", "install", "--quiet", *packages], check=True)
    file = tmp_path / "cluster.yaml"
    file.write_text(DRY)
    program = [tools_python(), HERE / "moto_scenario.py", tmp_path, product_python().with_name("pcluster")]
    source = {"PYTHONPATH": str(HERE.parents[2] / "src"), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*program, HERE / "fake_pcluster.py", file], capture_output=True, text=True, timeout=900, env=source
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # A successful dry run ends with code 1 and this message.
    dry = json.loads(found["dryrun"])
    assert dry["message"] == "Request would have succeeded, but DryRun flag is set.", dry
    assert {each["level"] for each in dry["validationMessages"]} <= {"INFO", "WARNING"}
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
