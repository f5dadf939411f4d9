"""A client that runs Slurm's commands. A failed query raises an error, so that it never looks like an empty cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError, NotThere
from dalsegno.slurm.facts import AccountsInfo, JobInfo, NodeInfo
from dalsegno.slurm.names import free_text, job_id, node_list, word
from dalsegno.slurm.parse.controller import (
    ASSOC_ARGV,
    CONFIG_ARGV,
    DIAG_ARGV,
    PING_ARGV,
    QOS_ARGV,
    USER_ARGV,
    ControllerPing,
    Diagnostics,
    parse_accounts,
    parse_config,
    parse_diag,
    parse_ping,
)
from dalsegno.slurm.parse.jobs import (
    HISTORY_ARGV,
    JOBS_ARGV,
    TEXTS_ARGV,
    JobList,
    excluded_env,
    jobs_env,
    parse_excluded,
    parse_history,
    parse_jobs,
    parse_submitted,
)
from dalsegno.slurm.parse.load import (
    FAIR_SHARE_ARGV,
    NODE_LOAD_ARGV,
    QUEUE_LOAD_ARGV,
    RESERVATIONS_ARGV,
    NodeLoads,
    QueueLoad,
    ReservationInfo,
    parse_fair_shares,
    parse_node_loads,
    parse_queue_load,
    parse_reservations,
    queue_load_env,
)
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles
from dalsegno.slurm.parse.nodes import (
    EVENTS_ARGV,
    NODES_ARGV,
    PARTITIONS_ARGV,
    NodeEvent,
    NodeParser,
    PartitionInfo,
    parse_events,
    parse_nodes,
    parse_partitions,
)
from dalsegno.slurm.parse.partitions import (
    PARTITION_SETTINGS_ARGV,
    TOPOLOGY_ARGV,
    PartitionSettings,
    SwitchInfo,
    parse_partition_settings,
    parse_raw_partitions,
    parse_topology,
)
from dalsegno.slurm.parse.text import TIME_ENV, Separators
from dalsegno.slurm.versions import Version
from dalsegno.system.processes import Completed, Runner

# This program ends an allocation, as salloc does when its command has ended, so that Slurm records the exit code.
_PROGRAM = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # Slurm's plugins need its symbols
if hasattr(library, "slurm_init"):
    library.slurm_init(None)
sys.exit(library.slurm_complete_job(ctypes.c_uint32(int(sys.argv[2])), ctypes.c_uint32(int(sys.argv[3]))) != 0)
"""


def complete_argv(plugins: str, job: int, exit_code: int) -> tuple[str, ...]:
    """Return the command that completes a job. `plugins` is Slurm's plugin folder, which also contains its library."""
    status = (exit_code & 0xFF) << 8  # the exit code, encoded like a status of wait(2)
    return (sys.executable, "-I", "-S", "-c", _PROGRAM, f"{plugins}/libslurmfull.so", str(job), str(status))


# sacctmgr prints these messages, with exit code 1, when there is nothing to change. "Nothing modified" is not among
# them, because it means that the object to modify does not exist.
NOTHING_TO_DO = ("Nothing new added", "Nothing deleted", "already exists.  Not adding")

_DONE = ("Adding", "Associations", "Modified", "Deleting", *NOTHING_TO_DO)
_PROMPT = "sacctmgr: "


def script(commands: Sequence[Sequence[str]]) -> str:
    """Return the commands as lines for sacctmgr's interactive prompt."""
    return "".join(f"{_line(command)}\n" for command in commands)


def failures(commands: Sequence[Sequence[str]], stdout: str, stderr: str) -> list[str]:
    """Return the commands that failed and, if there are any, the error output.

    The exit code is not used, because it is 1 even if a single object already existed. A command has succeeded if one
    of sacctmgr's success messages follows its echo at the prompt.
    """
    answers = {line: answer for line, answer in _answers(stdout)}
    undone = [line for line in map(_line, commands) if not _is_done(answers.get(line, ""))]
    return [f"not done: sacctmgr {line}" for line in undone] + (stderr.strip().splitlines() if undone else [])


def _is_done(answer: str) -> bool:
    """Return whether an answer reports success. A remark, for example that the user is unknown, may precede the success
    message."""
    return any(line.strip().startswith(_DONE) for line in answer.splitlines())


def _answers(stdout: str) -> list[tuple[str, str]]:
    """Return each echoed command with the answer below it."""
    blocks = f"\n{stdout}".split(f"\n{_PROMPT}")[1:]
    split = (block.partition("\n") for block in blocks)
    return [(line.strip(), answer.strip()) for line, _, answer in split]


def _line(command: Sequence[str]) -> str:
    return " ".join(_word(word) for word in command)


