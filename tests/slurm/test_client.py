"""Tests of the Slurm client: its commands, their results, and that no failure looks like an empty cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dalsegno.errors import CommandFailed, DalsegnoError, NotThere
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobState, NodeState
from dalsegno.slurm.parse.text import ParseError
from dalsegno.slurm.versions import Version
from dalsegno.system.processes import Completed

RECORDED = Path(__file__).parent.parent / "recorded" / "slurm-22.05.8"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@dataclass
class Slurm:
    """A Slurm that answers each command from a table, by arguments in its command line."""

    answers: Mapping[str, str | Completed]
    calls: list[tuple[tuple[str, ...], str | None, Mapping[str, str] | None, float | None]] = field(
        default_factory=list
    )

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        self.calls.append((tuple(argv), stdin, env, timeout_s))
        line = " ".join(argv)
        answer = next(answer for words, answer in self.answers.items() if words in line)
        return Completed(tuple(argv), 0, _marked(answer, env or {})) if isinstance(answer, str) else answer

    @property
    def argv(self) -> tuple[str, ...]:
        return self.calls[-1][0]


def _marked(answer: str, env: Mapping[str, str]) -> str:
    """Return a recorded answer with the separators that this query uses."""
    if "SQUEUE_FORMAT2" not in env:
        return answer
    first, *_, last = env["SQUEUE_FORMAT2"].split(",")
    return answer.replace("\x1f", first.partition(":")[2]).replace("\x1e", last.partition(":")[2])


def fails(stderr: str, code: int = 1, stdout: str = "") -> Completed:
    return Completed(("slurm",), code, stdout, stderr)


def client(answers: Mapping[str, str | Completed], env: Mapping[str, str] | None = None) -> tuple[SlurmClient, Slurm]:
    slurm = Slurm(answers)
    return SlurmClient(slurm, env or {"SLURM_CONF": "/c/slurm.conf"}), slurm


def test_nodes_returns_node_infos() -> None:
    slurm, _ = client({"show node": recorded("nodes")})
    nodes = {node.name: node for node in slurm.nodes()}
    assert nodes["n1"].state is NodeState.MIXED and nodes["n1"].gpus_used == 2


def test_only_named_nodes_are_queried() -> None:
    slurm, fake = client({"show node": recorded("nodes")})
    slurm.nodes(["n1", "n2"])
    assert fake.argv[-1] == "n[1-2]"


def test_missing_node_raises_not_there() -> None:
    slurm, _ = client({"show node": Completed((), 1, recorded("node-missing"))})
    with pytest.raises(NotThere, match="no node nope"):
        slurm.node("nope")


def test_queue_omits_ended_jobs_unless_requested() -> None:
    slurm, fake = client({"squeue": recorded("squeue")})
    assert not any(job.state.ended for job in slurm.jobs())
    assert "--states=all" not in fake.argv
    slurm.jobs(ended=True)
    assert "--states=all" in fake.argv


def test_empty_queue_has_no_jobs() -> None:
    slurm, _ = client({"squeue": ""})
    assert slurm.jobs() == []


QUERIES: list[Callable[[SlurmClient], object]] = [
    SlurmClient.nodes,
    SlurmClient.jobs,
    SlurmClient.partitions,
    SlurmClient.history,
    SlurmClient.config,
    SlurmClient.diag,
    SlurmClient.ping,
    SlurmClient.reconfigure,
    lambda slurm: slurm.job(5),
    lambda slurm: slurm.node("n1"),
    lambda slurm: slurm.submit("#!/bin/sh"),
    lambda slurm: slurm.cancel(5),
    lambda slurm: slurm.drain("n1", "why"),
    lambda slurm: slurm.resume("n1"),
    lambda slurm: slurm.accounts("lab"),
    lambda slurm: slurm.sacctmgr(["add", "qos", "x"]),
    lambda slurm: slurm.sacctmgr_all([["add", "qos", "x"]]),
]


@pytest.mark.parametrize("query", QUERIES)
def test_slurm_without_answer_raises_an_error_with_a_hint(query: Callable[[SlurmClient], object]) -> None:
    slurm, _ = client({"": fails(DOWN)})
    with pytest.raises(CommandFailed) as caught:
        query(slurm)
    assert "dalsegno status" in caught.value.hint


def test_output_without_nodes_is_an_error() -> None:
    slurm, _ = client({"show node": ""})
    with pytest.raises(ParseError):
        slurm.nodes()


def test_every_call_has_a_timeout_and_times_in_seconds() -> None:
    slurm, fake = client({"": recorded("sdiag")}, env={"SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%i"})
    slurm.diag()
    _, _, env, timeout_s = fake.calls[0]
    assert timeout_s and env == {"SLURM_TIME_FORMAT": "%s"}


def test_commands_get_the_prefix() -> None:
    fake = Slurm({"": recorded("ping")})
    SlurmClient(fake, {}, prefix=("nsenter", "-t", "7"), bin_dir="/opt/slurm/bin").ping()
    assert fake.argv == ("nsenter", "-t", "7", "/opt/slurm/bin/scontrol", "ping")


def test_ping_distinguishes_down_controller_from_failed_command() -> None:
    slurm, _ = client({"ping": Completed((), 1, recorded("ping-down"))})
    assert [controller.up for controller in slurm.ping()] == [False]


def test_submit_passes_script_on_stdin_and_returns_id() -> None:
    slurm, fake = client({"sbatch": "a plugin talks\n42;lab\n"})
    assert slurm.submit("#!/bin/sh\ntrue\n", ["--nodes=2"]) == 42
    argv, stdin, env, _ = fake.calls[0]
    assert argv == ("sbatch", "--parsable", "--nodes=2") and stdin == "#!/bin/sh\ntrue\n"
    assert env is not None and "SLURM_TIME_FORMAT" not in env, "it would be in the job's environment"


def test_refused_job_shows_slurm_reason() -> None:
    output = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    slurm, _ = client({"sbatch": fails(output)})
    with pytest.raises(CommandFailed, match="Requested node configuration is not available"):
        slurm.submit("#!/bin/sh")


def test_job_is_found_by_id_or_array_task() -> None:
    paths = "".join(f"\x1f/{name}" for name in ("work", "run.sh", "out", "err"))
    slurm, _ = client({"squeue": recorded("squeue").replace("\x1e", f"{paths}\x1e")})
    assert slurm.job("12_2").array_task == "2"
    assert slurm.job(12).array_task == "3-6%2"


def test_forgotten_job_raises_not_there() -> None:
    slurm, _ = client({"squeue": fails(recorded("job-missing.stderr"))})
    with pytest.raises(NotThere, match="no job 99999"):
        slurm.job(99999)


def test_separators_are_not_on_the_command_line() -> None:
    """Other users can read the command line while squeue runs, and could put the separators in a job's comment."""
    slurm, fake = client({"squeue": recorded("squeue")})
    slurm.jobs()
    argv, _, env, _ = fake.calls[0]
    assert argv == ("squeue", "--all", "--noheader", "--noconvert") and env and "JobID:\x1f" in env["SQUEUE_FORMAT2"]


