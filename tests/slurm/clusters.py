"""Example clusters and layouts for the golden files."""

from __future__ import annotations

from dalsegno.slurm.layout import (
    Cgroups,
    DaemonHost,
    DatabaseStorage,
    Dbd,
    Layout,
    NodePlace,
    Paths,
    Programs,
    Timeouts,
)
from dalsegno.spec.facts import Account, Cluster, Node, Partition, Priority, Qos, Reservation, Slurm, Switch, User


def nodes(prefix: str, count: int, **facts: object) -> tuple[Node, ...]:
    shape: dict[str, object] = {"cpus": 4, "memory_mib": 8000, **facts}
    return tuple(Node(name=f"{prefix}{number}", **shape) for number in range(1, count + 1))  # type: ignore[arg-type]


def names(some: tuple[Node, ...]) -> tuple[str, ...]:
    return tuple(node.name for node in some)


def _smallest() -> tuple[Cluster, Layout]:
    one = nodes("n", 1)
    cluster = Cluster("tiny", "ssh", one, (Partition("main", names(one), default=True),), slurm=Slurm(accounting=False))
    return cluster, Layout(Paths.system(), (DaemonHost("head"),))


def _shared() -> tuple[Cluster, Layout]:
    """Return loopback nodes with GPUs and two partitions that share them."""
    gpu = nodes("n", 256, cpus=192, memory_mib=2_000_000, gpus=8, gpu_type="h100", instance="p5.48xlarge")
    partitions = (
        Partition("train", names(gpu), default=True, time_limit_min=2880),
        Partition("debug", names(gpu)[:2], time_limit_min=30, max_nodes=1, priority_tier=10),
    )
    files = tuple(f"/run/ds/dev/nvidia{index}" for index in range(8))
    places = {node.name: NodePlace("127.0.0.1", "box", 17000 + at, files) for at, node in enumerate(gpu, 1)}
    layout = Layout(
        Paths.under("/home/ann/my clusters/lab"),
        (DaemonHost("box", "127.0.0.1"),),
        places,
        dbd=Dbd(
            DaemonHost("localhost", "127.0.0.1"),
            DatabaseStorage("ann", socket="/home/ann/my clusters/lab/run/db.sock"),
            16819,
        ),
        slurm_user="ann",
        slurmd_user="ann",
        slurmctld_port=16817,
        proctrack="linuxproc",
        overrides=True,
    )
    return Cluster("lab", "local", gpu, partitions), layout


def _everything() -> tuple[Cluster, Layout]:
    train = nodes("train-", 4, cpus=96, memory_mib=1_100_000, gpus=8, gpu_type="a100", features=("nvlink", "efa"))
    spares = (
        Node("train-5", 96, 1_100_000, 8, "a100", features=("nvlink", "efa"), spare=True),
        Node("train-6", 96, 1_100_000, 8, "a100", features=("nvlink", "efa"), spare=True),
    )
    cpu = nodes("cpu-", 2, cpus=8, memory_mib=30_000, weight=5)
    everyone = (*train, *spares, *cpu)
    cluster = Cluster(
        "prod",
        "local",
        everyone,
        (
            Partition(
                "train",
                names((*train, *spares)),
                default=True,
                time_limit_min=4320,
                default_time_min=60,
                min_nodes=1,
                max_nodes=4,
                priority_tier=5,
                priority_factor=100,
                oversubscribe="NO",
                allow_accounts=("vision", "speech"),
                allow_groups=("research",),
                allow_qos=("high", "low"),
                preempt_mode="REQUEUE",
                extra={"gracetime": "30", "DefMemPerNode": "1000"},
            ),
            Partition("cpu", names(cpu), hidden=True, oversubscribe="FORCE:2", preempt_mode="SUSPEND"),
        ),
        slurm=Slurm(
            enforce=("associations", "limits", "qos"),
            backup_controller=True,
            priority=Priority(tres={"gres/gpu": 500}, favor_small=True, usage_reset="MONTHLY"),
            preempt_by="qos",
            preempt_mode="CANCEL",
            preempt_exempt_time_s=90,
            topology=(
                Switch("leaf1", nodes=("train-1", "train-2", "train-5")),
                Switch("leaf2", nodes=("train-3", "train-4", "train-6", "cpu-1", "cpu-2")),
                Switch("spine", switches=("leaf1", "leaf2")),
            ),
            qos=(
                Qos("low"),
                Qos("high", 1000, ("low",), "requeue", 1440, {"gres/gpu": 16}, 4, {"gres/gpu": 32}, 2.0),
            ),
            slurmd_timeout_s=30,
            extra={
                "schedulerparameters": "bf_window=4320",
                "SlurmctldDebug": "debug",
                "MailProg": "/opt/our tools/mail",
            },
        ),
        accounts=(
            Account("speech", "research", 3, ("low",), {"gres/gpu": 8}),
            Account("research", description="all of research"),
            Account("vision", "research"),
        ),
        users=(
            User("ann", ("vision", "speech"), "vision", 1001, 2, ("high", "low"), "low"),
            User("bob", ("vision",), "vision"),
            User("cem", ("vision",), "vision"),
            User("dee", ("research",), "research", admin=True),
        ),
        reservations=(
            Reservation(
                "upgrade", ("train-1", "train-2"), start="2030-01-01T00:00:00", duration_min=120, flags=("MAINT",)
            ),
            Reservation("class", (), 2, "cpu", users=("ann",), accounts=("vision",)),
        ),
    )
    places = {
        node.name: NodePlace(
            f"10.1.0.{10 + at}", gpu_files=tuple(f"/dev/ds/{node.name}/nvidia{g}" for g in range(node.gpus))
        )
        for at, node in enumerate(everyone, 1)
    }
    layout = Layout(
        Paths.under("/var/lib/dalsegno/clusters/prod"),
        (DaemonHost("head", "10.1.0.1"), DaemonHost("head-2", "10.1.0.2")),
        places,
        dbd=Dbd(
            DaemonHost("head", "10.1.0.1"), DatabaseStorage("slurm", "s3cret", "slurm_acct", host="10.1.0.1", port=3307)
        ),
        spec="/home/ann/prod.yaml",
        cgroups=Cgroups(plugin="cgroup/v1", constrain=("cores", "memory", "devices"), ignore_systemd=True),
        task_plugin="task/cgroup,task/affinity",
        own_address_only=True,
        tree_width=64,
        programs=Programs("/opt/ds/prolog", "/opt/ds/epilog", "", "/opt/ds/health check", 60, "/bin/true"),
        timeouts=Timeouts(message_s=20, kill_wait_s=10, min_job_age_s=600, credential_s=30),
    )
    return cluster, layout


CLUSTERS = {"smallest": _smallest(), "shared": _shared(), "everything": _everything()}
