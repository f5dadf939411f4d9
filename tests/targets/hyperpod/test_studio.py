"""The script that attaches SageMaker Studio: requests that fit AWS' model, run with a stand-in for the AWS CLI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.errors import TargetError
from dalsegno.targets.cloud.service_model import check_request
from dalsegno.targets.hyperpod.studio import StudioUser, lifecycle_text, studio_requests, studio_script
from tests.targets.hyperpod.conftest import CPU, cluster_of, open_hyperpod

NETWORK = "  subnets: [subnet-0123456789abcdef0]\n  security_groups: [sg-0123456789abcdef0]\n"
FILES = "storage: [{name: fsx, mount: /fsx, type: lustre, source: fs-0123456789abcdef0}]\nusers: [{name: ann_b}]\n"
# Answers as an account in which only the lifecycle script exists, and records the requests.
AWS = """\
#!/usr/bin/env python3
import json, os, sys
words, log = sys.argv[1:], os.environ["AWS_LOG"]
made = open(log).read() if os.path.exists(log) else ""
if "--cli-input-json" in words:
    with open(log, "a") as file:
        print(json.dumps([words[1], json.loads(words[words.index("--cli-input-json") + 1])]), file=file)
elif words[1] == "describe-subnets":
    print("vpc-0aaaaaaaaaaaaaaaa")
elif words[1] == "list-studio-lifecycle-configs":
    print("arn:aws:sagemaker:us-east-1:123456789012:studio-lifecycle-config/demo-cluster")
elif words[1] == "list-domains":
    print("d-abc" if "create-domain" in made else "None")
elif words[1].replace("describe", "create") in made:
    print("InService")
else:
    sys.exit("ResourceNotFound")
"""


def shellcheck(text: str, file: Path) -> str:
    file.write_text(text)
    program = Path(sys.executable).with_name("shellcheck")
    return subprocess.run([program, file], capture_output=True, text=True).stdout


def test_every_request_fits_the_service_model():
    cluster = cluster_of(CPU, NETWORK, FILES)
    requests = studio_requests(cluster, [StudioUser("ann", 10001), StudioUser("root", 0)])
    for request in requests:
        check_request("sagemaker", request.operation, request.body)
    names = [request.operation for request in requests]
    assert names[:2] == ["CreateStudioLifecycleConfig", "CreateDomain"]
    assert names[2:] == ["CreateUserProfile", "CreateSpace"] * 2
    assert "UserSettings" not in requests[4].body, "Studio accepts no uid below 10000"


def test_plan_writes_a_script_that_creates_what_is_missing_and_nothing_twice(tmp_path):
    script = tmp_path / "studio.sh"
    script.write_text(open_hyperpod(tmp_path).platform_files(cluster_of(CPU, NETWORK, FILES))["studio.sh"])
    (tmp_path / "aws").write_text(AWS)
    (tmp_path / "aws").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "AWS_LOG": str(tmp_path / "log")}
    for _ in range(2):
        done = subprocess.run(["bash", script], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
    assert done.stdout == "Studio: https://d-abc.studio.us-east-1.sagemaker.aws\n"
    sent = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [name for name, _ in sent] == ["create-domain", "create-user-profile", "create-space"]
    domain, profile, space = (body for _, body in sent)
    assert domain["VpcId"] == "vpc-0aaaaaaaaaaaaaaaa"
    assert profile == {
        "DomainId": "d-abc",
        "UserProfileName": "ann-b",
        "UserSettings": {"CustomPosixUserConfig": {"Uid": 10001, "Gid": 10001}},
    }
    files = space["SpaceSettings"]["CustomFileSystems"]
    assert files == [{"FSxLustreFileSystem": {"FileSystemId": "fs-0123456789abcdef0"}}]


def test_scripts_are_clean_for_shellcheck(tmp_path):
    cluster = cluster_of(CPU, NETWORK, FILES)
    requests = studio_requests(cluster, [StudioUser("ann", 10001)])
    for text in (studio_script(cluster, requests, "fs-0123456789abcdef0"), lifecycle_text(cluster)):
        assert shellcheck(text, tmp_path / "script.sh") == ""


def test_script_without_its_file_system_says_to_run_up_first(tmp_path):
    new = "storage: [{name: fsx, mount: /fsx, type: lustre, size: 1200G}]\n"
    script = tmp_path / "studio.sh"
    script.write_text(open_hyperpod(tmp_path).platform_files(cluster_of(CPU, NETWORK, new))["studio.sh"])
    done = subprocess.run(["bash", script], capture_output=True, text=True)
    assert done.returncode != 0 and "run `dalsegno up` first" in done.stderr


def test_cluster_without_a_network_in_the_file_is_refused():
    with pytest.raises(TargetError, match="needs the cluster's network"):
        studio_requests(cluster_of(), [StudioUser("ann")])