def test_text_of_users_is_not_taken_for_an_answer_of_slurm() -> None:
    output = recorded("nodes").splitlines(keepends=True)[0].replace("Partitions=", "Reason=GPU not found Partitions=")
    assert client({"show node": output})[0].node("n1").name == "cpu-01"
    assert client({"show step 5.0": "StepId=5.0 Name=Job step 5.0 not found\n"})[0].has_step(5, 0)


def test_ended_step_is_distinguished_from_slurm_without_answer() -> None:
    assert client({"show step 5.0": "StepId=5.0 UserId=0 State=RUNNING\n"})[0].has_step(5, 0)
    for gone in (fails("", stdout="Job step 5.0 not found\n"), fails("slurm_get_job_steps error: Invalid job id\n")):
        assert not client({"show step 5.0": gone})[0].has_step(5, 0)
    with pytest.raises(CommandFailed):
        client({"show step 5.0": fails(DOWN)})[0].has_step(5, 0)


@pytest.mark.parametrize("output", ["Invalid job id specified", "Job/step already completing or completed"])
def test_cancelling_an_ended_job_is_not_an_error(output: str) -> None:
    slurm, fake = client({"scancel": fails(f"scancel: error: Kill job error on job id 5: {output}")})
    slurm.cancel(5, "6_1", signal="USR1")
    assert fake.argv == ("scancel", "--signal=USR1", "5", "6_1")


