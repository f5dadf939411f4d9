"""The script that attaches SageMaker Studio to a cluster: a domain, and a Code Editor space for each user. Pure.

A space mounts the cluster's FSx for Lustre file system. The space's lifecycle script links the files into the home
folder and adds the command `cluster`, which opens a session on the cluster.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.targets.hyperpod.requests import settings_of

DOMAIN, VPC, FILE_SYSTEM = "d-000000000000", "vpc-00000000000000000", "fs-00000000000000000"
CONFIG = "arn:aws:sagemaker:us-east-1:000000000000:studio-lifecycle-config/sample"
# Shell variables for values that are known only when the script runs, each with a sample. The requests contain the
# samples, which AWS's model accepts.
SAMPLES = {DOMAIN: "${domain}", VPC: "${vpc}", FILE_SYSTEM: "${files}", CONFIG: "${config}"}
INSTANCE = "ml.t3.medium"
FIRST_UID = 10000
NO_USERS = "studio"  # name of the profile if the cluster file has no users


@dataclass(frozen=True)
class StudioUser:
    """A person with a profile and a space.

    If the uid is known and at least FIRST_UID, the person's files have the same owner in Studio and on the cluster.
    """

    name: str
    uid: int | None = None

    @property
    def profile(self) -> str:
        return re.sub(r"[^a-zA-Z0-9]+", "-", self.name).strip("-") or NO_USERS


@dataclass(frozen=True)
class StudioRequest:
    """A request to SageMaker. `check_request` compares it with AWS's model before the script is written."""

    operation: str
    body: Mapping[str, Any]

    def command(self, region: str) -> str:
        """Return the AWS CLI command for this request, with shell variables in place of the samples."""
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", self.operation).lower()
        text = json.dumps(self.body, indent=1)
        for sample, variable in SAMPLES.items():
            text = text.replace(sample, variable)
        return f'aws sagemaker {name} --region {shlex.quote(region)} --cli-input-json "$(cat <<END\n{text}\nEND\n)"'


def studio_requests(cluster: Cluster, users: list[StudioUser]) -> list[StudioRequest]:
    """Return the requests in order: the lifecycle script, the domain, then a profile and a space for each user."""
    own, name = settings_of(cluster), cluster.name
    profiles: dict[str, str] = {}
    for user in users:
        if (other := profiles.setdefault(user.profile, user.name)) != user.name:
            raise TargetError(
                f"users `{other}` and `{user.name}` would have the same profile `{user.profile}` in Studio",
                hint="rename one of them: profiles have letters, digits and hyphens only",
            )
    if not own.subnets:
        raise TargetError("Studio needs the cluster's network", hint="add `hyperpod.subnets` to the cluster file")
    files = [{"FSxLustreFileSystemConfig": {"FileSystemId": FILE_SYSTEM}}] if has_files(cluster) else []
    settings: dict[str, Any] = {
        "ExecutionRole": own.execution_role,
        "SecurityGroups": list(own.security_groups),
        "CodeEditorAppSettings": {"LifecycleConfigArns": [CONFIG]},
        **({"CustomFileSystemConfigs": files} if files else {}),
    }
    content = base64.b64encode(lifecycle_text(cluster).encode()).decode()
    found = [
        StudioRequest(
            "CreateStudioLifecycleConfig",
            {
                "StudioLifecycleConfigName": f"{name}-cluster",
                "StudioLifecycleConfigAppType": "CodeEditor",
                "StudioLifecycleConfigContent": content,
            },
        ),
        StudioRequest(
            "CreateDomain",
            {
                "DomainName": name,
                "AuthMode": "IAM",
                "VpcId": VPC,
                "SubnetIds": list(own.subnets),
                "AppNetworkAccessType": "VpcOnly",  # with this value, spaces can reach the file system
                "DefaultUserSettings": settings,
            },
        ),
    ]
    for user in users:
        found += [_profile(user), _space(cluster, user)]
    return found


def _profile(user: StudioUser) -> StudioRequest:
    body: dict[str, Any] = {"DomainId": DOMAIN, "UserProfileName": user.profile}
    if user.uid is not None and user.uid >= FIRST_UID:  # Studio accepts no lower uid
        body["UserSettings"] = {"CustomPosixUserConfig": {"Uid": user.uid, "Gid": user.uid}}
    return StudioRequest("CreateUserProfile", body)


