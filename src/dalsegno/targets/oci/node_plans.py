"""The plans of the HPC stack's machines, which list what Dal Segno adds to them, and the scripts that install it. Pure.

The stack runs Slurm. Its machines share no folder that only root can change, so the secrets of node agents are derived
from munge's key. Compute nodes get slurm.conf from slurmctld, and keep it in /run/slurm/conf.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from dalsegno.hardware.job_variables import JobVariable, variables_for
from dalsegno.health.settings import FILE as HEALTH
from dalsegno.health.settings import settings_text
from dalsegno.programs import HOST_LAUNCHER
from dalsegno.setup.bootstrap import PYTHON, BootstrapCode, CodeSource, render_bootstrap
from dalsegno.setup.node_plan import NodePlan, PlannedFile, PlannedFolder, PlannedLink, PlannedService
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.system.hosts import revision
from dalsegno.targets.cloud.agent_secrets import MUNGE_KEY, derive_command
from dalsegno.targets.cloud.node_plans import (
    HEAD_HOME,
    PATH,
    ManagedSlurm,
    compute_plan,
    head_plan,
    login_plan,
    prolog_text,
)
from dalsegno.targets.folder import LOGS, ClusterFolder, ClusterRole
from dalsegno.targets.oci.plan import AT_ONCE, OciStage, OciState
from dalsegno.targets.oci.users import users_script
from dalsegno.targets.oci.variables import settings_of, uses_rdma

ETC = "/etc/slurm"
CACHED_ETC = "/run/slurm/conf"  # where slurmd on a compute node stores the files that it gets from slurmctld
PROLOG = f"{ETC}/prolog.d/50-dalsegno.sh"  # the stack's slurm.conf has `Prolog=/etc/slurm/prolog.d/*`
PROFILE = "/etc/profile.d/dalsegno-rdma.sh"
# The folder of our scripts on the head node, by release. Release 3 exports /config to all machines.
FOLDERS = {"v2.10": "/opt/dalsegno-scripts", "v3": "/config/dalsegno"}
CUSTOM_ROLE = "/config/playbooks/roles/custom/tasks/main.yml"  # release 3 runs this file on each new node
CODE = "dalsegno.tar.gz"
_HEAD_ADDRESS = 'cat "$(dirname "$0")/controller"'


class MachineRole(Enum):
    """The kinds of machines that the stack creates. The values are names of scripts."""

    HEAD = "head"
    COMPUTE = "compute"
    LOGIN = "login"


class OciSlurm(ManagedSlurm):
    """A cluster of the HPC stack."""

    @property
    def shared(self) -> str:
        return f"{HEAD_HOME}/agents"


def site_of(cluster: Cluster, code: str) -> OciSlurm:
    """Return the values that the plans of the machines are made from. Node names are known only when the nodes run."""
    state = json.dumps(facts_to_json(OciState(OciStage.UP, role=ClusterRole.HEAD)), indent=1)
    return OciSlurm(cluster, f"oci-{cluster.name}", code, state, nodes=(), etc=ETC)


def role_plan(cluster: Cluster, role: MachineRole, code: str) -> NodePlan:
    """Return the plan of the machines of one role. `code` is the key of our code."""
    site = site_of(cluster, code)
    profile = _profile(cluster)
    if role is MachineRole.LOGIN:
        plan = login_plan(site)
    elif role is MachineRole.HEAD:
        plan = head_plan(site)
        own = (
            _service(site, "agent-secrets", site.cluster.name, site.shared),
            _service(site, "slurm-policy", str(site.folder.root)),
        )
        plan = replace(plan, services=(*plan.services, *own), files=(*plan.files, *_hook(cluster)))
    else:
        plan = _compute_plan(site)
    # Users and groups are left out, because they are in the stack's LDAP directory.
    return replace(plan, files=(*plan.files, *profile), users=(), groups=())


def _compute_plan(site: OciSlurm) -> NodePlan:
    plan, etc = compute_plan(site), str(site.folder.etc)
    own = [PlannedFile(f"{etc}/{HEALTH}", settings_text(site.cluster.health))]
    if site.cluster.health.mode != "off":
        own.append(PlannedFile(PROLOG, prolog_text(site), 0o755))
    return replace(
        plan,
        packages=(*plan.packages, *_container_packages(site.cluster)),
        folders=(*plan.folders, PlannedFolder(etc), PlannedFolder(site.shared, 0o700)),
        files=(*plan.files, *own),
        links=(*(link for link in plan.links if link.path != etc), _slurm_conf(etc)),
        commands=(*plan.commands, derive_command(site.cluster.name, site.shared)),
    )


def _container_packages(cluster: Cluster) -> tuple[str, ...]:
    """Return the packages that GPU containers need and the stack does not install (release 2.10 on Oracle Linux 8)."""
    own = settings_of(cluster)
    gpus = cluster.containers.enabled and any(node.gpus for node in cluster.nodes)
    return ("nvidia-container-toolkit",) if gpus and (own.stack_version, own.os) == ("v2.10", "ol8") else ()


def _slurm_conf(etc: str) -> PlannedLink:
    return PlannedLink(f"{etc}/slurm.conf", f"{CACHED_ETC}/slurm.conf")


def _service(site: OciSlurm, name: str, *arguments: str) -> PlannedService:
    argv = (PYTHON, "-I", f"/opt/dalsegno/{site.code}/dalsegno/programs.py", name, *arguments)
    return PlannedService(
        name, argv, f"{LOGS}/{name}.log", site.env, revision(argv, sorted(site.env.items())), keep=True
    )


# The variables of jobs


def job_environment(cluster: Cluster) -> tuple[JobVariable, ...]:
    """Return the NCCL and RDMA variables that the nodes' shape needs; none if the nodes are not in a cluster
    network."""
    return variables_for(cluster.nodes[0].instance) if uses_rdma(cluster) else ()


def profile_text(cluster: Cluster) -> str:
    """Return a file for /etc/profile.d that sets the variables of `job_environment`, unless the user has set them.

    sbatch and srun pass the variables of the login shell to jobs, and Pyxis passes them to containers.
    """
    lines = [f"# Written by Dal Segno for cluster {cluster.name}: NCCL and RDMA on {cluster.nodes[0].instance}."]
    for each in job_environment(cluster):
        lines += [f"# {each.reason}", f'export {each.name}="${{{each.name}-{each.value}}}"']
    return "".join(f"{line}\n" for line in lines)


def _profile(cluster: Cluster) -> list[PlannedFile]:
    return [PlannedFile(PROFILE, profile_text(cluster))] if job_environment(cluster) else []


# The scripts


def setup_files(cluster: Cluster, code: str) -> dict[str, str]:
    """Return the setup scripts by file name. The head node keeps them in a folder, with the archive of our code."""
    scripts = {
        f"{role.value}.sh": render_bootstrap(
            role_plan(cluster, role, code),
            BootstrapCode(CodeSource.BESIDE),
            _HEAD_ADDRESS,
            wait_for=MUNGE_KEY if role is MachineRole.COMPUTE else "",
        )
        for role in MachineRole
    }
    own = {"setup.sh": _SETUP, "node.sh": _NODE, "nodes.sh": _NODES}
    logins = "".join(f" {login_name(cluster)}/{MachineRole.LOGIN.value}" for _ in cluster.logins)
    return {
        **scripts,
        **{name: text.format(cluster=cluster.name, logins=logins) for name, text in own.items()},
        "users.sh": users_script(cluster),
        "accounts.sh": _accounts_script(cluster),
    }


def setup_digest(files: Mapping[str, str]) -> str:
    """Return a digest of the scripts. It changes with our code too, because the scripts name the code that they
    install."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()[:16]