def _word(word: str) -> str:
    """Quote a word for the prompt: `Description=a b` → `Description="a b"`. Quote characters cannot be escaped."""
    if any(letter in word for letter in "\"'\n\r"):
        raise DalsegnoError(f"sacctmgr cannot read {word!r}", hint="leave out quotes and line breaks")
    key, equals, value = word.partition("=")
    return f'{key}{equals}"{value}"' if equals and any(letter.isspace() for letter in value) else word


# Prefixes of environment variables that would change the output of the commands
_FOREIGN = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_", "SDIAG_", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")


class SlurmClient:
    """A client of one cluster's Slurm. `env` is the complete environment of its commands, with SLURM_CONF and PATH.

    `prefix` comes before every command, for example `nsenter …` to run it on the head node.
    """

    def __init__(
        self,
        runner: Runner,
        env: Mapping[str, str],
        *,
        prefix: Sequence[str] = (),
        bin_dir: str = "",
        timeout_s: float = 30,
    ) -> None:
        self._runner = runner
        self._env = {key: value for key, value in env.items() if not key.startswith(_FOREIGN)}
        self._prefix = tuple(prefix)
        self._bin_dir = bin_dir
        self._timeout_s = timeout_s
        self._node_parser = NodeParser()

    # Methods that query Slurm

    def nodes(self, names: str | Iterable[str] = ()) -> list[NodeInfo]:
        """Return all nodes, or only those in `names`."""
        if names:
            return parse_nodes(self._ask((*NODES_ARGV, node_list(names))))
        return self._node_parser.parse(self._ask(NODES_ARGV))

    def node(self, name: str) -> NodeInfo:
        done = self._run((*NODES_ARGV, node_list(name)))
        if done.exit_code and "not found" in done.stdout + done.stderr:
            raise NotThere(f"there is no node {name}", hint="`sinfo -N` lists the nodes")
        return parse_nodes(done.checked(hint=_hint(done)).stdout)[0]

    def queue(self, *, ended: bool = False) -> JobList:
        """Return the queue. With `ended`, include ended jobs that slurmctld has not purged yet."""
        marks = Separators.fresh()
        done = self._squeue(jobs_env(marks), *(("--states=all",) if ended else ()))
        return parse_jobs(done.checked(hint=_hint(done)).stdout, marks)

    def jobs(self, *, ended: bool = False) -> list[JobInfo]:
        """Return the jobs in the queue that can be parsed."""
        return list(self.queue(ended=ended).jobs)

    def job(self, job: int | str) -> JobInfo:
        """Return one job, which may be pending, running, or have ended a few minutes ago."""
        marks = Separators.fresh()
        done = self._squeue(jobs_env(marks, paths=True), "--states=all", f"--jobs={job_id(job)}")
        if done.exit_code and "Invalid job id" in done.stderr:
            raise NotThere(f"there is no job {job} in Slurm", hint=f"for a job that ended long ago: `sacct -j {job}`")
        found = parse_jobs(done.checked(hint=_hint(done)).stdout, marks, paths=True).jobs
        if not found:
            raise NotThere(f"there is no job {job} in Slurm", hint="`squeue` lists pending and running jobs")
        return next((one for one in found if str(job) in (str(one.id), one.label)), found[0])

    def excluded_nodes(self, job: int) -> tuple[str, ...]:
        """Return the nodes that a job excludes; empty if slurmctld has purged the job."""
        marks = Separators.fresh()
        done = self._squeue(excluded_env(marks), "--states=all", f"--jobs={job_id(job)}")
        return () if done.exit_code else parse_excluded(done.stdout, marks)

    def has_step(self, job: int, step: int) -> bool:
        """Return whether a step runs, or has not yet been removed from all its nodes."""
        done = self._run(("scontrol", "show", "step", f"{job_id(job)}.{step}"))
        output = done.stdout + done.stderr
        if done.exit_code and ("not found" in output or "Invalid job id" in output):
            return False
        done.checked(hint=_hint(done))
        return True

    def partitions(self) -> list[PartitionInfo]:
        return parse_partitions(self._ask(PARTITIONS_ARGV))

    def partition_settings(self) -> list[PartitionSettings]:
        """Return the settings of the partitions."""
        return parse_partition_settings(self._ask(PARTITION_SETTINGS_ARGV))

    def raw_partitions(self) -> dict[str, Mapping[str, str]]:
        """Return the settings of the partitions by name, with the names and values that slurmctld prints."""
        return parse_raw_partitions(self._ask(PARTITION_SETTINGS_ARGV))

    def topology(self) -> list[SwitchInfo]:
        return parse_topology(self._ask(TOPOLOGY_ARGV))

    def history(self, *, since_s: int | None = None, jobs: Iterable[int | str] = ()) -> list[JobInfo]:
        """Return jobs from the accounting database: today's jobs, jobs since a Unix time, or jobs with these ids."""
        ids = ",".join(job_id(job) for job in jobs)
        since = (f"--starttime=uts{int(since_s)}",) if since_s is not None else ()
        which = (*since, *((f"--jobs={ids}",) if ids else ()))
        facts, texts = self._run((*HISTORY_ARGV, *which)), self._run((*TEXTS_ARGV, *which))
        return parse_history(facts.checked(hint=_hint(facts)).stdout, texts.checked(hint=_hint(texts)).raw)

    def node_events(self, node: str) -> list[NodeEvent]:
        """Return the times in the last week when a node left service. This needs the accounting database."""
        return parse_events(self._ask((*EVENTS_ARGV, f"nodes={node_list(node)}", "start=now-7days")))

    def config(self) -> dict[str, str]:
        """Return the settings that slurmctld runs with."""
        return parse_config(self._ask(CONFIG_ARGV))

    def diag(self) -> Diagnostics:
        return parse_diag(self._ask(DIAG_ARGV))

    def queue_load(self) -> QueueLoad:
        """Return the fields of all jobs that metrics need, one row per array task. Recently ended jobs are included."""
        marks = Separators.fresh_record()
        done = self._run(QUEUE_LOAD_ARGV, env={**self._env, **TIME_ENV, **queue_load_env(marks)})
        return parse_queue_load(done.checked(hint=_hint(done)).stdout, marks)

    def node_loads(self) -> NodeLoads:
        """Return the state and the resources in use of all nodes, with one row for each partition of a node."""
        return parse_node_loads(self._ask(NODE_LOAD_ARGV))

    def fair_shares(self) -> dict[str, float]:
        """Return the fair-share factor of each account. This needs accounting and priority/multifactor."""
        return parse_fair_shares(self._ask(FAIR_SHARE_ARGV))

    def reservations(self) -> list[ReservationInfo]:
        return parse_reservations(self._ask(RESERVATIONS_ARGV))

    def ping(self) -> list[ControllerPing]:
        """Return which of the slurmctlds answer. If none answers, this takes little time, while other queries take 9 s
        to fail."""
        done = self._run(PING_ARGV)
        answered = done if "Slurmctld(" in done.stdout else done.checked(hint=_hint(done))
        return parse_ping(answered.stdout)

    def version(self) -> Version:
        """Return the version of the commands. Unlike `slurmd -V`, this needs a slurm.conf."""
        return Version.parse(self._ask(("sinfo", "--version")))

    # Methods that change jobs

    def submit(self, script: str | None = None, args: Sequence[str] = ()) -> int:
        """Submit the text of a script, or sbatch arguments such as `["--nodes=2", "train.sh"]`; return the job id."""
        done = self._run(("sbatch", "--parsable", *args), stdin=script, env=self._env)
        return parse_submitted(done.checked(hint=_hint(done)).stdout)

    def cancel(self, *jobs: int | str, signal: str = "") -> None:
        """Cancel or signal jobs. It is not an error if a job has already ended."""
        wanted = [job_id(job) for job in jobs]
        if wanted:
            self._execute(("scancel", *((f"--signal={signal}",) if signal else ()), *wanted), allowed=_GONE)

    def complete(self, job: int, exit_code: int) -> None:
        """End an allocation that has no script. Slurm records the exit code, and the state COMPLETED or FAILED."""
        plugins = self.config().get("PluginDir", "").partition(":")[0]
        argv = complete_argv(plugins, job, exit_code)
        self._runner.run((*self._prefix, *argv), env=self._env, timeout_s=self._timeout_s).checked()

    def hold(self, *jobs: int | str) -> None:
        self._execute(("scontrol", "hold", *map(job_id, jobs)))

    def release(self, *jobs: int | str) -> None:
        self._execute(("scontrol", "release", *map(job_id, jobs)))

    def requeue(self, *jobs: int | str) -> None:
        self._execute(("scontrol", "requeue", ",".join(map(job_id, jobs))))

    # Methods that change nodes

    def drain(self, nodes: str | Iterable[str], reason: str) -> None:
        """Drain nodes. Running jobs continue, but no new jobs start."""
        self.update(NodeName=node_list(nodes), State="DRAIN", Reason=free_text(reason))

    def set_down(self, nodes: str | Iterable[str], reason: str) -> None:
        """Set nodes DOWN, so that Slurm ends their jobs at once instead of waiting for SlurmdTimeout."""
        self.update(NodeName=node_list(nodes), State="DOWN", Reason=free_text(reason))

    def resume(self, nodes: str | Iterable[str]) -> None:
        """Return nodes to service. It is not an error if a node is already in service."""
        names = [nodes] if isinstance(nodes, str) else list(nodes)
        done = self._run(("scontrol", "update", f"NodeName={node_list(names)}", "State=RESUME"))
        # Slurm reports this error for nodes in service. It also reports it for nodes that have not registered since
        # slurmctld started, although it undrains them. So only the state of the nodes shows whether the command failed.
        if "Invalid node state" in done.stderr:
            out = [node.name for node in self.nodes(names) if node.draining or node.down]
            if not out:
                return
        done.checked(hint=_hint(done))

    def update(self, **settings: str) -> None:
        """Run `scontrol update Key=Value …` for nodes, jobs, partitions or reservations."""
        self._execute(("scontrol", "update", *(f"{key}={value}" for key, value in settings.items())))

    def reconfigure(self) -> None:
        """Make all daemons reread their configuration files."""
        self._execute(("scontrol", "reconfigure"))

    def scontrol(self, *words: str) -> str:
        """Run any other scontrol command and return its output."""
        return self._ask(("scontrol", *words))

    # Methods for the accounting database

    def accounts(self, cluster: str) -> AccountsInfo:
        """Return the QOS and users in the accounting database, and one cluster's accounts and members."""
        mine = f"cluster={word('cluster', cluster)}"
        return parse_accounts(self._ask(QOS_ARGV), self._ask((*ASSOC_ARGV, mine)), self._ask(USER_ARGV))

    def sacctmgr(self, words: Sequence[str]) -> str:
        """Run one sacctmgr command without confirmation. It is not an error if there is nothing to change."""
        done = self._run(("sacctmgr", "--immediate", *words))
        if done.exit_code == 1 and any(message in done.stdout for message in NOTHING_TO_DO):
            return done.stdout
        return done.checked(hint=_hint(done)).stdout

    def sacctmgr_all(self, commands: Sequence[Sequence[str]]) -> None:
        """Run many sacctmgr commands in one process and report all failures at once."""
        if not commands:
            return
        words = script(commands)
        wide = {**self._env, "COLUMNS": str(len(words) + 80)}  # sacctmgr's prompt truncates the echo of longer lines
        timeout_s = self._timeout_s + len(commands)
        done = self._run(("sacctmgr", "--immediate"), stdin=words, env=wide, timeout_s=timeout_s)
        faults = failures(commands, done.stdout, done.stderr)
        if faults:
            raise CommandFailed(done.argv, done.exit_code, "\n".join(faults), hint=_trouble_hint(done))

    def _ask(self, argv: tuple[str, ...]) -> str:
        done = self._run(argv)
        return done.checked(hint=_hint(done)).stdout

    def _squeue(self, env: Mapping[str, str], *words: str) -> Completed:
        return self._run((*JOBS_ARGV, *words), env={**self._env, **TIME_ENV, **env})

    def _execute(self, argv: tuple[str, ...], allowed: tuple[str, ...] = ()) -> None:
        done = self._run(argv)
        if not any(message in done.stderr for message in allowed):
            done.checked(hint=_hint(done))

    def _run(
        self,
        argv: tuple[str, ...],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        program = f"{self._bin_dir}/{argv[0]}" if self._bin_dir else argv[0]
        try:
            return self._runner.run(
                (*self._prefix, program, *argv[1:]),
                stdin=stdin,
                env={**self._env, **TIME_ENV} if env is None else env,
                timeout_s=timeout_s or self._timeout_s,
            )
        except CommandTimedOut as error:
            error.hint = "Slurm is overloaded or hangs: see `sdiag` and slurmctld's log"
            raise


_GONE = ("Invalid job id", "already completing or completed", "already finished")

_HINTS = {
    SlurmTrouble.NO_CONTROLLER: "slurmctld does not answer: check the daemons with `dalsegno status`",
    SlurmTrouble.DISCONNECTED: "slurmctld closed the connection: its log says why",
    SlurmTrouble.NO_DATABASE: "slurmdbd does not answer: check the daemons with `dalsegno status`",
    SlurmTrouble.NO_ACCOUNTING: "this cluster has no accounting: set `slurm: {accounting: true}`",
    SlurmTrouble.AUTHENTICATION: "authentication failed: check that munged runs with the cluster's key on both sides",
}


def _hint(done: Completed) -> str:
    """Return the hint for a failed command.

    The output of a successful command is not searched, because it may be large.
    """
    return _trouble_hint(done) if done.exit_code else ""


def _trouble_hint(done: Completed) -> str:
    troubles = parse_troubles(done.stderr + done.stdout)
    return next((_HINTS[trouble] for trouble in troubles if trouble in _HINTS), "")
