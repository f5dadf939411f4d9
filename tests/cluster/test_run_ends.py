"""Tests of how runs end: by their exit code, by a bug, by their user, or not at all because they continue elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import RunPhase
from dalsegno.system.children import arguments, find
from tests.cluster.conftest import Answer, Cli, at_home, taken_down
from tests.cluster.runs import LONG_S, QUICK, Run, footprint
from tests.cluster.test_run_kinds import Person
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TIERS = """
name: one
target: local
partitions:
  - {name: train, nodes: 3, cpus: 4, memory: 2G, default: true, priority_tier: 1, preempt_mode: requeue}
  - {name: urgent, nodes_from: train, priority_tier: 10, preempt_mode: off}
users:
  - {name: ada}
slurm: {accounting: false, preemption: {by: partition}, extra: {KillWait: 10}}
health: {mode: observe}  # what is broken here stays so
"""

LIVES = """
import os, time
print("life", flush=True)
while not os.path.exists(STOP):
    time.sleep(0.02)
"""
# Runs until its stop file exists. On the order to leave, it saves its step and exits with 75 to continue later.
SAVES = """
import os, signal, sys, time
stop, rank, told = sys.argv[1], os.environ["JAX_PROCESS_ID"], []
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda caught, frame: told.append(caught))
saved = f"saved.{rank}"
step = int(open(saved).read()) if os.path.exists(saved) else 0
print("from", step, flush=True)
while not (told or os.path.exists(stop)):
    step += 1
    time.sleep(0.02)
if not told:
    print("done at", step, flush=True)
    sys.exit(0)
with open(saved + ".new", "w") as file:
    file.write(str(step))
os.replace(saved + ".new", saved)
print("saved", step, flush=True)
sys.exit(75)
"""
WAITS = """
import os, sys, time
print("generation", os.environ["DALSEGNO_GENERATION"], flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def tiers(cache: Path) -> Iterator[Cli]:
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(TIERS))
        yield cli


@pytest.fixture
def work(tiers: Cli, request: pytest.FixtureRequest) -> Path:
    """Return a folder that all hosts see, with a space in its name."""
    folder: Path = tiers.home / f"w {request.node.name.partition('[')[0][:40]}{os.urandom(2).hex()}"
    folder.mkdir()
    return folder


def follow(cli: Cli, work: Path, script: str, *options: str, args: tuple[str, ...] = ()) -> tuple[Answer, Run]:
    """Run `dalsegno run` to its end."""
    (work / "train.py").write_text(script)
    before = footprint(cli)
    answer = cli.run("run", *options, "train.py", *args, cwd=work)
    return answer, Run(cli, work, RunFolder(cli.home / "runs" / newest(cli)), before)


def newest(cli: Cli) -> str:
    return str(max(json.loads(cli.ok("runs", "--json")), key=lambda run: float(run["created"]))["run"])


def detached(cli: Cli, work: Path, script: str, *options: str) -> Run:
    """Start a run whose workers wait for the stop file; return when all of them do."""
    run = Run.start(cli, work, *QUICK, *options, script=script, args=(str(work / "stop"),))
    run.wait_for(
        lambda: run.status.phase is RunPhase.RUNNING and all(run.log(rank) for rank in range(run.status.world_size))
    )
    return run


def facts(run: Run) -> dict[str, object]:
    """Return the run's entry in `dalsegno runs --json`."""
    return next(each for each in json.loads(run.cli.ok("runs", "--json", "--all")) if each["run"] == run.id)


def in_slurms_books(cli: Cli, job: int) -> tuple[str, str]:
    words = cli.ok("shell", "--", "scontrol", "-o", "show", "job", str(job)).split()
    return next(each for each in words if "JobState=" in each), next(each for each in words if "ExitCode=" in each)


