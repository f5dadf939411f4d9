"""The plans of machines on which the platform itself runs Slurm: what Dal Segno adds to head, login and compute nodes.

The platform's Slurm daemons, munge and file systems are not changed. The head creates the secrets, in a shared folder
that only root can read. So no script contains a secret. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.health.settings import FILE as HEALTH
from dalsegno.health.settings import settings_text
from dalsegno.health.slurm_programs import may_act_on_all, prolog_lines
from dalsegno.setup.bootstrap import HEAD, HOST, PYTHON
from dalsegno.setup.delivery import pinned_requirements
from dalsegno.setup.node_plan import (
    NodePlan,
    PlannedCommand,
    PlannedFile,
    PlannedFolder,
    PlannedGroup,
    PlannedLink,
    PlannedService,
    PlannedUser,
)
from dalsegno.spec.facts import Cluster, facts_to_json
from dalsegno.system.children import MARK
from dalsegno.system.hosts import revision
from dalsegno.targets.folder import IDENTITY, LOGS, ClusterFolder
from dalsegno.targets.sides import COMMAND
from dalsegno.targets.sides import PATH as USUAL_PATH
from dalsegno.wire.cloud_notice import CLOUD_FILE

HEAD_HOME = Path("/var/lib/dalsegno")
METRICS = "/var/lib/dalsegno/metrics"
SLURM_BIN = "/opt/slurm/bin"
PATH = f"{SLURM_BIN}:/opt/slurm/sbin:{USUAL_PATH}"
AGENTS_PORT, OBSERVER_PORT = 6870, 6871  # outside 6820 to 6829, which are the ports of ParallelCluster's slurmctld


@dataclass(frozen=True)
class ManagedSlurm:
    """A cluster whose platform has set up Slurm, and the paths of its files."""

    cluster: Cluster
    cluster_id: str
    code: str  # key of the archive with our code
    state_text: str  # the content of the state file on the head
    nodes: tuple[str, ...]  # all names that the platform gives its compute nodes
    etc: str = "/opt/slurm/etc"  # Slurm's files, which all machines share
    prolog: str = ""  # path of the prolog that the head writes for all nodes; "" if it writes none
    scratch: str = ""  # mount point of the local disks; "" if there are none
    cloud: str = ""  # content of CLOUD_FILE for node agents; "" if they do not read notices of the cloud
    pyxis: bool = False  # whether to enable the Enroot and Pyxis of the platform's image
    shared_homes: bool = False  # whether the head serves /home to all machines and creates the homes
    packages: tuple[str, ...] = field(
        default_factory=pinned_requirements
    )  # packages that pip installs if those bundled with our code do not fit the machine's Python

    @property
    def folder(self) -> ClusterFolder:
        return ClusterFolder(HEAD_HOME / "clusters" / self.cluster.name)

    @property
    def shared(self) -> str:
        """The folder with the secrets of the node agents."""
        return f"{self.etc}/dalsegno/agents"

    @property
    def env(self) -> dict[str, str]:
        conf = str(self.folder.slurm_conf)
        return {"PATH": PATH, "LC_ALL": "C.UTF-8", MARK: str(self.folder.root), "SLURM_CONF": conf}


def head_plan(site: ManagedSlurm) -> NodePlan:
    """Return the plan of the head: controller, observer, the secrets of node agents, and our additions to Slurm's
    settings."""
    cluster, folder = site.cluster, site.folder
    agents = str(folder.secret / "agents")
    token = str(folder.secret / "metrics-token")
    services = [_own(site, "controller", [str(folder.root), "--agents", f"{HEAD}:{AGENTS_PORT}"])]
    if cluster.monitoring.enabled:
        services.append(_own(site, "observer", _observer(site)))
    return NodePlan(
        cluster.name,
        site.cluster_id,
        HOST,
        folders=(
            *_folders(site),
            PlannedFolder(str(folder.run)),
            PlannedFolder(str(folder.secret), 0o700),
            PlannedFolder(f"{site.etc}/dalsegno", 0o700),
            PlannedFolder(site.shared, 0o700),
            *([PlannedFolder(str(Path(site.prolog).parent))] if site.prolog else []),
            *([PlannedFolder(f"{site.etc}/plugstack.conf.d")] if site.pyxis else []),
        ),
        files=(
            *_files(site),
            PlannedFile(str(folder.state), site.state_text),
            _applied(site),
            PlannedFile(f"{site.etc}/{HEALTH}", settings_text(cluster.health)),
            PlannedFile(f"{site.etc}/{IDENTITY}", f"{site.cluster_id}\n"),
            *([PlannedFile(f"{site.etc}/{CLOUD_FILE}", site.cloud)] if site.cloud else []),
            *([PlannedFile(site.prolog, prolog_text(site), 0o755)] if site.prolog else []),
            *(_pyxis_files(site) if site.pyxis else []),
        ),
        links=(*_links(site), PlannedLink(agents, site.shared)),
        users=planned_users(cluster),
        groups=planned_groups(cluster),
        bundle=site.code,
        python=PYTHON,
        commands=(
            _packages(site),
            PlannedCommand("creating the token of the metrics", ("/bin/sh", "-c", _TOKEN, token), creates=token),
            PlannedCommand(
                "creating the secrets of the node agents",
                (PYTHON, "-I", "-c", _SECRETS, "create", site.shared, *site.nodes),
                unless=(PYTHON, "-I", "-c", _SECRETS, "check", site.shared, *site.nodes),
            ),
        ),
        services=tuple(services),
    )


def compute_plan(site: ManagedSlurm) -> NodePlan:
    """Return the plan that all compute nodes share. Each machine fills in its own name."""
    watched = site.cluster.health.mode != "off"
    metrics = ["--metrics", METRICS] if site.cluster.monitoring.enabled else []
    cloud = ["--cloud", f"{site.etc}/{CLOUD_FILE}"] if site.cloud else []
    arguments = ["--node", HOST, "--controller", f"{HEAD}:{AGENTS_PORT}", "--secret", f"{site.shared}/{HOST}",
                 "--boot-id", "/proc/sys/kernel/random/boot_id", *metrics, *cloud]  # fmt: skip
    return NodePlan(
        site.cluster.name,
        site.cluster_id,
        HOST,
        folders=(
            *_folders(site),
            *([PlannedFolder(METRICS)] if metrics else []),
            *([PlannedFolder(path) for path in _enroot_folders(site)] if site.pyxis else []),
        ),
        files=(*_files(site), *([PlannedFile("/etc/enroot/enroot.conf", enroot_conf(site))] if site.pyxis else [])),
        links=_links(site),
        users=planned_users(site.cluster, make_homes=not site.shared_homes),
        groups=planned_groups(site.cluster),
        bundle=site.code,
        python=PYTHON,
        commands=(_packages(site),),
        services=(_own(site, "node-agent", arguments),) if watched else (),
    )


def login_plan(site: ManagedSlurm) -> NodePlan:
    """Return the plan of every login node: the command `dalsegno` and the facts of the cluster file, and no daemon.

    `run` and `bench` need the facts there, because Slurm does not know the instance types of the nodes. There is no
    state file, because the commands that manage the cluster run on the head.
    """
    return NodePlan(
        site.cluster.name,
        site.cluster_id,
        HOST,
        folders=_folders(site),
        files=(*_files(site), _applied(site)),
        links=_links(site),
        users=planned_users(site.cluster, make_homes=not site.shared_homes),
        groups=planned_groups(site.cluster),
        bundle=site.code,
        python=PYTHON,
        commands=(_packages(site),),
    )


def planned_users(cluster: Cluster, *, make_homes: bool = True) -> tuple[PlannedUser, ...]:
    """Return the accounts of the cluster file's users, with the uids that `with_uids` has assigned."""
    shared = next((each.mount for each in cluster.storage if each.home), "")
    return tuple(
        PlannedUser(
            user.name,
            user.uid,
            user.full_name,
            f"{shared}/{user.name}" if shared else "",
            ssh_keys=user.ssh_keys,
            make_home=make_homes,
        )
        for user in cluster.users
        if user.uid is not None
    )


