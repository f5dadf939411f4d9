"""What a target decides about Slurm: where files lie, who listens where, which machine stands behind a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paths:
    """Files and folders of the daemons. In slurmd's, Slurm puts the node's name for `%n`."""

    state_save_dir: str
    slurmctld_log: str
    slurmctld_pid: str
    slurmd_spool_dir: str  # every node's must exist before its slurmd starts
    slurmd_log: str
    slurmd_pid: str
    slurmdbd_log: str
    slurmdbd_pid: str
    munge_socket: str = ""  # "": the system's own
    tmp_dir: str = ""  # each node's own, where nodes share one /tmp: PMIx refuses to start where another has been

    @classmethod
    def under(cls, state_dir: str) -> Paths:
        """Everything of one cluster below one folder."""
        return cls(
            state_save_dir=f"{state_dir}/slurmctld",
            slurmctld_log=f"{state_dir}/log/slurmctld.log",
            slurmctld_pid=f"{state_dir}/run/slurmctld.pid",
            slurmd_spool_dir=f"{state_dir}/spool/%n",
            slurmd_log=f"{state_dir}/log/slurmd-%n.log",
            slurmd_pid=f"{state_dir}/run/slurmd-%n.pid",
            slurmdbd_log=f"{state_dir}/log/slurmdbd.log",
            slurmdbd_pid=f"{state_dir}/run/slurmdbd.pid",
            munge_socket=f"{state_dir}/run/munge.socket",
        )

    @classmethod
    def system(cls) -> Paths:
        """Where the distributions' packages put them: for machines that are nothing but cluster nodes."""
        return cls(
            state_save_dir="/var/lib/slurm/slurmctld",
            slurmctld_log="/var/log/slurm/slurmctld.log",
            slurmctld_pid="/run/slurmctld.pid",
            slurmd_spool_dir="/var/lib/slurm/slurmd",
            slurmd_log="/var/log/slurm/slurmd.log",
            slurmd_pid="/run/slurmd.pid",
            slurmdbd_log="/var/log/slurm/slurmdbd.log",
            slurmdbd_pid="/run/slurmdbd.pid",
        )


@dataclass(frozen=True)
class DaemonHost:
    """A machine that runs a daemon: its host name, and the address it is reached at where the name alone won't do."""

    name: str
    address: str = ""


@dataclass(frozen=True)
class DatabaseStorage:
    """The database behind slurmdbd. With a socket, start slurmdbd with MYSQL_UNIX_PORT set to it."""

    user: str
    password: str = ""
    database: str = "slurm_acct_db"
    socket: str = ""
    host: str = "127.0.0.1"
    port: int = 3306


@dataclass(frozen=True)
class Dbd:
    """Where slurmdbd listens, and its database."""

    host: DaemonHost
    storage: DatabaseStorage
    port: int = 6819


@dataclass(frozen=True)
class NodePlace:
    """The machine behind a node name. Empty: the name itself, Slurm's port, /dev/nvidia0 and on."""

    address: str = ""
    hostname: str = ""
    port: int = 0
    gpu_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cgroups:
    """How cgroup.conf is to be. `constrain` names what Slurm holds jobs to: cores, memory, devices."""

    mountpoint: str = ""  # "": /sys/fs/cgroup
    plugin: str = ""  # "", cgroup/v1, cgroup/v2, or none: Slurm keeps away from cgroups
    constrain: tuple[str, ...] = ()
    ignore_systemd: bool = False  # inside a virtual host there is none to ask


@dataclass(frozen=True)
class Programs:
    """Programs Slurm starts: around jobs (as root on every node of the job), for health, for mail."""

    prolog: str = ""
    epilog: str = ""
    health_check: str = ""
    health_check_interval_s: int = 300
    mail: str = ""


@dataclass(frozen=True)
class Spank:
    """Our plugin for container jobs: where its plugstack.conf is, the plugin itself, and what it is told."""

    conf: str
    plugin: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeouts:
    """In seconds; None leaves Slurm's own."""

    slurmctld_s: int | None = None  # until the backup takes over; 5 where there is a backup
    message_s: int | None = None
    kill_wait_s: int | None = None
    min_job_age_s: int | None = None
    credential_s: int | None = None  # also how long a requeued job waits: Slurm's own is 120


@dataclass(frozen=True)
class Layout:
    """One cluster's places. `controllers` are slurmctld's hosts, the primary first."""

    paths: Paths
    controllers: tuple[DaemonHost, ...]
    places: Mapping[str, NodePlace] = field(default_factory=dict)
    dbd: Dbd | None = None  # None: no accounting
    spec: str = "cluster.yaml"
    slurm_user: str = "root"
    slurmd_user: str = "root"
    slurmctld_port: int = 6817
    slurmd_port: int = 6818
    proctrack: str = "cgroup"  # or linuxproc
    task_plugin: str = "task/none"
    cgroups: Cgroups = field(default_factory=Cgroups)
    overrides: bool = False  # nodes may claim more than the machine has
    own_address_only: bool = False  # listen where the machine's own host name resolves to, not on all addresses
    tree_width: int | None = None
    programs: Programs = field(default_factory=Programs)
    spank: Spank | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    submit_hosts: Mapping[str, str] = field(default_factory=dict)  # hosts that run srun but no slurmd: their addresses

    def place(self, node: str) -> NodePlace:
        return self.places.get(node, NodePlace())