# Exit codes and errors


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(0)", 0, "is done"),
        ("sys.exit(3)", 3, "rank 0 on train-1 ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 0 on train-1 was ended by SIGKILL"),
        ("sys.exit(93)", 93, "the script asked not to be restarted"),
    ],
)
def test_follower_exits_with_the_code_of_the_run(tiers: Cli, work: Path, end: str, code: int, said: str):
    restarts = () if code == 93 else ("--max-restarts", "0")
    answer, run = follow(tiers, work, f"import os, sys\n{end}\n", *QUICK, *restarts)
    assert (answer.code, said in answer.err) == (code, True), answer.err
    assert (run.generation, facts(run)["state"]) == (1, "done" if code == 0 else "failed")
    (job,) = (each["job"] for each in run.journal("granted"))
    state = f"JobState={'FAILED' if code else 'COMPLETED'}"
    eventually(lambda: in_slurms_books(tiers, job) == (state, f"ExitCode={code}:0"))


BUG = """
import os, time
print("rank", os.environ["JAX_PROCESS_ID"], "begins", flush=True)
def train(batch):
    if os.environ["JAX_PROCESS_ID"] == "1":
        raise ValueError(f"bad batch {batch}")
    time.sleep(1000)
train(int(os.environ["DALSEGNO_GENERATION"]) * 17)
"""


def test_repeated_traceback_ends_the_run(tiers: Cli, work: Path):
    answer, run = follow(tiers, work, BUG, *QUICK, "-N", "2")
    assert (answer.code, run.generation) == (1, 2)
    report = answer.err[answer.err.index("Traceback") :]
    assert report.index("ValueError: bad batch 34") < report.index("error: run")
    assert "rank 1 on train-2 failed: ValueError: bad batch 34, the same failure as before" in report
    run.no_trace()


RECORD = """
import os
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        raise ValueError("only the error file tells of this")
    dist.all_reduce(torch.ones(1))

try:
    main()
except Exception:
    os._exit(1)
"""


def test_torch_error_file_is_reported_without_follow_up_errors(tiers: Cli, work: Path):
    answer, run = follow(tiers, work, RECORD, "-N", "2")
    assert (answer.code, run.generation) == (1, 2), answer.err
    assert "ValueError: only the error file tells of this" in answer.err
    assert "Traceback" not in run.log(1)
    assert "gloo" not in answer.err and "Connection closed" not in answer.err
    run.no_trace()


# Cancellation

RUNS_AWAY = (
    """
import os, subprocess, sys, time
seconds = sys.argv[2]
subprocess.Popen(["sleep", seconds])
subprocess.Popen(["setsid", "sh", "-c", f"sleep {seconds} & sleep {seconds}"])
subprocess.run(["sh", "-c", f"env -i setsid sh -c 'trap : TERM; env -i setsid sleep {seconds} &'"])
"""
    + WAITS
)


@pytest.mark.parametrize("how", ["cancel", "scancel", "interrupt"])
def test_cancelled_run_leaves_nothing_on_any_node(tiers: Cli, work: Path, how: str):
    seconds = str(80_000 + os.getpid() + {"cancel": 1, "scancel": 2, "interrupt": 3}[how])
    (work / "train.py").write_text(RUNS_AWAY)
    before = footprint(tiers)
    words = ("run", *QUICK, "-N", "2", "--chdir", str(work), "train.py", str(work / "stop"), seconds)
    follower = tiers.start(*words)
    try:
        eventually(lambda: len(sleepers(seconds)) == 8)
        run = Run(tiers, work, RunFolder(tiers.home / "runs" / newest(tiers)), before)
        end_it(run, how, follower)
        assert follower.wait(100) == (130 if how == "interrupt" else 143)
    finally:
        follower.kill()
        follower.communicate()
    eventually(lambda: sleepers(seconds) == [])
    run.no_trace()
    assert (facts(run)["state"], facts(run)["exit_code"]) == ("cancelled", 143)
    assert in_slurms_books(tiers, run.journal("granted")[0]["job"])[0] == "JobState=CANCELLED"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long)]
)
def test_interrupted_drill_ends_its_run_and_leaves_no_folder(tiers: Cli, number: int, code: int):
    pytest.importorskip("torch")
    before, runs = footprint(tiers), tiers.home / "runs"
    known = set(runs.glob("drill-*"))
    drill = tiers.start("drill", "--no-compare", "-N", "1", "--spares", "0", "--report", "/dev/null")
    try:
        (root,) = eventually(lambda: set(runs.glob("drill-*")) - known)
        run = Run(tiers, tiers.home, RunFolder(root), before)
        run.wait_for(lambda: run.journal("granted"))
        drill.send_signal(number)
        said, _ = drill.communicate(timeout=100)
    finally:
        drill.kill()
        drill.communicate()
    assert drill.returncode == code and f"the drill is cut short: run {run.id} is cancelled" in said
    found = facts(run)
    assert found["state"] == "cancelled", (found, run.tail())
    assert list(runs.glob(".*drill*")) == []
    run.no_trace()


