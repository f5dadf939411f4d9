"""A CloudFormation template that starts Grafana on an EC2 instance, for a workspace of Managed Prometheus. Pure.

Everything that Grafana needs is in the template. Grafana listens on the loopback of its machine, and people reach it
through a session of SSM. So no port is open, and IAM decides who may open a session. Grafana has no accounts: everyone
who reaches the forwarded port sees the dashboards, and nobody can change anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import shlex
import tarfile
from collections.abc import Mapping
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.observe.grafana import DASHBOARD_FOLDER, VERSION, workspace_files
from dalsegno.spec.facts import Cluster, RemoteWrite
from dalsegno.targets.cloud.cost import PriceTable
from dalsegno.targets.hyperpod.requests import settings_of

PORT, MACHINE = 3000, "t3.small"
MOST_USER_DATA = 16_384  # bytes that EC2 accepts
_IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
_ACTIONS = ("aps:QueryMetrics", "aps:GetLabels", "aps:GetSeries", "aps:GetMetricMetadata")
_FOLDERS = {"provisioning/": "etc/grafana/provisioning/", "dashboards/": f"{DASHBOARD_FOLDER.lstrip('/')}/"}
_SCRIPT = """\
#!/bin/bash
# Written by `dalsegno dashboards deploy` for cluster {cluster}.
set -euo pipefail
cat > /etc/yum.repos.d/grafana.repo <<'END'
[grafana]
name=grafana
baseurl=https://rpm.grafana.com
gpgcheck=1
repo_gpgcheck=1
gpgkey=https://rpm.grafana.com/gpg.key
sslverify=1
END
dnf install -y grafana-{version}
base64 -d <<'END' | tar -xz --no-same-owner -C /
{files}
END
cat >> /etc/sysconfig/grafana-server <<'END'
AWS_SDK_LOAD_CONFIG=true
GF_ANALYTICS_REPORTING_ENABLED=false
GF_AUTH_ANONYMOUS_ENABLED=true
GF_AUTH_BASIC_ENABLED=false
GF_AUTH_DISABLE_LOGIN_FORM=true
GF_AUTH_SIGV4_AUTH_ENABLED=true
GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION=true
GF_SERVER_HTTP_ADDR=127.0.0.1
GF_SERVER_HTTP_PORT={port}
END
systemctl enable --now grafana-server
"""


def price_text(prices: PriceTable, machine: str = MACHINE) -> str:
    price = prices.instance(machine).usd_per_hour
    return "its price is unknown" if price is None else f"about {price:.2f} USD per hour"


def stack_name(cluster: str) -> str:
    return f"dalsegno-{cluster}-grafana"


def start_script(cluster: str, workspace: RemoteWrite) -> str:
    """Return the script that the machine runs at its first start: it installs Grafana, and unpacks our files."""
    files = workspace_files(cluster, workspace.url, workspace.region)
    placed = {
        f"{folder}{name.removeprefix(prefix)}": text
        for name, text in files.items()
        for prefix, folder in _FOLDERS.items()
        if name.startswith(prefix)
    }
    packed = base64.encodebytes(_archive(placed)).decode().rstrip("\n")
    return _SCRIPT.format(cluster=cluster, version=VERSION, files=packed, port=PORT)


def _archive(files: Mapping[str, str]) -> bytes:
    """Return a tar.gz of the files. Equal files give equal bytes, so the machine is replaced only if they change."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in sorted(files.items()):
            short = json.dumps(json.loads(text), separators=(",", ":")) if name.endswith(".json") else text
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(short.encode()), 0o644
            archive.addfile(entry, io.BytesIO(short.encode()))
    return gzip.compress(buffer.getvalue(), mtime=0)


def grafana_template(cluster: Cluster, workspace: RemoteWrite) -> dict[str, Any]:
    """Return the template. Raise TargetError if the cluster file names no network.

    The template asks for no public address, so the subnet must have a route to the internet and to AWS.
    """
    own = settings_of(cluster)
    if not own.subnets:
        hint = "add `hyperpod.subnets` and `security_groups`, or use `dalsegno dashboards export`"
        raise TargetError("a machine for Grafana needs the cluster's network", hint=hint)
    script = start_script(cluster.name, workspace)
    # EC2 runs a script only at the first start of a machine. So the name of the machine depends on the script:
    # CloudFormation replaces the machine when the script changes.
    machine = f"Grafana{hashlib.sha256(script.encode()).hexdigest()[:8]}"
    labels = {**own.tags, "Name": stack_name(cluster.name), "dalsegno:cluster": cluster.name}
    tags = [{"Key": key, "Value": value} for key, value in labels.items()]
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"Grafana for cluster {cluster.name}, written by dalsegno dashboards deploy",
        "Parameters": {"Image": {"Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>", "Default": _IMAGE}},
        "Resources": {
            "Role": {"Type": "AWS::IAM::Role", "Properties": {**_permissions(workspace), "Tags": tags}},
            "Profile": {"Type": "AWS::IAM::InstanceProfile", "Properties": {"Roles": [{"Ref": "Role"}]}},
            machine: {
                "Type": "AWS::EC2::Instance",
                "Properties": {
                    "ImageId": {"Ref": "Image"},
                    "InstanceType": MACHINE,
                    "IamInstanceProfile": {"Ref": "Profile"},
                    "SubnetId": own.subnets[0],
                    "SecurityGroupIds": list(own.security_groups),
                    "UserData": {"Fn::Base64": script},
                    "Tags": tags,
                },
            },
        },
        "Outputs": {"Machine": {"Value": {"Ref": machine}}},
    }


def _permissions(workspace: RemoteWrite) -> dict[str, Any]:
    """Return the properties of a role that may read one workspace, and be reached through SSM."""
    id = workspace.url.partition("/workspaces/")[2].partition("/")[0]
    arn = f"arn:${{AWS::Partition}}:aps:{workspace.region}:${{AWS::AccountId}}:workspace/{id}"
    query = {"Effect": "Allow", "Action": list(_ACTIONS), "Resource": {"Fn::Sub": arn}}
    assume = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "ec2.amazonaws.com"}}
    return {
        "AssumeRolePolicyDocument": _policy(assume),
        "ManagedPolicyArns": [{"Fn::Sub": "arn:${AWS::Partition}:iam::aws:policy/AmazonSSMManagedInstanceCore"}],
        "Policies": [{"PolicyName": "query-metrics", "PolicyDocument": _policy(query)}],
    }


def _policy(statement: Mapping[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": [statement]}


def connect_command(region: str, machine: str) -> str:
    """Return the command that forwards Grafana's port to this machine through SSM."""
    words = ["aws", "ssm", "start-session", "--region", region, "--target", machine]
    parameters = f"portNumber={PORT},localPortNumber={PORT}"
    return shlex.join([*words, "--document-name", "AWS-StartPortForwardingSession", "--parameters", parameters])
