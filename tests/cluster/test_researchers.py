"""Tests of the scene `researchers` of `dalsegno demo`, on the shared cluster and by itself.

Slurm computes fair share once a minute. Both tests run at the same time, so that they wait for the same computation.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.demo.researchers import Lab, play
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli, at_home, taken_down

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def demo(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the demo without virtual hosts and users, as on a machine without the right to create namespaces."""
    with taken_down(at_home(cache)) as cli:
        powerless = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
        process = subprocess.Popen(
            [*powerless, *cli.argv("demo", "--scene", "researchers")],
            env={**cli.env, "PYTHONIOENCODING": "ascii"}, cwd=cli.home, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()  # if it still runs
            process.communicate()


@pytest.mark.usefixtures("demo")
def test_three_researchers_share_four_gpus(shared: Cli):
    target = LocalTarget(shared.home / "clusters/shared", cache=shared.home / "cache")
    lines: list[str] = []
    outcome = play(Lab(target.slurm, target.slurm_as), lines.append)
    ada, bob, cem = (outcome.jobs[name] for name in ("ada", "bob", "cem"))

    assert outcome.running_at_release == ("bob", "ada")  # both run at the same time, on all four GPUs
    assert ada.gpus + bob.gpus == 4
    first_end = min(ada.ends_at or 0, bob.ends_at or 0)
    assert (cem.started_at or 0) >= first_end > max(ada.started_at or 0, bob.started_at or 0)
    assert "Requested node configuration is not available" in outcome.refusal
    assert [(job.user, job.gpus, job.qos, job.state.name) for job in (ada, bob, cem)] == [
        ("ada", 2, "medium", "COMPLETED"),
        ("bob", 2, "high", "COMPLETED"),
        ("cem", 1, "low", "COMPLETED"),
    ]
    assert all(job.elapsed_s >= seconds for job, seconds in ((ada, 7), (bob, 4), (cem, 2)))
    assert outcome.priorities["ada"] < outcome.priorities["cem"]  # her fair share is lower, because she used more


def test_researchers_demo_works_in_a_pipe_and_leaves_nothing(demo: subprocess.Popen[str]):
    out, err = demo.communicate(timeout=240)
    assert demo.returncode == 0, err
    assert "lab*         up   infinite      1   idle lab-1" in out
    assert "dee was refused: Batch job submission failed: Requested node configuration is not available" in out
    assert "bob  " in out and "####" in out
    assert "fair share: the next job of ada has priority" in out
    assert "nothing of it is left" in err and "\x1b" not in out + err