def end_it(run: Run, how: str, follower: subprocess.Popen[str]) -> None:
    if how == "cancel":
        run.cli.ok("cancel", run.id)
    elif how == "scancel":
        run.cli.ok("shell", "--", "scancel", str(run.status.jobs[0]))
    else:
        follower.send_signal(signal.SIGINT)


def sleepers(seconds: str) -> list[int]:
    return [process.pid for process in find(lambda pid: arguments(pid) == ["sleep", seconds])]


# Continuation in another job


@pytest.mark.waits
def test_run_longer_than_its_job_continues_without_losing_steps(tiers: Cli, work: Path):
    """Slurm may send the signal up to a minute early, which here means at once."""
    run = detached(tiers, work, SAVES, "-N", "2", "-t", "1", "--signal-lead", "15")
    run.wait_for_generation(2, LONG_S)
    run.wait_for(lambda: all(run.log(rank) for rank in (0, 1)))
    assert run.finish() == 0
    assert_no_step_was_lost(run)
    assert len({entry["job"] for entry in run.journal("granted")}) >= 2
    assert run.status.restarts == 0
    run.no_trace()


def assert_no_step_was_lost(run: Run) -> None:
    """Check that every generation starts where the previous one saved. One that ended while forming has no steps."""
    for rank in (0, 1):
        logs = [run.log(rank, generation).split() for generation in range(1, run.generation + 1)]
        said = [words for words in logs if words]
        assert [words[1] for words in said[1:]] == [words[3] for words in said[:-1]], said
        assert [words[2] for words in said] == ["saved"] * (len(said) - 1) + ["done"]


def test_save_signal_does_not_kill_a_script_without_handler(tiers: Cli, work: Path):
    run = detached(tiers, work, WAITS, "-N", "2")
    workers = run.workers()
    tiers.ok("shell", "--", "scancel", "--signal=USR2", str(run.status.jobs[0]))
    run.wait_for(lambda: {entry["node"] for entry in run.journal("signal")} == set(run.nodes))
    assert run.workers() == workers
    assert (run.finish(), run.generation) == (0, 1)
    run.no_trace()


def test_preempted_run_saves_and_resumes_later(tiers: Cli, work: Path):
    run = detached(tiers, work, SAVES, "-N", "2")
    urgent = preempt(tiers)
    run.wait_for(lambda: run.status.phase is RunPhase.WAITING)
    assert job_states(tiers)[urgent] == "RUNNING"
    tiers.ok("shell", "--", "scancel", urgent)
    run.wait_for_generation(2, LONG_S)
    run.wait_for(lambda: all(run.log(rank) for rank in (0, 1)))
    assert run.finish() == 0
    assert_no_step_was_lost(run)
    run.no_trace()


@pytest.mark.parametrize(
    "why", [pytest.param("preempted", marks=pytest.mark.long), pytest.param("out of time", marks=pytest.mark.waits)]
)
def test_run_without_controller_resumes_in_its_requeued_job(tiers: Cli, work: Path, why: str):
    runs = tiers.home / "runs"
    for folder in (runs, work):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    ada = Person(tiers.home, tiers.uid, controller=False)
    limit = ("-t", "1", "--signal-lead", "15") if why == "out of time" else ()
    run = ada.begin(work, SAVES, "-N", "2", *limit)
    job = str(run.journal("submitted")[0]["job"])
    urgent = preempt(tiers) if why == "preempted" else ""
    run.wait_for(lambda: run.journal("rests"), LONG_S)
    (listed,) = (each for each in json.loads(ada.ok("runs", "--json")) if each["run"] == run.id)
    assert (listed["state"], listed["exit_code"]) == ("waiting", None)
    if urgent:
        tiers.ok("shell", "--", "scancel", urgent)
    start_now(tiers, job)
    run.wait_for_generation(2, LONG_S)
    run.wait_for(lambda: all(run.log(rank) for rank in (0, 1)))
    assert run.finish() == 0
    assert_no_step_was_lost(run)
    run.no_trace()


