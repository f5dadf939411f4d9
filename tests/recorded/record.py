"""Record the output of the installed Slurm for the parsers: `python -m tests.recorded.record FOLDER`, as root.

It creates a private cluster of 16 slurmd on loopback ports with slurmdbd and MariaDB, brings nodes and jobs into as
many states as one cluster can show, and writes each answer to FOLDER/slurm-VERSION/. slurm.md says what was done to
which node. It takes about two minutes, because Slurm checks time limits once a minute.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.slurm.parse.controller import ASSOC_ARGV, CONFIG_ARGV, DIAG_ARGV, PING_ARGV, QOS_ARGV, USER_ARGV
from dalsegno.slurm.parse.jobs import HISTORY_ARGV, JOBS_ARGV, TEXTS_ARGV, excluded_env, jobs_env
from dalsegno.slurm.parse.load import (
    FAIR_SHARE_ARGV,
    NODE_LOAD_ARGV,
    QUEUE_LOAD_ARGV,
    RESERVATIONS_ARGV,
    queue_load_env,
)
from dalsegno.slurm.parse.nodes import EVENTS_ARGV, NODES_ARGV, PARTITIONS_ARGV
from dalsegno.slurm.parse.partitions import PARTITION_SETTINGS_ARGV
from dalsegno.slurm.parse.text import PLAIN, TIME_ENV
from dalsegno.slurm.versions import Version

PORTS = {"slurmctld": 23517, "slurmdbd": 23519, "n1": 23600}
SLURM_CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={lab}/munge.socket,cred_expire=20
StateSaveLocation={lab}/slurmctld
SlurmdSpoolDir={lab}/spool/%n
SlurmctldPidFile={lab}/slurmctld.pid
SlurmdPidFile={lab}/slurmd-%n.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/slurmd-%n.log
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={slurmdbd}
AccountingStoragePass={lab}/munge.socket
AccountingStorageTRES=gres/gpu,gres/gpu:h100
AccountingStoreFlags=job_comment
JobAcctGatherType=jobacct_gather/linux
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=0
SlurmdTimeout=12
MinJobAge=3600
MailProg=/bin/true
MpiDefault=none
RebootProgram=/bin/true
ResumeTimeout=60
Epilog={lab}/epilog
DefMemPerCPU=2000
PriorityType=priority/multifactor
PriorityWeightAge=1000
PriorityWeightFairshare=10000
PriorityWeightPartition=1000
PriorityWeightQOS=100000
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,bf_continue
NodeName=cpu-01 NodeHostname={host} NodeAddr=127.0.0.1 Port={cpu} CPUs=8 Sockets=1 CoresPerSocket=8 RealMemory=16000
NodeName=DEFAULT CPUs=32 Sockets=2 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:h100:8
{nodes}
PartitionName=train Nodes=n[1-15] Default=YES MaxTime=2:00:00 DefaultTime=2:00:00
PartitionName=debug Nodes=n[1-2] MaxTime=10 DefaultTime=10
PartitionName=cpu Nodes=cpu-01
PartitionName=empty
"""
SLURMDBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={lab}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={slurmdbd}
SlurmUser=root
LogFile={lab}/log/slurmdbd.log
PidFile={lab}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""
EPILOG = """#!/bin/sh
[ "$SLURMD_NODENAME" != n7 ] || exec sleep 600
"""
SLEEP = "exec sleep 3600"


