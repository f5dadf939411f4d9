"""The plan of each host: what the head, the login nodes and the compute nodes must contain. Pure."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dalsegno.health.settings import FILE as HEALTH
from dalsegno.health.settings import settings_text
from dalsegno.observe.monitor_layout import MonitorLayout
from dalsegno.setup.inspect import HostFacts
from dalsegno.setup.node_plan import HostParts, NodePlan, PlannedFile, PlannedFolder, PlannedLink, content_digest
from dalsegno.slurm.layout import Cgroups, DaemonHost, DatabaseStorage, Dbd, Layout, NodePlace, Paths, Timeouts
from dalsegno.slurm.render import (
    render_cgroup_conf,
    render_gres_conf,
    render_plugstack_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
    render_topology_conf,
    restart_lines,
)
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster, Node, facts_to_json
from dalsegno.system.hosts import revision
from dalsegno.targets.accounting import DATABASE_SQL
from dalsegno.targets.folder import IDENTITY, LOGS, ClusterRole
from dalsegno.targets.ssh.directory import DirectorySecrets, directory_parts
from dalsegno.targets.ssh.folder import ClusterSecrets, SshStage, SshState, head_folder, state_text
from dalsegno.targets.ssh.logins import job_login_parts
from dalsegno.targets.ssh.monitoring import monitor_layout, monitor_parts
from dalsegno.targets.ssh.people import AssignedIds, assign_ids, known_hosts_lines, planned_groups, planned_users
from dalsegno.targets.ssh.programs import (
    container_parts,
    container_plugin,
    program_parts,
    slurm_programs,
    uses_pyxis,
    without_own_programs,
)
from dalsegno.targets.ssh.releases import DEBIAN, kinds_of, packages_for, slurm_version
from dalsegno.targets.ssh.repair import head_parts, node_parts, without_power
from dalsegno.targets.ssh.services import ServiceSite, compute_services, head_commands, head_services, munge, rest_parts
from dalsegno.targets.ssh.storage import storage_parts

ETC = "/etc/slurm"
RESERVED_MIB = 512  # memory for the system and our daemons, on a host whose memory the file does not give


@dataclass(frozen=True)
class ClusterOnHosts:
    """A cluster, and everything that the plans of its hosts depend on. `facts` has what each host reported about
    itself."""

    cluster: Cluster
    facts: Mapping[str, HostFacts]
    secrets: ClusterSecrets
    cluster_id: str
    codes: Mapping[str, str]  # host -> name of the folder in /opt/dalsegno with the code for its Python
    operator: str = ""
    before: AssignedIds = field(default_factory=AssignedIds)  # uids and gids of an earlier `up`
    directory: DirectorySecrets | None = None  # secrets of the LDAP directory; None without a directory

    @cached_property
    def ids(self) -> AssignedIds:
        return assign_ids(self.cluster, self.facts, self.before)

    @cached_property
    def addresses(self) -> dict[str, str]:
        return {host.name: host.address for host in self.cluster.ssh.hosts}

    @cached_property
    def sized(self) -> Cluster:
        """The cluster with the sizes of its machines, without nodes whose machine has never answered."""
        nodes = tuple(sized_node(node, self.facts[node.name]) for node in self.cluster.nodes if node.name in self.facts)
        known = {node.name for node in nodes}
        partitions = tuple(
            replace(part, nodes=tuple(name for name in part.nodes if name in known)) for part in self.cluster.partitions
        )
        return replace(self.cluster, nodes=nodes, partitions=tuple(part for part in partitions if part.nodes))

    @cached_property
    def own_containers(self) -> bool:
        """Whether container jobs use our plugin."""
        return bool(self.cluster.containers.enabled) and not uses_pyxis(self.cluster, self.facts)

    @cached_property
    def slurm(self) -> Version:
        return slurm_version(self.facts[self.cluster.head], self.cluster.ssh)

    @cached_property
    def layout(self) -> Layout:
        """The paths, addresses and settings that Slurm's files are rendered from. A machine's host name may differ from
        its node name."""
        cluster, name = self.sized, self.cluster.name
        head = DaemonHost(self.facts[cluster.head].hostname, self.addresses[cluster.head])
        database = DatabaseStorage("slurm", socket=str(head_folder(name).database_socket))
        tracked = tracks_with_cgroups([self.facts[node.name] for node in cluster.nodes])
        return Layout(
            paths=replace(
                Paths.system(),
                state_save_dir=f"/var/lib/slurm/slurmctld/{name}",
                slurmd_spool_dir=f"/var/lib/slurm/slurmd/{name}",
            ),
            controllers=(head,),
            places=self._places,
            dbd=Dbd(head, database) if cluster.slurm.accounting else None,
            spec=f"{name}'s cluster file",
            slurm_user="slurm",
            proctrack="cgroup" if tracked else "linuxproc",
            task_plugin="task/cgroup" if tracked and self._constrains else "task/none",
            programs=slurm_programs(cluster, ETC),
            spank=container_plugin(cluster, str(self.slurm), ETC) if self.own_containers else None,
            timeouts=Timeouts(credential_s=30),
            submit_hosts={
                self.facts[host].hostname: self.addresses[host]
                for host in (cluster.head, *cluster.logins)
                if host in self.facts
            },
        )

    @property
    def _places(self) -> dict[str, NodePlace]:
        """The address of each node. If any host name differs from its node name, the host names of all nodes are
        added."""
        own = {node.name: self.facts[node.name].hostname for node in self.sized.nodes}
        written = any(name != hostname for name, hostname in own.items())
        return {name: NodePlace(self.addresses[name], own[name] if written else "") for name in own}

    @property
    def _constrains(self) -> bool:
        """Return whether Slurm limits jobs to their cores, memory and devices. This needs systemd and cgroup v2 on all
        nodes."""
        return all(_has_delegation(self.facts[node.name]) for node in self.sized.nodes)

    def slurm_files(self, host: str) -> dict[str, str]:
        """Return the files that every host has in /etc/slurm, by name. Only cgroup.conf differs between hosts."""
        cluster, facts = self.sized, self.facts[host]
        plugin = f"cgroup/v{facts.cgroup_version}" if _can_track(facts) else "none" if facts.cgroup_version == 2 else ""
        held = ("cores", "memory", "devices") if self._constrains else ()
        layout = replace(self.layout, cgroups=Cgroups(plugin=plugin, constrain=held))
        files = {
            "slurm.conf": render_slurm_conf(without_own_programs(cluster), layout, self.slurm),
            "gres.conf": render_gres_conf(cluster, layout, self.slurm),
            "cgroup.conf": render_cgroup_conf(cluster, layout, self.slurm),
            HEALTH: settings_text(cluster.health),
            IDENTITY: f"{self.cluster_id}\n",
        }
        if self.own_containers:  # otherwise an installed Pyxis may have its own plugstack.conf
            files["plugstack.conf"] = render_plugstack_conf(cluster, layout, self.slurm)
        if cluster.slurm.topology:
            files["topology.conf"] = render_topology_conf(cluster, layout, self.slurm)
        return files

    @cached_property
    def monitor(self) -> MonitorLayout:
        return monitor_layout(self.sized, head_folder(self.cluster.name))

    def site(self, host: str) -> ServiceSite:
        files = self.slurm_files(host)
        parts = [*restart_lines(files["slurm.conf"]), *(files.get(f"{name}.conf", "") for name in _STRUCTURE)]
        return ServiceSite(
            self.sized,
            head_folder(self.cluster.name),
            self.addresses[self.cluster.head],
            self.facts[host].python_path,
            f"/opt/dalsegno/{self.codes[host]}",
            revision(*parts),
            content_digest(self.secrets.munge_key),
        )


_STRUCTURE = ("gres", "cgroup", "topology")  # Slurm's daemons must restart when one of these .conf files changes


def sized_node(node: Node, facts: HostFacts) -> Node:
    """Return the node with all its sizes. Those that the file does not give are taken from the machine."""
    return replace(
        node,
        cpus=node.cpus or facts.cpus,
        memory_mib=node.memory_mib or max(1, facts.memory_mib - RESERVED_MIB),
        gpus=node.gpus or len(facts.gpus),
    )


def _has_delegation(facts: HostFacts) -> bool:
    return facts.systemd and facts.cgroup_version == 2


def _can_track(facts: HostFacts) -> bool:
    return facts.cgroup_version == 1 or _has_delegation(facts)


def tracks_with_cgroups(hosts: Iterable[HostFacts]) -> bool:
    """Return whether Slurm can track the processes of jobs with cgroups on all these machines.

    With cgroup v2, slurmd needs systemd, or else folders that only our virtual hosts have.
    """
    return all(_can_track(facts) for facts in hosts)


def host_plan(on: ClusterOnHosts, host: str) -> NodePlan:
    """Return the plan of one host."""
    cluster, facts = on.sized, on.facts[host]
    site, debian = on.site(host), facts.os_id in DEBIAN
    launcher = [facts.python_path, "-I", "/opt/dalsegno/current/dalsegno/programs.py"]
    parts = HostParts()
    if on.directory:  # the directory comes first, because Slurm looks up users in it
        parts = directory_parts(cluster, host, on.facts, on.ids, on.directory, launcher)
    parts += storage_parts(cluster, host, on.addresses, debian=debian) + _role(on, host)
    if on.own_containers:
        parts += container_parts(str(on.slurm), debian=debian, launcher=launcher)
    if cluster.monitoring.prometheus:
        parts += monitor_parts(on.monitor, host, on.secrets, folder=site.folder, systemd=facts.systemd)
    if host == cluster.head and cluster.slurm.rest:
        package = "slurmrestd" if debian else "slurm-slurmrestd"
        parts += rest_parts(site, on.slurm, package, systemd=facts.systemd)
    if host == cluster.head:
        parts += head_parts(site.folder, on.secrets.repair_key, cluster.ssh)
    elif host in {node.name for node in cluster.nodes}:
        parts += program_parts(cluster, host, ETC, launcher) + node_parts(on.secrets.repair_public)
        parts += job_login_parts(cluster, host, facts) if cluster.ssh.logins_need_job else HostParts()
    return NodePlan(
        cluster.name,
        on.cluster_id,
        host,
        packages=tuple(dict.fromkeys((*parts.packages, *cluster.ssh.packages))),
        users=planned_users(cluster, host, on.ids),
        groups=planned_groups(cluster, on.ids),
        folders=(*_folders(on, host), *parts.folders),
        files=(*_common_files(on, host), *parts.files),
        links=(
            PlannedLink(str(site.folder.etc), ETC),
            PlannedLink("/opt/dalsegno/current", on.codes[host]),
        ),
        bundle=on.codes[host],
        python=facts.python_path,
        commands=parts.commands,
        services=parts.services,
        mounts=parts.mounts,
    )


def _role(on: ClusterOnHosts, host: str) -> HostParts:
    """Return the parts of a host's plan that depend on its role."""
    if host == on.cluster.head:
        return _head(on)
    if any(node.name == host for node in on.sized.nodes):
        return _compute(on, host)
    return HostParts(_packages(on, host), services=(munge(on.site(host)),))


