"""The Slurm settings that a target decides: paths, addresses, ports, and the machine of each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Paths:
    """The files and folders of the daemons. In slurmd's paths, Slurm replaces `%n` with the node's name."""

    state_save_dir: str
    slurmctld_log: str
    slurmctld_pid: str
    slurmd_spool_dir: str  # must exist on every node before its slurmd starts
    slurmd_log: str
    slurmd_pid: str
    slurmdbd_log: str
    slurmdbd_pid: str
    munge_socket: str = ""  # "" means the system's default
    tmp_dir: str = ""  # a folder per node if nodes share /tmp, because PMIx does not start in a folder of another node

    @classmethod
    def under(cls, state_dir: str) -> Paths:
        """Return the paths of a cluster below one folder."""
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
        """Return the paths that distribution packages use, for machines that are dedicated cluster nodes."""
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
    """A machine that runs a daemon. `address` is needed if the host name does not resolve."""

    name: str
    address: str = ""


@dataclass(frozen=True)
class DatabaseStorage:
    """The database that slurmdbd uses. If `socket` is set, start slurmdbd with MYSQL_UNIX_PORT set to that path."""

    user: str
    password: str = ""
    database: str = "slurm_acct_db"
    socket: str = ""
    host: str = "127.0.0.1"
    port: int = 3306


@dataclass(frozen=True)
class Dbd:
    """The host and port of slurmdbd, and its database."""

    host: DaemonHost
    storage: DatabaseStorage
    port: int = 6819


@dataclass(frozen=True)
class NodePlace:
    """The machine of a node. Empty fields mean the node's name, the default port, and /dev/nvidia0, /dev/nvidia1, …"""

    address: str = ""
    hostname: str = ""
    port: int = 0
    gpu_files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cgroups:
    """The settings of cgroup.conf. `constrain` lists what Slurm limits for jobs: cores, memory, devices."""

    mountpoint: str = ""  # where cgroups are mounted; "" means /sys/fs/cgroup
    plugin: str = ""  # CgroupPlugin: cgroup/v1, cgroup/v2, or "none" to use no cgroups; "" for Slurm's default
    constrain: tuple[str, ...] = ()
    ignore_systemd: bool = False  # set for virtual hosts, which have no systemd


@dataclass(frozen=True)
class Programs:
    """Programs that Slurm starts.

    Prolog and epilog run as root on every node of a job. The task prolog runs as the user, before every task.
    """

    prolog: str = ""
    epilog: str = ""
    task_prolog: str = ""
    health_check: str = ""
    health_check_interval_s: int = 300
    mail: str = ""
    contain: bool = False  # whether each job has a step to which its user's ssh sessions are added


@dataclass(frozen=True)
class Spank:
    """The SPANK plugin for container jobs: its plugstack.conf, the plugin file and its arguments."""

    conf: str
    plugin: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds. None means Slurm's default."""

    slurmctld_s: int | None = None  # time until the backup takes over; None: 5 s if there is a backup
    message_s: int | None = None
    kill_wait_s: int | None = None
    min_job_age_s: int | None = None
    credential_s: int | None = None  # lifetime of job credentials, which delays requeued jobs; Slurm's default is 120


@dataclass(frozen=True)
class Layout:
    """The layout of one cluster. `controllers` are slurmctld's hosts, the primary first."""

    paths: Paths
    controllers: tuple[DaemonHost, ...]
    places: Mapping[str, NodePlace] = field(default_factory=dict)
    dbd: Dbd | None = None  # settings of slurmdbd; None: no accounting
    spec: str = "cluster.yaml"
    slurm_user: str = "root"
    slurmd_user: str = "root"
    slurmctld_port: int = 6817
    slurmd_port: int = 6818
    proctrack: str = "cgroup"  # how Slurm tracks the processes of jobs: cgroup or linuxproc
    task_plugin: str = "task/none"
    cgroups: Cgroups = field(default_factory=Cgroups)
    overrides: bool = False  # whether nodes may declare more resources than the machine has
    own_address_only: bool = False  # whether to listen only on the address of the machine's host name
    tree_width: int | None = None
    programs: Programs = field(default_factory=Programs)
    spank: Spank | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    submit_hosts: Mapping[str, str] = field(default_factory=dict)  # host with srun but no slurmd -> its address

    def place(self, node: str) -> NodePlace:
        return self.places.get(node, NodePlace())