class Lab:
    """The cluster: a folder, and daemons that end with this process."""

    def __init__(self, folder: Path, daemons: ExitStack) -> None:
        self.folder, self.daemons = folder, daemons
        self.slurmd: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {"PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": f"{folder}/slurm.conf", **TIME_ENV}

    def start(self, *argv: str, **env: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "log" / f"{argv[0]}.out").open("ab")
        process = subprocess.Popen(argv, env={**self.env, **env}, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.daemons.callback(end, process)
        return process

    def run(self, *argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        environment = {**self.env, **env}
        return subprocess.run(argv, env=environment, capture_output=True, check=False, stdin=subprocess.DEVNULL)

    def ok(self, *argv: str) -> str:
        done = self.run(*argv)
        if done.returncode:
            sys.exit(f"{' '.join(argv)}: {done.stderr.decode()} (logs in {self.folder}/log)")
        return done.stdout.decode(errors="replace")

    def submit(self, name: str, *options: str, script: str = SLEEP) -> str:
        words = ("sbatch", "--parsable", f"--job-name={name}", "--output=/dev/null", *options, f"--wrap={script}")
        return self.ok(*words).strip()

    def states(self) -> dict[str, str]:
        """The state of each job, by name."""
        rows = self.ok("squeue", "--all", "-h", "--states=all", "-o", "%T %j").splitlines()
        return {row.partition(" ")[2]: row.partition(" ")[0] for row in rows if " " in row}

    def node(self, name: str) -> str:
        return self.ok("scontrol", "--oneliner", "show", "node", name)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def wait_for(what: str, ready: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out waiting until {what}")
        time.sleep(0.5)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# The cluster ------------------------------------------------------------------------------------------------


def write_files(lab: Lab, version: Version) -> None:
    folder = lab.folder
    for name in ("log", "slurmctld", "spool", "gpus", "db"):
        (folder / name).mkdir()
    for gpu in range(8):
        (folder / "gpus" / f"nvidia{gpu}").touch()
    names = {"lab": folder, "host": socket.gethostname(), "cpu": PORTS["n1"] + 15, **PORTS}
    nodes = [
        f"NodeName=n{at} NodeHostname={names['host']} NodeAddr=127.0.0.1 Port={PORTS['n1'] + at - 1}"
        + (" Feature=nvlink,efa" if at <= 2 else "")
        + (" State=DRAIN Reason=dalsegno:spare" if at == 11 else "")
        for at in range(1, 16)
    ]
    put(folder / "slurm.conf", SLURM_CONF.format(**names, nodes="\n".join(nodes)))
    put(folder / "slurmdbd.conf", SLURMDBD_CONF.format(**names), 0o600)
    # Since 23.11, slurmd loads a cgroup plugin whatever proctrack is set.
    put(folder / "cgroup.conf", "CgroupPlugin=disabled\n" if version >= Version(23, 11) else "CgroupAutomount=no\n")
    gpus = f"Name=gpu Type=h100 File={folder}/gpus/nvidia"
    put(folder / "gres.conf", f"NodeName=n[1-11,13-15] {gpus}[0-7]\nNodeName=n12 {gpus}[0-3]\n")
    put(folder / "epilog", EPILOG, 0o755)
    # slurmdbd of 26.05 cannot create the database itself with MariaDB 11.8.9: "Number of columns in result … exceeds
    # …".
    put(folder / "database.sql", "CREATE DATABASE IF NOT EXISTS slurm_acct;\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)


def put(path: Path, text: str, mode: int = 0o644) -> None:
    path.write_text(text)
    path.chmod(mode)


def start(lab: Lab) -> None:
    folder = lab.folder
    lab.start(
        "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
        f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/log/munged.log",
    )  # fmt: skip
    data = f"--datadir={folder}/db"
    lab.ok("mariadb-install-db", "--no-defaults", "--user=root", data, "--skip-test-db")
    lab.start(
        "mariadbd", "--no-defaults", "--user=root", data, f"--socket={folder}/db.socket", "--skip-networking",
        "--skip-grant-tables", f"--init-file={folder}/database.sql", f"--pid-file={folder}/db.pid",
    )  # fmt: skip
    wait_for("MariaDB answers", (folder / "db.socket").exists)
    lab.start("slurmdbd", "-D", MYSQL_UNIX_PORT=f"{folder}/db.socket")
    wait_for("slurmdbd answers", lambda: answers(PORTS["slurmdbd"]))
    # The cluster must be known before slurmctld starts; otherwise slurmctld 22.05 exits.
    add_cluster = ("sacctmgr", "-i", "add", "cluster", "lab")
    wait_for("the cluster is in the database", lambda: not lab.run(*add_cluster).returncode)
    lab.start("slurmctld", "-D")
    wait_for("slurmctld answers", lambda: b"is UP" in lab.run(*PING_ARGV).stdout)
    for words in (
        "add qos high priority=100",
        "add account vision parent=root fairshare=3",
        "add user root account=vision",
        "modify user root set defaultaccount=vision",
        "modify account root set qos=normal,high",
    ):
        lab.run("sacctmgr", "-i", *words.split())
    for name in (*(f"n{at}" for at in range(1, 16) if at != 13), "cpu-01"):
        lab.slurmd[name] = lab.start("slurmd", "-D", "-N", name)
    wait_for("all nodes have registered", lambda: all("State=IDLE " in lab.node(f"n{at}") for at in (1, 2, 6, 10, 15)))
    wait_for("the partition cpu is up", lambda: "State=IDLE " in lab.node("cpu-01"))


def make_states(lab: Lab) -> dict[str, str]:
    """Bring nodes and jobs into their states. Return the ids of the jobs."""
    jobs: dict[str, str] = {}

    def submit(name: str, *options: str, script: str = SLEEP) -> None:
        jobs[name] = lab.submit(name, *options, script=script)

    one_gpu = ("--cpus-per-task=4", "--gres=gpu:1")
    submit("done", "-w", "n10", script="true")
    submit("fail", "-w", "n10", script="exit 3")
    submit("signal", "-w", "n10", script="kill -9 $$")
    submit("timeout", "-w", "n10", "--time=1")
    submit("mixed", "-w", "n1", "--cpus-per-task=8", "--gres=gpu:2", "--qos=high", "--comment=a comment | with = signs")
    submit("alloc", "-w", "n2", "--exclusive", "--gres=gpu:8", "--mem=0")
    submit("draining", "-w", "n4", *one_gpu)
    submit("nodefail", "-w", "n6", "--no-requeue", *one_gpu)
    submit("requeued", "-w", "n10", "--requeue")
    submit("completing", "-w", "n7", script="sleep 2")
    submit("suspended", "-p", "cpu")
    submit("array", "-w", "n10", "--array=1-6%2", *one_gpu)
    het = ("--output=/dev/null", "-w", "n10", *one_gpu, ":", "-w", "n1", "-n1")
    jobs["het"] = lab.ok("sbatch", "--parsable", "--job-name=het", *het, f"--wrap={SLEEP}").strip()
    submit('odd name\n"quoted" JobState=RUNNING | é', "-w", "n10", "--hold")
    jobs["odd"] = jobs.popitem()[1]
    submit("held", "--hold", "-N2", "--gres=gpu:4", "--exclude=n[1-2]")
    submit("later", "--begin=now+2hours")
    submit("either", "--hold", "-p", "debug,train")
    submit("dependent", f"--dependency=afterok:{jobs['mixed']}")
    submit("cancelled", "-w", "n10")
    submit("cancelled-early", "--hold")
    running = ("mixed", "alloc", "draining", "nodefail", "requeued", "suspended", "cancelled", "timeout", "het")
    wait_for("jobs run", lambda: all(lab.states().get(name) == "RUNNING" for name in running))
    lab.ok("scontrol", "suspend", jobs["suspended"])
    lab.ok("scontrol", "requeue", jobs["requeued"])
    lab.ok("scancel", jobs["cancelled"], jobs["cancelled-early"])
    wait_for("a job completes", lambda: lab.states().get("completing") == "COMPLETING")
    reasons = {
        "n3": "dalsegno:replace:xid[79] GPU has fallen off the bus; State=IDLE",
        "n4": "dalsegno:drain:ecc[48] double bit",
    }
    for node, reason in reasons.items():
        lab.ok("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")
    lab.ok("scontrol", "update", "NodeName=n5", "State=DOWN", "Reason=power supply, ticket #123")
    end(lab.slurmd["n6"])
    for name, *flags in (("upgrade", "Flags=MAINT", "Nodes=n8"), ("class", "Nodes=n14")):
        when = ("StartTime=now", "Duration=120", "Users=root")
        lab.ok("scontrol", "create", "reservation", f"ReservationName={name}", *when, *flags)
    lab.ok("scontrol", "reboot", "n15")
    # At most three whole nodes are free at a time, so the backfill scheduler plans nodes for this job.
    submit("big", "-N4", "--gres=gpu:8")
    submit("small", "-p", "debug", "-w", "n2")
    ended = {"nodefail": "NODE_FAIL", "timeout": "TIMEOUT", "requeued": "RUNNING"}
    wait_for("jobs have ended", lambda: ended.items() <= lab.states().items(), 240)
    wait_for("n6 is lost", lambda: "NOT_RESPONDING" in lab.node("n6") or "DOWN*" in lab.node("n6"))
    wait_for("n15 did not come back", lambda: "DOWN" in lab.node("n15"))
    wait_for("nodes are planned for a job", lambda: "PLANNED" in lab.ok(*NODES_ARGV))
    return jobs


# The recordings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


def questions(jobs: Mapping[str, str]) -> dict[str, Question]:
    """Return the commands to run, by the name of the file for their output.

    squeue uses the plain separators, not random ones.
    """
    queue = jobs_env(PLAIN)
    return {
        "assoc": Question((*ASSOC_ARGV, "cluster=lab")),
        "config": Question(CONFIG_ARGV),
        "event": Question((*EVENTS_ARGV, "start=now-1days")),
        "job-missing": Question((*JOBS_ARGV, "--states=all", "--jobs=4711"), queue),
        "mpi": Question(("srun", "--mpi=list")),
        "node-missing": Question((*NODES_ARGV, "nope")),
        "nodes": Question(NODES_ARGV),
        "ping": Question(PING_ARGV),
        "qos": Question(QOS_ARGV),
        "reservations": Question(RESERVATIONS_ARGV),
        "sacct": Question(HISTORY_ARGV),
        "sacct-texts": Question(TEXTS_ARGV),
        "sdiag": Question(DIAG_ARGV),
        "partitions": Question(PARTITION_SETTINGS_ARGV),
        "sinfo": Question(PARTITIONS_ARGV),
        "sinfo-load": Question(NODE_LOAD_ARGV),
        "sinfo-words": Question(("sinfo", "-N", "-h", "-o", "%N %T %t")),
        "squeue": Question(JOBS_ARGV, queue),
        "squeue-all": Question((*JOBS_ARGV, "--states=all"), queue),
        "squeue-excluded": Question((*JOBS_ARGV, "--states=all", f"--jobs={jobs['held']}"), excluded_env(PLAIN)),
        "squeue-load": Question(QUEUE_LOAD_ARGV, queue_load_env(PLAIN)),
        "squeue-one": Question((*JOBS_ARGV, "--states=all", f"--jobs={jobs['mixed']}"), jobs_env(PLAIN, paths=True)),
        "sshare": Question(FAIR_SHARE_ARGV),
        "step-missing": Question(("scontrol", "show", "step", f"{jobs['done']}.0")),
        "user": Question(USER_ARGV),
        "version": Question(("sinfo", "--version")),
    }


def record(lab: Lab, questions: Mapping[str, Question], folder: Path, suffix: str = "") -> None:
    for name, question in questions.items():
        done = lab.run(*question.argv, **question.env)
        if done.stdout or not done.stderr:
            (folder / f"{name}{suffix}.txt").write_bytes(done.stdout)
        if done.stderr:
            (folder / f"{name}{suffix}.stderr.txt").write_bytes(done.stderr)


def stop(lab: Lab, daemons: Iterable[str]) -> None:
    for name in daemons:
        pid = int((lab.folder / f"{name}.pid").read_text())
        os.kill(pid, 9)
        wait_for(f"{name} ends", lambda port=PORTS[name]: not answers(port))  # type: ignore[misc]


def main() -> None:
    with ExitStack() as daemons:
        folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
        folder.chmod(0o755)
        lab = Lab(folder, daemons)
        version = Version.parse(lab.ok("slurmctld", "-V"))
        target = Path(sys.argv[1]) / f"slurm-{version}"
        target.mkdir(parents=True, exist_ok=True)
        write_files(lab, version)
        start(lab)
        asked = questions(make_states(lab))
        record(lab, asked, target)
        stop(lab, ("slurmctld", "slurmdbd"))
        record(lab, {name: asked[name] for name in ("ping", "sacct", "squeue")}, target, "-down")
        print(target)
    shutil.rmtree(folder)  # on a failure the folder is kept, because its logs show the cause


if __name__ == "__main__":
    main()