def _packages(on: ClusterOnHosts, host: str) -> tuple[str, ...]:
    return packages_for(on.facts[host], kinds_of(on.sized, host), on.cluster.ssh)


def _head(on: ClusterOnHosts) -> HostParts:
    cluster, host, folder = on.sized, on.cluster.head, head_folder(on.cluster.name)
    site, slurm, shown = on.site(host), ("slurm", "slurm"), replace(cluster, ssh=without_power(cluster.ssh))
    dbd_conf = render_slurmdbd_conf(cluster, on.layout, on.slurm) if cluster.slurm.accounting else ""
    version, role = str(on.slurm), ClusterRole.HEAD
    state = SshState(SshStage.UP, on.cluster_id, cluster.head, slurm_version=version, role=role, operator=on.operator)
    files = [
        PlannedFile(str(folder.state), state_text(state)),
        PlannedFile(str(folder.applied), json.dumps(facts_to_json(shown), indent=1)),
        PlannedFile(str(folder.metrics_token), on.secrets.metrics_token, 0o600, secret=True),
        *(
            PlannedFile(str(folder.agent_secret(node.name)), on.secrets.agents[node.name], 0o600, secret=True)
            for node in cluster.nodes
        ),
    ]
    folders = [
        PlannedFolder(f"/var/lib/slurm/slurmctld/{cluster.name}", 0o700, *slurm),
        PlannedFolder(str(folder.run)),
    ]
    if cluster.slurm.accounting:
        socket = f"MYSQL_UNIX_PORT={folder.database_socket}\n"
        files += [
            PlannedFile(f"{ETC}/slurmdbd.conf", dbd_conf, 0o600, *slurm),
            PlannedFile(str(folder.root / "database.sql"), DATABASE_SQL),
            PlannedFile(f"{_defaults(on.facts[host])}/slurmdbd", socket),
        ]
        folders.append(PlannedFolder(str(folder.database), 0o700, *slurm))
    return HostParts(
        _packages(on, host),
        tuple(folders),
        tuple(files),
        tuple(head_commands(site)),
        tuple(head_services(site, dbd_conf)),
    )