def test_draining_several_nodes_is_one_command() -> None:
    slurm, fake = client({"update": ""})
    slurm.drain(["n1", "n2", "n4"], "dalsegno:replace:xid[79]  fell\noff")
    assert fake.argv == (
        "scontrol",
        "update",
        "NodeName=n[1-2,4]",
        "State=DRAIN",
        "Reason=dalsegno:replace:xid[79] fell off",
    )


def test_resuming_a_node_in_service_is_not_an_error() -> None:
    refused = fails("slurm_update error: Invalid node state specified\n")
    slurm, _ = client({"update NodeName=n1 ": refused, "show node": recorded("nodes").splitlines()[1] + "\n"})
    slurm.resume("n1")


def test_failed_resume_is_an_error() -> None:
    refused = fails("slurm_update error: Invalid node state specified\n")
    slurm, _ = client({"update NodeName=n3 ": refused, "show node": recorded("nodes").splitlines()[3] + "\n"})
    with pytest.raises(CommandFailed):
        slurm.resume("n3")


@pytest.mark.parametrize("name", ["--help", "n1 state=idle", "", "n1;reboot", "n[1-2]", "é"])
def test_invalid_node_name_is_refused_before_the_command(name: str) -> None:
    slurm, fake = client({"": ""})
    for act in (slurm.drain, slurm.set_down):
        with pytest.raises(DalsegnoError):
            act(name, "x")
    with pytest.raises(DalsegnoError):
        slurm.resume([name])
    assert fake.calls == []


@pytest.mark.parametrize("job", ["--me", "5 6", "", "all", "1;2", -1])
def test_invalid_job_id_is_refused_before_the_command(job: int | str) -> None:
    slurm, fake = client({"": ""})
    for act in (slurm.cancel, slurm.hold, slurm.release, slurm.requeue, slurm.job):
        with pytest.raises(DalsegnoError):
            act(job)
    assert fake.calls == []


def test_history_accepts_a_start_time() -> None:
    slurm, fake = client({"sacct": recorded("sacct")})
    assert JobState.COMPLETED in {job.state for job in slurm.history(since_s=1_700_000_000, jobs=[1, 2])}
    assert fake.argv[-2:] == ("--starttime=uts1700000000", "--jobs=1,2")


def test_version_is_that_of_the_commands() -> None:
    slurm, _ = client({"--version": recorded("version")})
    assert slurm.version() == Version(22, 5, 8)


def test_adding_an_existing_entry_is_not_an_error() -> None:
    slurm, _ = client({"sacctmgr": fails("", stdout=" Nothing new added.\n")})
    slurm.sacctmgr(["add", "qos", "high"])


def test_many_sacctmgr_commands_run_in_one_process() -> None:
    output = (
        "sacctmgr: add qos high\n Adding QOS(s)\n  high\n"
        'sacctmgr: add account a Description="x y"\n Nothing new added.\nsacctmgr: \n'
    )
    slurm, fake = client({"sacctmgr": fails("", stdout=output)})
    slurm.sacctmgr_all([["add", "qos", "high"], ["add", "account", "a", "Description=x y"]])
    assert fake.calls[0][1] == 'add qos high\nadd account a Description="x y"\n'
    assert len(fake.calls) == 1


def test_failed_sacctmgr_commands_are_named() -> None:
    output = "sacctmgr: add qos high\n Adding QOS(s)\n  high\nsacctmgr: add user z account=none\nsacctmgr: \n"
    slurm, _ = client({"sacctmgr": fails(" This account 'none' doesn't exist.\n", stdout=output)})
    with pytest.raises(CommandFailed) as caught:
        slurm.sacctmgr_all([["add", "qos", "high"], ["add", "user", "z", "account=none"]])
    assert "not done: sacctmgr add user z account=none" in caught.value.what
    assert "add qos high" not in caught.value.what


def test_complete_ends_allocation_with_wait_status():
    asked, slurm = client({"show config": recorded("config"), "slurm_complete_job": ""})
    asked.complete(17, 3)
    folder = asked.config()["PluginDir"]
    assert slurm.calls[1][0][-3:] == (f"{folder}/libslurmfull.so", "17", str(3 << 8))


def test_complete_without_slurm_library_is_an_error():
    asked, _ = client({"show config": recorded("config"), "slurm_complete_job": fails("undefined symbol")})
    with pytest.raises(CommandFailed):
        asked.complete(17, 0)
