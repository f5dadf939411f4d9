#!/bin/bash
# Written by Dal Segno for cluster demo. HyperPod runs it on each new instance; running it again changes nothing.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
resources="${SAGEMAKER_RESOURCE_CONFIG_PATH:-/opt/ml/config/resource_config.json}"
log="${DALSEGNO_PROVISION_LOG:-/var/log/provision/provisioning.log}"
mkdir -p "$(dirname "$log")"
exec > >(tee -a "$log") 2>&1
fail() {
  echo "dalsegno: $*" >&2
  exit 1
}
[ -r "$resources" ] || fail "$resources cannot be read: is this an instance of HyperPod?"

# The instance group that has one of this machine's addresses, its role, and the address of the controller.
facts="$(python3 -I - "$resources" "$here/roles.json" "$(hostname -I)" <<'END_OF_FACTS'
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
[ "$role" != - ] || fail "instance group $group is not in roles.json: run \`dalsegno up\` again"
echo "dalsegno: instance group $group, role $role, controller $controller"

mount_shared() {  # TYPE SOURCE MOUNT-POINT OPTIONS
  mkdir -p "$3"
  if mountpoint -q "$3"; then return; fi  # HyperPod mounts the file systems that are in the request
  grep -qsF "$2 $3 " /etc/fstab || echo "$2 $3 $1 $4 0 0" >> /etc/fstab
  for attempt in 1 2 3 4 5; do
    mount -t "$1" -o "$4" "$2" "$3" && break
    echo "dalsegno: mounting $3 failed, attempt $attempt of 5"
    sleep "${DALSEGNO_RETRY_S:-10}"
  done
  mountpoint -q "$3" || fail "$2 cannot be mounted at $3: check the security group of the file system"
}
mount_shared lustre fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com@tcp:/abcdefgh /fsx noatime,flock,_netdev
if [ "$group" = controller ]; then
  systemctl disable --now slurmd 2> /dev/null || true
  systemctl enable --now slurmctld
else
  mkdir -p /etc/systemd/system/slurmd.service.d
  printf '[Service]\nEnvironment="SLURMD_OPTIONS=--conf-server %s"\n' "$controller" \
    > /etc/systemd/system/slurmd.service.d/dalsegno.conf
  systemctl disable --now slurmctld 2> /dev/null || true
  systemctl daemon-reload
  systemctl enable --now slurmd
fi

export DALSEGNO_HEAD="$controller"
bash "$here/bootstrap-$(tr '[:upper:]' '[:lower:]' <<< "$role").sh"
if grep -qsF '# begin of Dal Segno' /opt/slurm/etc/plugstack.conf; then
  /opt/dalsegno/python -I /opt/dalsegno/current/dalsegno/programs.py hyperpod-containers off "$role"
fi
echo "dalsegno: $(hostname -s) is set up"