def _compute(on: ClusterOnHosts, host: str) -> HostParts:
    folder, secret = head_folder(on.cluster.name), on.secrets.agents[host]
    spool = PlannedFolder(f"/var/lib/slurm/slurmd/{on.cluster.name}", 0o755)
    watched = on.cluster.health.mode != "off"
    files = (PlannedFile(str(folder.agent_secret(host)), secret, 0o600, secret=True),) if watched else ()
    return HostParts(
        _packages(on, host),
        (spool,),
        files,
        services=tuple(compute_services(on.site(host), host, content_digest(secret))),
    )


def _folders(on: ClusterOnHosts, host: str) -> list[PlannedFolder]:
    folder, own = head_folder(on.cluster.name), ("munge", "munge")
    return [
        PlannedFolder(ETC),
        PlannedFolder("/etc/munge", 0o700, *own),
        PlannedFolder("/var/lib/munge", 0o711, *own),
        PlannedFolder("/var/log/munge", 0o700, *own),
        *([] if on.facts[host].systemd else [PlannedFolder("/run/munge", 0o755, *own)]),
        PlannedFolder("/var/log/slurm", 0o755, "slurm", "slurm"),
        PlannedFolder("/var/lib/slurm", 0o755, "slurm", "slurm"),
        PlannedFolder(LOGS),
        PlannedFolder(str(folder.root)),
        PlannedFolder(str(folder.secret), 0o700),
        PlannedFolder(str(folder.secret / "agents"), 0o700),
    ]


