"""The files that HyperPod's instances get from S3: the lifecycle script, its data, and a bootstrap script for each
role.

HyperPod runs `on_create.sh` once on each instance, when the instance is created or replaced, but not when it reboots.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.setup.machine_record import BEGIN
from dalsegno.spec.facts import Cluster
from dalsegno.targets.hyperpod.answers import SharedFileSystem, SlurmRole
from dalsegno.targets.hyperpod.requests import ENTRY, planned_groups, settings_of

PROVISIONING = "provisioning_parameters.json"
SCHEMA = "provisioning_parameters.schema.json"  # name of a file beside this module
ROLES = "roles.json"
CODE = "dalsegno.tar.gz"
PLUGSTACK = "/opt/slurm/etc/plugstack.conf"
RESOURCES = "/opt/ml/config/resource_config.json"  # HyperPod's description of the cluster; on every instance


def provisioning_parameters(cluster: Cluster, shared: Sequence[SharedFileSystem]) -> dict[str, Any]:
    """Return provisioning_parameters.json. First-generation clusters configure Slurm from it."""
    own = settings_of(cluster)
    groups = planned_groups(cluster)
    parameters: dict[str, Any] = {
        "version": "1.0.0",
        "workload_manager": "slurm",
        "controller_group": own.controller_group,
        "worker_groups": [
            {"instance_group_name": each.name, "partition_name": each.partition}
            for each in groups
            if each.role is SlurmRole.COMPUTE
        ],
    }
    if cluster.logins:
        parameters["login_group"] = own.login_group
    for each in shared:
        if each.lustre and "fsx_dns_name" not in parameters:
            parameters |= {"fsx_dns_name": each.dns_name, "fsx_mountname": each.mount_name}
        elif not each.lustre:
            parameters["fsx_openzfs_dns_name"] = each.dns_name
    check_parameters(parameters, [each.name for each in groups])
    return parameters


def check_parameters(parameters: Mapping[str, Any], groups: Sequence[str]) -> None:
    """Raise an error if the parameters name an instance group that the cluster does not have. The instances would fail
    at boot."""
    named = [parameters["controller_group"], *([parameters["login_group"]] if "login_group" in parameters else [])]
    named += [each["instance_group_name"] for each in parameters["worker_groups"]]
    unknown = [name for name in named if name not in groups]
    if unknown:
        raise TargetError(
            f"{PROVISIONING} names the instance group `{unknown[0]}`, which the cluster does not have",
            hint=f"groups of the cluster: {', '.join(groups)}",
        )


def lifecycle_files(
    cluster: Cluster, shared: Sequence[SharedFileSystem], bootstraps: Mapping[SlurmRole, str], code: bytes
) -> dict[str, bytes]:
    """Return all files of the lifecycle folder by name. `bootstraps` has the script of each role; `code` is the archive
    with our code."""
    own = settings_of(cluster)
    files = {
        ENTRY: render_entry(cluster, shared),
        ROLES: json.dumps(group_roles(cluster), indent=1) + "\n",
        **{bootstrap_name(role): text for role, text in bootstraps.items()},
    }
    if own.configuration == "provisioning":
        files[PROVISIONING] = json.dumps(provisioning_parameters(cluster, shared), indent=1) + "\n"
    return {**{name: text.encode() for name, text in files.items()}, CODE: code}


def group_roles(cluster: Cluster) -> dict[str, str]:
    """Return the role of each instance group."""
    return {each.name: each.role.value for each in planned_groups(cluster)}


def bootstrap_name(role: SlurmRole) -> str:
    return f"bootstrap-{role.value.lower()}.sh"


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the digest of each file. A later plan compares them to find changed files."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def render_entry(cluster: Cluster, shared: Sequence[SharedFileSystem]) -> str:
    """Return the script on_create.sh, which finds the role of its instance and runs the bootstrap script of that
    role."""
    own = settings_of(cluster)
    first_generation = own.configuration == "provisioning"
    return _ENTRY.format(
        cluster=cluster.name,
        resources=RESOURCES,
        roles=ROLES,
        mounts="\n".join(_mount(each) for each in shared),
        daemons=_DAEMONS.format(controller=shlex.quote(own.controller_group)) if first_generation else "",
        containers=_containers(cluster),
    )


def _mount(shared: SharedFileSystem) -> str:
    if shared.lustre:
        kind, source, options = "lustre", f"{shared.dns_name}@tcp:/{shared.mount_name}", "noatime,flock,_netdev"
    else:
        kind, source, options = "nfs", f"{shared.dns_name}:/fsx", "nfsvers=4.2,nconnect=16,noatime,_netdev"
    return f"mount_shared {kind} {shlex.quote(source)} {shlex.quote(shared.mount)} {options}"


def _containers(cluster: Cluster) -> str:
    """Return the lines that set up containers on an instance, or remove what an earlier script has set up."""
    own = cluster.containers
    program = "/opt/dalsegno/python -I /opt/dalsegno/current/dalsegno/programs.py hyperpod-containers"
    if own.enabled:
        return f'{program} on "$role"' + (f" {shlex.quote(own.folder)}" if own.folder else "")
    return f'if grep -qsF {shlex.quote(BEGIN)} {PLUGSTACK}; then\n  {program} off "$role"\nfi'


_ENTRY = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}. HyperPod runs it on each new instance; running it again changes nothing.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
resources="${{SAGEMAKER_RESOURCE_CONFIG_PATH:-{resources}}}"
log="${{DALSEGNO_PROVISION_LOG:-/var/log/provision/provisioning.log}}"
mkdir -p "$(dirname "$log")"
exec > >(tee -a "$log") 2>&1
fail() {{
  echo "dalsegno: $*" >&2
  exit 1
}}
[ -r "$resources" ] || fail "$resources cannot be read: is this an instance of HyperPod?"

# The instance group that has one of this machine's addresses, its role, and the address of the controller.
facts="$(python3 -I - "$resources" "$here/{roles}" "$(hostname -I)" <<'END_OF_FACTS'
import json, sys
groups = json.load(open(sys.argv[1]))["InstanceGroups"]
roles, own = json.load(open(sys.argv[2])), sys.argv[3].split()
group, role, controller = "", "", ""
for each in groups:
    for instance in each["Instances"]:
        if instance.get("CustomerIpAddress") in own:
            group, role = each["Name"], roles.get(each["Name"], "")
        if roles.get(each["Name"]) == "Controller":
            controller = instance.get("CustomerIpAddress", "")
print(group or "-", role or "-", controller or "-")
END_OF_FACTS
)"
read -r group role controller <<< "$facts"
[ "$group" != - ] || fail "no instance group in $resources has one of the addresses $(hostname -I)"
[ "$role" != - ] || fail "instance group $group is not in {roles}: run \\`dalsegno up\\` again"
echo "dalsegno: instance group $group, role $role, controller $controller"

mount_shared() {{  # TYPE SOURCE MOUNT-POINT OPTIONS
  mkdir -p "$3"
  if mountpoint -q "$3"; then return; fi  # HyperPod mounts the file systems that are in the request
  grep -qsF "$2 $3 " /etc/fstab || echo "$2 $3 $1 $4 0 0" >> /etc/fstab
  for attempt in 1 2 3 4 5; do
    mount -t "$1" -o "$4" "$2" "$3" && break
    echo "dalsegno: mounting $3 failed, attempt $attempt of 5"
    sleep "${{DALSEGNO_RETRY_S:-10}}"
  done
  mountpoint -q "$3" || fail "$2 cannot be mounted at $3: check the security group of the file system"
}}
{mounts}
{daemons}
export DALSEGNO_HEAD="$controller"
bash "$here/bootstrap-$(tr '[:upper:]' '[:lower:]' <<< "$role").sh"
{containers}
echo "dalsegno: $(hostname -s) is set up"
"""

# In first-generation clusters, the lifecycle script starts Slurm. In all other clusters, HyperPod's image starts it.
_DAEMONS = """\
if [ "$group" = {controller} ]; then
  systemctl disable --now slurmd 2> /dev/null || true
  systemctl enable --now slurmctld
else
  mkdir -p /etc/systemd/system/slurmd.service.d
  printf '[Service]\\nEnvironment="SLURMD_OPTIONS=--conf-server %s"\\n' "$controller" \\
    > /etc/systemd/system/slurmd.service.d/dalsegno.conf
  systemctl disable --now slurmctld 2> /dev/null || true
  systemctl daemon-reload
  systemctl enable --now slurmd
fi
"""