def install_script(cluster: Cluster, files: Mapping[str, str], archive: bytes) -> str:
    """Return the script that root runs on the head node. It writes all scripts to their folder and runs `setup.sh
    head`."""
    folder = FOLDERS[settings_of(cluster).stack_version]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for name, data in {**{name: text.encode() for name, text in files.items()}, CODE: archive}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(data))
    return _INSTALL.format(folder=shlex.quote(folder), packed=base64.encodebytes(packed.getvalue()).decode())


def login_name(cluster: Cluster) -> str:
    """Return the name that the stack gives its login node."""
    return f"{cluster.name}-login"


def node_command(cluster: Cluster, node: str, role: MachineRole) -> list[str]:
    """Return the command that sets up a node. The login user runs it on the head node."""
    return ["bash", f"{FOLDERS[settings_of(cluster).stack_version]}/node.sh", node, role.value]


def users_command(cluster: Cluster) -> list[str]:
    """Return the command, to run on the head node, that adds the users of the cluster file to the stack's LDAP
    directory."""
    return ["bash", f"{FOLDERS[settings_of(cluster).stack_version]}/users.sh"]


def accounts_command(cluster: Cluster) -> list[str]:
    """Return the command, to run on the head node, that adds accounts, users and QOS to Slurm's accounting."""
    return ["bash", f"{FOLDERS[settings_of(cluster).stack_version]}/accounts.sh"]