def _common_files(on: ClusterOnHosts, host: str) -> list[PlannedFile]:
    slurm = [PlannedFile(f"{ETC}/{name}", text) for name, text in on.slurm_files(host).items()]
    return [
        *slurm,
        PlannedFile("/etc/munge/munge.key", on.secrets.munge_key, 0o400, "munge", "munge", secret=True),
        PlannedFile("/etc/hosts", hosts_lines(on), block=True),
        PlannedFile("/etc/ssh/ssh_known_hosts", known_hosts_lines(on.cluster.ssh.hosts, on.facts), block=True),
        PlannedFile("/usr/local/bin/dalsegno", own_command(on.facts[host].python_path), 0o755),
    ]


def hosts_lines(on: ClusterOnHosts) -> str:
    """Return the lines for /etc/hosts.

    A line has a machine's IP address, its name in the cluster, and its host name. If a machine's address is a name, the
    machine has no line, because that name already resolves.
    """
    lines = []
    for name, address in on.addresses.items():
        if _is_address(address):
            # the host name without its domain
            own = on.facts[name].hostname.partition(".")[0] if name in on.facts else name
            lines.append(f"{address} {' '.join(dict.fromkeys((name, own)))}\n")
    return "".join(lines)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def own_command(python: str) -> str:
    """Return the `dalsegno` command that is installed on the hosts."""
    return (
        f"#!{python} -I\n# Written by Dal Segno.\nimport sys\n\n"
        'sys.path[:0] = ["/opt/dalsegno/current"]\n'
        "from dalsegno.cli.main import main\n\nmain()\n"
    )


def _defaults(facts: HostFacts) -> str:
    return "/etc/default" if facts.os_id in DEBIAN else "/etc/sysconfig"