def planned_groups(cluster: Cluster) -> tuple[PlannedGroup, ...]:
    """Return the groups of the cluster file. A group without a gid must already exist on the machines."""
    numbers = {group.name: group.gid for group in cluster.groups}
    named = dict.fromkeys([*numbers, *(name for user in cluster.users for name in user.groups)])
    return tuple(
        PlannedGroup(name, numbers.get(name), tuple(user.name for user in cluster.users if name in user.groups))
        for name in named
    )


def _folders(site: ManagedSlurm) -> tuple[PlannedFolder, ...]:
    return (PlannedFolder(LOGS), PlannedFolder(str(site.folder.root)))


def _files(site: ManagedSlurm) -> tuple[PlannedFile, ...]:
    return (PlannedFile(COMMAND, _command_text(), 0o755),)


def _applied(site: ManagedSlurm) -> PlannedFile:
    return PlannedFile(str(site.folder.applied), json.dumps(facts_to_json(site.cluster), indent=1))


def _links(site: ManagedSlurm) -> tuple[PlannedLink, ...]:
    return PlannedLink(str(site.folder.etc), site.etc), PlannedLink("/opt/dalsegno/current", site.code)


def _command_text() -> str:
    return (
        f"#!{PYTHON} -I\n# Written by Dal Segno.\nimport sys\n\n"
        'sys.path[:0] = ["/opt/dalsegno/current"]\n'
        "from dalsegno.cli.main import main\n\nmain()\n"
    )