@pytest.mark.parametrize("controller", [True, False], ids=["on the head", "in the batch step"])
def test_preempted_srun_program_is_restarted(tiers: Cli, work: Path, controller: bool):
    runs = tiers.home / "runs"
    for folder in (runs, work):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o1777)
    ada = Person(tiers.home, tiers.uid, controller=controller)
    script = LIVES.replace("STOP", repr(str(work / "stop")))
    (work / "plain.py").write_text(script)
    name = ada.ok("run", "--detach", "--framework", "plain", "-N", "2", "plain.py", cwd=work).strip()
    run = Run(tiers, work, RunFolder(runs / name), footprint(tiers))
    run.wait_for(lambda: all(run.log(rank, 1) for rank in (0, 1)), LONG_S)
    urgent = preempt(tiers)
    run.wait_for(lambda: run.status.phase is RunPhase.WAITING, LONG_S)
    tiers.ok("shell", "--", "scancel", urgent)
    if not controller:
        start_now(tiers, str(run.journal("submitted")[0]["job"]))
    run.wait_for(lambda: all(run.log(rank, 1).count("life") == 2 for rank in (0, 1)), LONG_S)
    (work / "stop").touch()
    run.wait_for(lambda: run.status.over, LONG_S)
    assert (run.status.exit_code, run.status.restarts) == (0, 1)


def preempt(cli: Cli) -> str:
    """Submit a job that takes all nodes."""
    words = ["sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1000"]
    job = cli.ok("shell", "--", *words).strip()
    eventually(lambda: job_states(cli).get(job) == "RUNNING")
    return job


def start_now(cli: Cli, job: str) -> None:
    """Start a requeued job without waiting until its old credential has expired, as Slurm would.

    Wait for the next second first, because slurmd refuses a credential from the second in which it revoked the old one.
    """
    eventually(lambda: job_states(cli).get(job) == "PENDING")
    pending_at = int(time.time())
    eventually(lambda: int(time.time()) > pending_at)

    def begun() -> bool:
        cli.run("shell", "--", "scontrol", "update", f"jobid={job}", "starttime=now")
        return job_states(cli)[job] == "RUNNING"

    try:
        eventually(begun, LONG_S, every_s=1)
    except AssertionError:
        log = f"cat \"$(scontrol show job {job} | sed -n 's/ *StdOut=//p')\""
        words = ("bash", "-c", f"scontrol show job {job}; sinfo -N -o '%N %T %E'; squeue; {log}")
        raise AssertionError(f"job {job} does not start: {cli.ok('shell', '--', *words)}") from None


def job_states(cli: Cli) -> dict[str, str]:
    lines = cli.ok("shell", "--", "squeue", "-h", "-o", "%i %T").splitlines()
    return {job: state for job, state in (line.split() for line in lines)}


# Hangs

HANGS = """
import os, sys, time
first = os.environ["DALSEGNO_GENERATION"] == "1"
def train():
    while first and os.environ["JAX_PROCESS_ID"] == "1":
        time.sleep(1000)  # rank 1 stops here
def barrier():
    while first and not os.path.exists("worked"):
        pass  # rank 0 works for longer than the timeout
    while first:
        time.sleep(0.1)  # and rank 0 waits for it here
print("begins", flush=True)
train()
barrier()
"""


def test_silent_run_is_restarted_once_no_rank_works(tiers: Cli, work: Path):
    """A run without steps and output is not ended while one of its ranks works."""
    run = Run.start(tiers, work, *QUICK, "-N", "2", "--hang-timeout", "5s", script=HANGS, args=())
    run.wait_for(lambda: "at work" in json.dumps(run.journal("note")))
    assert "but 1 of 2 ranks is at work; rank 1 on" in json.dumps(run.journal("note"))
    assert (run.generation, run.status.phase) == (1, RunPhase.RUNNING)
    (work / "worked").touch()
    assert (run.wait_for_end(), run.generation) == (0, 2)
    lines = HANGS.splitlines()
    for rank, text in {0: "and rank 0 waits", 1: "rank 1 stops"}.items():
        (line,) = (number for number, each in enumerate(lines, 1) if text in each)
        assert f'train.py", line {line} in ' in run.folder.stacks(1, rank).read_text()
    assert "and no rank was at work for" in run.cli.ok("why", run.id)
    (hung,) = run.journal("hung")
    assert hung["suspect"] == "code" and "no rank waits in a collective: rank 0 on" in hung["text"]
    assert not run.folder.stacks(2, 0).exists()
    run.no_trace()