def _space(cluster: Cluster, user: StudioUser) -> StudioRequest:
    files = [{"FSxLustreFileSystem": {"FileSystemId": FILE_SYSTEM}}] if has_files(cluster) else []
    resources = {"InstanceType": INSTANCE, "LifecycleConfigArn": CONFIG}
    return StudioRequest(
        "CreateSpace",
        {
            "DomainId": DOMAIN,
            "SpaceName": f"{cluster.name}-{user.profile}",
            "OwnershipSettings": {"OwnerUserProfileName": user.profile},
            "SpaceSharingSettings": {"SharingType": "Private"},
            "SpaceSettings": {
                "AppType": "CodeEditor",
                "CodeEditorAppSettings": {"DefaultResourceSpec": resources},
                **({"CustomFileSystems": files} if files else {}),
            },
        },
    )


def has_files(cluster: Cluster) -> bool:
    """Return whether the cluster has a file system that Studio can mount."""
    return any(each.type == "lustre" for each in cluster.storage)


def lifecycle_text(cluster: Cluster) -> str:
    """Return the script that runs in a space when it starts."""
    own = settings_of(cluster)
    group = own.login_group if cluster.logins else own.controller_group
    return _LIFECYCLE.format(cluster=cluster.name, region=shlex.quote(own.region), group=shlex.quote(group))


def studio_script(cluster: Cluster, requests: list[StudioRequest], file_system: str) -> str:
    """Return studio.sh. `file_system` is the id of the file system; "" if `up` has not created it yet."""
    own = settings_of(cluster)
    config, domain, *others = (request.command(own.region) for request in requests)
    missing = "${1:?the id of the file system, fs-…: run \\`dalsegno up\\` first, or give it as the argument}"
    steps = []
    for request, command in zip(requests[2:], others, strict=True):
        profile = request.body.get("UserProfileName")
        asked = f"describe-user-profile --user-profile-name {profile}" if profile else ""
        asked = asked or f"describe-space --space-name {request.body.get('SpaceName')}"
        steps.append(f'if ! ask {asked} --domain-id "$domain" > /dev/null 2>&1; then\n{command}\nfi')
        steps.append(f"wait_for {asked}")
    return _SCRIPT.format(
        cluster=cluster.name,
        region=shlex.quote(own.region),
        subnet=shlex.quote(own.subnets[0]),
        files=f'files="{file_system or missing}"\n' if has_files(cluster) else "",
        config=config,
        domain=domain,
        steps="\n".join(steps),
    )


_SCRIPT = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}: attaches SageMaker Studio. It may run any number of times.
set -euo pipefail
ask() {{
  aws sagemaker "$@" --region {region} --output text
}}
wait_for() {{ # a describe command, until the status is InService
  for _ in $(seq 120); do
    case "$(ask "$@" --domain-id "$domain" --query Status)" in
      InService) return ;;
      *Fail*) break ;;
    esac
    sleep 5
  done
  echo "error: $* reports a failure, or takes longer than ten minutes" >&2
  exit 1
}}
{files}subnets=({subnet})
vpc="$(aws ec2 describe-subnets --region {region} --subnet-ids "${{subnets[0]}}" \\
  --query 'Subnets[0].VpcId' --output text)"

# The script that each space runs when it starts
name={cluster}-cluster
query="StudioLifecycleConfigs[?StudioLifecycleConfigName=='$name'].StudioLifecycleConfigArn | [0]"
config="$(ask list-studio-lifecycle-configs --query "$query")"
if [ "$config" = None ]; then
{config} > /dev/null
config="$(ask list-studio-lifecycle-configs --query "$query")"
fi

query="Domains[?DomainName=='{cluster}'].DomainId | [0]"
domain="$(ask list-domains --query "$query")"
if [ "$domain" = None ]; then
{domain} > /dev/null
domain="$(ask list-domains --query "$query")"
fi
wait_for describe-domain

{steps}
echo "Studio: https://$domain.studio.{region}.sagemaker.aws"
"""

_LIFECYCLE = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}. It runs in a Studio space when the space starts.
set -euo pipefail
for folder in /mnt/custom-file-systems/fsx_lustre/*; do
  if [ -d "$folder" ]; then ln -sfn "$folder" "$HOME/{cluster}-files"; fi
done
mkdir -p "$HOME/bin"
cat > "$HOME/bin/cluster" <<'END'
#!/bin/bash
# Opens a session on cluster {cluster}. It needs the session-manager-plugin of the AWS CLI.
set -euo pipefail
group={group}
arn="$(aws sagemaker describe-cluster --region {region} --cluster-name {cluster} --query ClusterArn --output text)"
instance="$(aws sagemaker list-cluster-nodes --region {region} --cluster-name {cluster} \\
  --instance-group-name-contains "$group" --query 'ClusterNodeSummaries[0].InstanceId' --output text)"
exec aws ssm start-session --region {region} --target "sagemaker-cluster:${{arn##*/}}_$group-$instance"
END
chmod 755 "$HOME/bin/cluster"
"""