def _packages(site: ManagedSlurm) -> PlannedCommand:
    """Return the command that installs our Python packages, unless the bundled ones work with the machine's Python."""
    folder = f"/opt/dalsegno/{site.code}"
    ask = f"import sys; sys.path[:0] = [{folder!r}]; import click, pydantic, yaml"
    # With -I, Python ignores a `pip.py` in the working folder and packages in root's home.
    pip = (PYTHON, "-I", "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder, *site.packages)
    return PlannedCommand("installing Python packages", pip, unless=(PYTHON, "-I", "-c", ask))


def _observer(site: ManagedSlurm) -> list[str]:
    monitoring = site.cluster.monitoring
    listen = f"{HEAD}:{OBSERVER_PORT}"
    arguments = [str(site.folder.root), "--listen", listen, "--compat", monitoring.compat]
    arguments += ["--interval", str(monitoring.interval_s)]
    return [*arguments, *(["--open-metrics"] if monitoring.open_metrics else [])]


def _own(site: ManagedSlurm, name: str, arguments: Sequence[str]) -> PlannedService:
    argv = (PYTHON, "-I", f"/opt/dalsegno/{site.code}/dalsegno/programs.py", name, *arguments)
    stamp = revision(argv, sorted(site.env.items()))
    return PlannedService(name, argv, f"{LOGS}/{name}.log", site.env, stamp, keep=True)


_TOKEN = 'umask 077; od -An -N32 -tx1 /dev/urandom | tr -d " \\n" > "$0.new" && mv "$0.new" "$0"'

# This program creates a secret for each node that has none, or checks that all nodes have one.
_SECRETS = """\
import os, secrets, sys
mode, folder, *nodes = sys.argv[1:]
missing = [node for node in nodes if not os.path.exists(os.path.join(folder, node))]
if mode == "check":
    sys.exit(bool(missing))
for node in missing:
    path = os.path.join(folder, node)
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.replace(path + ".new", path)
"""


def prolog_text(site: ManagedSlurm) -> str:
    """Return the script that checks a node before each job. It stops the job only if a check has failed.

    A failed prolog drains the node, and these platforms replace a drained node. All nodes have the same script, so the
    script checks nothing if recovery may only observe one of the nodes. With Pyxis, the script also creates the user's
    folders for Enroot.
    """
    bases = " ".join(_enroot_folders(site)) if site.pyxis else ""
    folders = (
        'case "${SLURM_JOB_UID:-}" in\n'
        "  '' | *[!0-9]*) ;;\n"
        "  *)\n"
        f"    for base in {bases}; do\n"
        "      # After a restart the disk is empty, and users may have created the folder, or a link, before us.\n"
        '      [ "$(stat -c %u:%F "$base" 2> /dev/null)" = 0:directory ] || continue\n'
        '      [ ! -L "$base/user-$SLURM_JOB_UID" ] || continue\n'
        '      install -d -m 0700 -o "$SLURM_JOB_UID" "$base/user-$SLURM_JOB_UID" || true\n'
        "    done\n"
        "    ;;\n"
        "esac\n"
    )
    return (
        "#!/bin/sh\n"
        f"# Written by Dal Segno for cluster {site.cluster.name}: checks the node before a job.\n"
        f"{folders if bases else ''}"
        f"{prolog_lines(COMMAND) if may_act_on_all(site.cluster) else ''}"
        "exit 0\n"
    )


def _enroot_folders(site: ManagedSlurm) -> tuple[str, ...]:
    return "/run/enroot", f"{site.scratch or '/var/lib'}/enroot"


def enroot_conf(site: ManagedSlurm) -> str:
    """Return Enroot's settings. Images and running containers are on the local disk, in a folder for each user."""
    run, data = _enroot_folders(site)
    return (
        f"# Written by Dal Segno for cluster {site.cluster.name}.\n"
        f"ENROOT_RUNTIME_PATH {run}/user-$(id -u)\n"
        "ENROOT_CONFIG_PATH ${HOME}/.config/enroot\n"
        f"ENROOT_CACHE_PATH {data}/user-$(id -u)/cache\n"
        f"ENROOT_DATA_PATH {data}/user-$(id -u)/data\n"
        f"ENROOT_TEMP_PATH {data}/user-$(id -u)\n"
        "ENROOT_SQUASH_OPTIONS -noI -noD -noF -noX -no-duplicates\n"
        "ENROOT_MOUNT_HOME n\n"
        "ENROOT_RESTRICT_DEV y\n"
        "ENROOT_ROOTFS_WRITABLE y\n"
    )


def _pyxis_files(site: ManagedSlurm) -> list[PlannedFile]:
    parts = f"{site.etc}/plugstack.conf.d"
    head = f"# Written by Dal Segno for cluster {site.cluster.name}.\n"
    plugin = "required /opt/slurm/lib/slurm/spank_pyxis.so runtime_path=/run/pyxis container_scope=job"
    return [
        PlannedFile(f"{site.etc}/plugstack.conf", f"{head}include {parts}/*.conf\n"),
        PlannedFile(f"{parts}/pyxis.conf", f"{head}{plugin}\n"),
    ]