# Logs

TELLS = """
import os, sys
rank, generation = os.environ["JAX_PROCESS_ID"], os.environ["DALSEGNO_GENERATION"]
for line in range(5000):
    print(f"rank {rank} generation {generation} line {line} ü")
print("no end of line", end="", flush=True)
if generation == "1" and rank == "3":
    os.kill(os.getpid(), 9)
if generation == "1":
    import time
    time.sleep(1000)
"""


def test_logs_are_complete_by_rank_and_generation(tiers: Cli, work: Path):
    answer, run = follow(tiers, work, TELLS, *QUICK, "-N", "2", "--nproc-per-node", "2")
    assert (answer.code, run.generation) == (0, 2), answer.err
    whole = {(g, r): [f"rank {r} generation {g} line {n} ü" for n in range(5000)] for g in (1, 2) for r in range(4)}
    assert run.log(3, 1).splitlines() == [*whole[1, 3], "no end of line"]
    for rank in range(4):
        assert run.log(rank, 2).splitlines() == [*whole[2, rank], "no end of line"]
    assert logs(run, "--rank", "3", "--generation", "1") == [*whole[1, 3], "no end of line"]
    second = [f"[{rank}] {line}" for rank in (2, 3) for line in [*whole[2, rank], "no end of line"]]
    assert logs(run, "--node", run.nodes[1], "--generation", "2") == second
    assert {line[:3] for line in logs(run)} == {"[0]", "[1]", "[2]", "[3]"}
    assert sorted(line for line in answer.out.splitlines() if "generation 2" in line) == sorted(
        f"[{rank}] {line}" for rank in range(4) for line in whole[2, rank]
    )
    assert "had no rank on `train-9`" in tiers.run("logs", run.id, "--node", "train-9").err


def logs(run: Run, *options: str) -> list[str]:
    return run.cli.ok("logs", run.id, *options).splitlines()


ASKED = (
    WAITS
    + """
import json
with open(f"{sys.argv[2]}.json", "w") as file:
    json.dump([sys.argv[2:], os.environ.get("COLOUR"), sys.prefix, os.getcwd(), __name__, __file__], file)
"""
)


def test_two_runs_have_separate_arguments_variables_and_python(tiers: Cli, work: Path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", work / "own env"], check=True)
    (work / "train.py").write_text(ASKED)
    stop = str(work / "stop")
    own = ("--env", "COLOUR=deep blue; $HOME", "--venv", "own env", "-J", "first")
    words = ("run", "--detach", *QUICK)
    first, second = (
        tiers.ok(*words, *options, "train.py", stop, *args, cwd=work).strip()
        for options, args in ((own, ("a b", "c'd", "--lr=$1")), (("-J", "second"), ("other",)))
    )
    runs = {each["run"]: each for each in json.loads(tiers.ok("runs", "--json"))}
    assert (runs[first]["name"], runs[second]["name"]) == ("first", "second")
    both = [Run(tiers, work, RunFolder(tiers.home / "runs" / name), footprint(tiers)) for name in (first, second)]
    for run in both:
        run.wait_for(lambda run=run: run.status.phase is RunPhase.RUNNING)
    assert [run.finish() for run in both] == [0, 0]
    script = str(work / "train.py")
    expected = [["a b", "c'd", "--lr=$1"], "deep blue; $HOME", str(work / "own env"), str(work), "__main__", "train.py"]
    assert json.loads((work / "a b.json").read_text()) == expected, script
    assert json.loads((work / "other.json").read_text())[:2] == [["other"], None]
    ended = {name: facts(run) for name, run in zip(("first", "second"), both, strict=True)}
    assert [(each["state"], each["exit_code"], each["phase"]) for each in ended.values()] == [("done", 0, "ended")] * 2
    assert "has ended: done" in tiers.run("logs", "-f", first).err
    for run in both:
        run.no_trace()