def _accounts_script(cluster: Cluster) -> str:
    folder = ClusterFolder(HEAD_HOME / "clusters" / cluster.name)
    argv = [*HOST_LAUNCHER, "slurm-policy", str(folder.root), "--accounts"]
    words = {"PATH": PATH, "SLURM_CONF": str(folder.slurm_conf)}
    env = shlex.join(["env", *(f"{name}={value}" for name, value in words.items())])
    return _ACCOUNTS.format(cluster=cluster.name, env=env, program=shlex.join(argv))


def _hook(cluster: Cluster) -> list[PlannedFile]:
    """Return the Ansible task that sets up each new node.

    Release 2.10 has no such hook, so there the next `up` sets up new nodes.
    """
    if settings_of(cluster).stack_version != "v3":
        return []
    # This role runs before Slurm and munge are installed, so the script waits for munge's key in the background.
    task = (
        "- name: Install Dal Segno\n"
        f"  ansible.builtin.command: systemd-run --collect --unit=dalsegno-setup bash {FOLDERS['v3']}/setup.sh node\n"
        "  failed_when: false\n"
    )
    return [PlannedFile(CUSTOM_ROLE, task, block=True)]


_ACCOUNTS = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}: accounts, users and QOS of the cluster file in Slurm's accounting.
# Run it on the controller as the user that may use sudo, after users.sh. It may run any number of times.
set -euo pipefail
exec sudo {env} {program}
"""

_INSTALL = """\
#!/bin/bash
# Written by Dal Segno. It installs the scripts for the machines of the cluster, and sets up the controller.
# Run it as root on the controller. It may run any number of times.
set -euo pipefail
umask 022
rm -rf {folder}.new
mkdir -p {folder}.new
base64 -d <<'END_OF_FOLDER' | tar -xzf - --no-same-owner -C {folder}.new
{packed}END_OF_FOLDER
rm -rf {folder}
mv {folder}.new {folder}
exec bash {folder}/setup.sh head
"""

_SETUP = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}: setup.sh head|compute|login|node. It may run any number of times.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
role="${{1:?head, compute, login or node}}"
if [ "$role" = node ]; then
  # The stack tags its login nodes.
  tags=http://169.254.169.254/opc/v2/instance/freeformTags
  login="$(curl -fsL --retry 5 -H 'Authorization: Bearer Oracle' "$tags/login" || true)"
  if [ "$login" = true ]; then role=login; else role=compute; fi
fi
if ! compgen -G '/usr/bin/python3.1[0-9]' > /dev/null; then
  # Oracle Linux 8 has Python 3.6, which is too old for Dal Segno.
  dnf install -y -q python3.11 python3.11-pip
fi
if [ "$role" = head ]; then
  hostname -I | cut -d ' ' -f 1 > "$here/controller"
fi
exec bash "$here/$role.sh"
"""

_NODE = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}: node.sh NODE ROLE sets up a node from the controller, over ssh.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
node="${{1:?the name of a node}}"
role="${{2:?compute or login}}"
tar -C "$here" -czf - setup.sh "$role.sh" controller {code} \\
  | ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -- "$node" \\
    "work=\\$(mktemp -d) && trap 'rm -rf \\$work' EXIT && tar -xzf - -C \\$work && sudo bash \\$work/setup.sh $role"
""".replace("{code}", CODE)

_NODES = """\
#!/bin/bash
# Written by Dal Segno for cluster {cluster}: set up all nodes in Slurm and the login node, for people without `up`.
# Run it on the controller as its login user, after install.sh. It may run any number of times.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
PATH="$PATH:{path}"
nodes="$(sinfo --noheader --Node --format %N | sort -u | sed -n 's|..*|&/compute|p')"
failed=''
running=()
finish() {{ # wait for the oldest set-up
  local machine="${{running[0]%%:*}}" id="${{running[0]##*:}}"
  running=("${{running[@]:1}}")
  if wait "$id"; then echo "$machine is set up"; else failed="$failed $machine"; fi
}}
for machine in $nodes{logins}; do
  if [ "${{#running[@]}}" -ge {at_once} ]; then finish; fi
  bash "$here/node.sh" "${{machine%/*}}" "${{machine#*/}}" < /dev/null > /dev/null &
  running+=("$machine:$!")
done
while [ "${{#running[@]}}" -gt 0 ]; do finish; done
if [ -n "$failed" ]; then
  echo "not set up:$failed. Read /var/log/dalsegno/bootstrap.log there, then run this script again." >&2
  exit 1
fi
""".replace("{path}", PATH).replace("{at_once}", str(AT_ONCE))
