"""Tests of `dalsegno why` on a real Slurm: a node, a pending job, a failed job, and an unknown name."""

from __future__ import annotations

import json

from tests.cluster.conftest import Cli
from tests.waiting import eventually


def test_why_explains_a_drained_node_and_a_pending_job(shared: Cli) -> None:
    shared.ok("shell", "--", "scontrol", "update", "nodename=lab-1", "state=drain", "reason=new RAM")
    job = shared.ok("shell", "--", "sbatch", "--parsable", "-p", "lab", "-o", "/dev/null", "--wrap", "exit 3").strip()
    try:
        result = shared.run("why", "lab-1")
        assert "lab-1 was drained by root: new RAM" in result.out
        assert "next: `dalsegno shell -- scontrol update nodename=lab-1 state=resume`" in result.err
        eventually(lambda: ["lab-1", "left", "alone"] in [row.split()[:3] for row in shared.ok("nodes").splitlines()])
        eventually(lambda: "job waits" in shared.ok("why", job).replace(job + " ", ""))
    finally:
        shared.ok("shell", "--", "scontrol", "update", "nodename=lab-1", "state=resume")
    eventually(lambda: f"job {job} ended with exit code 3" in shared.ok("why", job))
    result = json.loads(shared.ok("why", job, "--json"))
    assert [moment["text"].split()[2] for moment in result["moments"]] == ["of", "started", "ended:"]


def test_why_of_unknown_name_suggests_a_close_one(shared: Cli) -> None:
    answer = shared.run("why", "lab1")
    assert (answer.code, "did you mean `lab-1`?" in answer.err) == (1, True)
