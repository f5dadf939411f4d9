"""Hostile text in job fields, through a real slurmctld: it stays text of its job and affects nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dalsegno.recovery.client import ask
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Any bytes but zero, preferably those that a parser may take for a separator.
SIGNS = [
    "\x1e",
    "\x1f",
    "\n",
    "\r",
    "\t",
    " ",
    "|",
    "=",
    ",",
    "\x1b[2J",
    "\x9b",
    "é",
    "\u202e",
    "\U0001f600",
    "JobId=1 ",
]
TEXT = st.lists(
    st.sampled_from(SIGNS) | st.characters(min_codepoint=1, blacklist_categories=["Cs"]) | st.sampled_from(["\udcff"]),
    min_size=1,
    max_size=40,
).map("".join)  # fmt: skip


PHASES = [Phase.explicit, Phase.generate]  # each example is a job, so none is shrunk
UID = 20001  # uid of ada, the first of the cluster's users


@pytest.fixture(scope="module")
def target(shared: Cli) -> LocalTarget:
    return LocalTarget(shared.home / "clusters/shared", cache=shared.home / "cache")


@pytest.fixture(scope="module")
def ada(target: LocalTarget) -> Iterator[SlurmClient]:
    """Slurm as a plain user; her jobs are cancelled afterwards."""
    slurm = target.slurm_as("ada")
    yield slurm
    slurm.cancel(*(job.id for job in target.slurm.jobs() if job.uid == UID))
    eventually(lambda: not [job for job in target.slurm.jobs() if job.uid == UID])


def as_read_back(text: str) -> str:
    """Return a text as a command's output is read: invalid UTF-8 replaced, one kind of line end, stripped."""
    decoded = os.fsencode(text).decode(errors="replace")
    return decoded.replace("\r\n", "\n").replace("\r", "\n").strip()


def forged_record(job: int) -> str:
    """Return text that the former parser would have read as a job of root."""
    fields = [str(job), str(job), "N/A", "N/A", "N/A", "root", "root", "normal", "train", "RUNNING", "None", "train-1"]
    return "x\x1fnone\x1e\n" + "\x1f".join([*fields, *["1"] * 13, "forged", "dalsegno:join"])


@given(name=TEXT, comment=TEXT, path=TEXT)
@settings(max_examples=30, phases=PHASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_of_a_user_stays_within_its_own_job(
    target: LocalTarget, ada: SlurmClient, name: str, comment: str, path: str
) -> None:
    before = {job.id for job in target.slurm.jobs(ended=True)}
    job = submit(ada, name, comment, f"--chdir=/tmp/{path}", f"--output=/tmp/{path}", f"--wckey={path}", "--hold")

    queue = target.slurm.queue(ended=True)
    assert queue.unreadable == 0 and {one.id for one in queue.jobs} == {*before, job}
    for found in (next(one for one in queue.jobs if one.id == job), target.slurm.job(job)):
        check_owner(found)
        assert (found.name, found.comment) == (
            as_read_back(name),
            "" if is_empty_value(comment) else as_read_back(comment),
        )
    ada.cancel(job)


def submit(slurm: SlurmClient, name: str, comment: str, *words: str, script: str = "#!/bin/sh\nsleep 1000\n") -> int:
    return slurm.submit(script, [f"--job-name={name}", f"--comment={comment}", "--partition=lab", *words])


def check_owner(job: JobInfo) -> None:
    assert (job.uid, job.partition) == (UID, "lab")


def is_empty_value(text: str) -> bool:
    """Return whether Slurm also writes this text for an empty field."""
    return as_read_back(text).lower() in ("", "(null)", "null", "n/a", "none", "unknown", "n/s", "invalid", "not_set")


def test_odd_job_names_stop_neither_status_nor_recovery(shared: Cli, target: LocalTarget, ada: SlurmClient):
    names = ["a\x1eb", "\x1f" * 30, forged_record(99999), "\x1b]0;title\x07\x1b[31mred\x1b[2J"]
    quiet = ["-o", "/dev/null", "--mem=10M"]
    gone = [submit(ada, name, name, *quiet) for name in names]
    ada.cancel(*gone)  # Slurm remembers ended jobs for some minutes
    running = [submit(ada, name, name, *quiet) for name in names]

    status = shared.status("shared")
    listed = {str(job["id"]): job for job in status["jobs"]}  # type: ignore[attr-defined]
    assert {str(job) for job in running} <= set(listed) and "99999" not in listed
    assert not [problem for problem in status["problems"] if "slurmctld" in problem or "read" in problem]  # type: ignore[attr-defined]
    assert not [job for job in listed.values() if job["user"] == "root"]
    for words in (("status",), ("why", str(running[2])), ("why", str(gone[3])), ("runs",)):
        answer = shared.run(*words)
        assert answer.code == 0 and not unsafe(answer.out + answer.err), words

    check_node_recovers(shared, "train-3")
    ada.cancel(*running)
    check_node_recovers(shared, "train-2")


def test_job_history_assigns_odd_names_to_their_owner(target: LocalTarget, ada: SlurmClient):
    names = ["a\x1fb\x1f\nc", forged_record(99999), "x" * 1024, "é" * 512, f"{7:<24} {'':<64} x\n{8:<24} "]
    jobs = [submit(ada, name, "", "--hold") for name in names]
    ada.cancel(*jobs)
    # The database stores no more than 255 characters, or 255 bytes since Slurm 24.11.
    wanted = [{name[:255].rstrip(), name.encode()[:255].decode(errors="ignore").rstrip()} for name in names]

    def all_stored() -> bool:
        found = [job.name for job in target.slurm.history(jobs=jobs)]
        return len(found) == len(names) and all(name in some for name, some in zip(found, wanted, strict=True))

    eventually(all_stored)
    for job in target.slurm.history(jobs=jobs):
        assert (job.account, job.partition) == ("ada", "lab")


def unsafe(text: str) -> list[str]:
    return [letter for letter in text if not letter.isprintable() and letter != "\n"]


def check_node_recovers(cli: Cli, node: str) -> None:
    """Check that a node without power is replaced and returned, which needs a controller that can read the queue."""
    socket = cli.home / "clusters/shared/run/controller.sock"

    def returned() -> list[int]:
        events = ask(socket, {"events": -100}, 100)["events"]
        return [each["id"] for each in events if each["node"] == node and each["kind"] == "return"]

    before = len(returned())
    cli.ok("inject", "power-off", node)
    eventually(lambda: len(returned()) > before, 100)
    eventually(lambda: json.loads(cli.ok("status", "--json"))["nodes"], 100)
    eventually(lambda: cli.ok("shell", "--", "sinfo", "-h", "-n", node, "-o", "%T").split()[0] == "idle", 200)
