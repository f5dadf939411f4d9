"""Play `up`, a dry run of the real `pcluster`, and `down` against a moto server, and print what happened as JSON.

Runs with the Python of an environment that holds moto, boto3 and what Dal Segno needs. `moto_shim.py` adds answers that
moto lacks. These answers are invented, so they prove nothing about AWS itself.

    moto_scenario.py FOLDER PCLUSTER FAKE_PCLUSTER CLUSTER_FILE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import moto_shim

FOLDER, PCLUSTER, FAKE, FILE = (Path(word) for word in sys.argv[1:5])
server = moto_shim.start()

import io

import boto3
from botocore.awsrequest import AWSResponse
from urllib3.response import HTTPResponse

from dalsegno.setup.delivery import CodeBundle
from dalsegno.spec.load import parse_spec
from dalsegno.spec.resolve import resolve
from dalsegno.targets.cloud.aws import BotoApi
from dalsegno.targets.cloud.credentials import CloudError
from dalsegno.targets.parallelcluster.target import PclusterTarget

said: list[str] = []
cluster = resolve(parse_spec(FILE.read_text(), "cluster.yaml"))
(FOLDER / "bin").mkdir()
(FOLDER / "fake").mkdir()
(FOLDER / "bin" / "pcluster").write_bytes(FAKE.read_bytes())
(FOLDER / "bin" / "pcluster").chmod(0o755)
env = {**os.environ, "PATH": f"{FOLDER / 'bin'}:{os.environ['PATH']}", "FAKE_PCLUSTER": str(FOLDER / "fake")}
folder = FOLDER / "home" / "clusters" / cluster.name


def target() -> PclusterTarget:
    code = CodeBundle("0.1-abc", ((FILE, "dalsegno/x.py"),))
    return PclusterTarget(folder, env=env, pause=lambda seconds: None, code=lambda: code)


found: dict[str, object] = {}
plan = target().plan(cluster)
found["plan"] = plan.sentences()
target().apply(plan, said.append)
found["again"] = target().plan(cluster).sentences()
bucket = f"dalsegno-{cluster.name}-123456789012-us-east-1"
objects = boto3.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
found["objects"] = sorted(each["Key"].rpartition("/")[2] for each in objects)
for vpc in boto3.client("ec2").describe_vpcs()["Vpcs"]:  # moto's CloudFormation ignores these properties
    boto3.client("ec2").modify_vpc_attribute(VpcId=vpc["VpcId"], EnableDnsHostnames={"Value": True})
config = folder / "pcluster.yaml"
dry = subprocess.run(
    [PCLUSTER, "create-cluster", "--cluster-name", "other", "--region", "us-east-1", "--dryrun", "true",
     "--cluster-configuration", str(config)], capture_output=True, text=True, env=os.environ, timeout=500,
)  # fmt: skip
found["dryrun"] = dry.stdout
found["dryrun_errors"] = dry.stderr[-3000:]
found["key"] = [each["KeyName"] for each in boto3.client("ec2").describe_key_pairs()["KeyPairs"]]
# moto cannot delete a network that it created, so the network is kept and the rest of a second cluster is removed.
subnet = boto3.client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
text = f"""
name: second
target: parallelcluster
parallelcluster: {{region: us-east-1, head_subnet: {subnet}}}
partitions: [{{name: train, nodes: 1, instance: m5.xlarge}}]
"""
folder = folder.with_name("second")
target().apply(target().plan(resolve(parse_spec(text, "cluster.yaml"))), said.append)
found["phase"] = target().status().phase.value
found["down"] = target().destroy(said.append)
found["down_again"] = target().destroy(said.append)
stacks = boto3.client("cloudformation").list_stacks()["StackSummaries"]
found["stacks"] = {each["StackName"]: each["StackStatus"] for each in stacks}
buckets = [each["Name"] for each in boto3.client("s3").list_buckets()["Buckets"]]
found["bucket_stays"] = "dalsegno-second-123456789012-us-east-1" in buckets
# Refusals that moto does not make, as boto3 parses them from the wire
ERROR = "<Response><Errors><Error><Code>{}</Code><Message>no</Message></Error></Errors></Response>"


def answers(codes: list[str]) -> BotoApi:
    """Return an API whose first answers are these refusals; "" passes a request on to moto."""
    pauses.clear()
    api = BotoApi("us-east-1", pauses.append)

    def refuse(request: object, **_: object) -> AWSResponse | None:
        code = codes.pop(0) if codes else ""
        if not code:
            return None
        body = HTTPResponse(io.BytesIO(ERROR.format(code).encode()), preload_content=False)
        return AWSResponse("http://127.0.0.1", 400, {}, body)

    api._client("ec2").meta.events.register("before-send.ec2", refuse)
    return api


pauses: list[float] = []
found["throttled"] = [bool(answers(["RequestLimitExceeded"] * 6).call("ec2", "describe_vpcs")["Vpcs"]), len(pauses)]
refusals = {}
for code in ("ExpiredToken", "AuthFailure", "UnauthorizedOperation", "InsufficientInstanceCapacity"):
    try:
        answers([code]).call("ec2", "describe_vpcs")
    except CloudError as error:
        refusals[code] = error.refusal.value
found["refusals"] = refusals
for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    del os.environ[name]
os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = "/dev/null"
try:
    target().plan(cluster)
except CloudError as error:
    found["without_credentials"] = [error.refusal.value, error.hint]
print(json.dumps(found))
server.stop()
