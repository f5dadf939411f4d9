"""Three researchers share four GPUs: the scene that `dalsegno demo` plays, on the shared cluster."""

import subprocess

from dalsegno.demo.researchers import Lab, play
from dalsegno.targets.local import LocalTarget
from tests.cluster.conftest import Cli


def test_three_researchers_share_four_gpus(shared: Cli):
    target = LocalTarget(shared.home / "clusters/shared", cache=shared.home / "cache")
    told: list[str] = []
    outcome = play(Lab(target.slurm, target.slurm_as), told.append)
    ada, bob, cem = (outcome.jobs[name] for name in ("ada", "bob", "cem"))

    assert outcome.running_at_release == ("bob", "ada")  # together, on all four GPUs
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
    assert outcome.priorities["ada"] < outcome.priorities["cem"]  # fair share: she used more


def test_the_demo_tells_the_story_in_a_plain_pipe_and_leaves_nothing(cli: Cli):
    """Without virtual hosts and users: as one who may not make namespaces would see it."""
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *cli.argv("demo")],
        env={**cli.env, "PYTHONIOENCODING": "ascii"}, cwd=cli.home, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lab*         up   infinite      1   idle lab-1" in done.stdout
    assert "dee was refused: Batch job submission failed: Requested node configuration is not available" in done.stdout
    assert "bob  " in done.stdout and "####" in done.stdout
    assert "fair share: the next job of ada has priority" in done.stdout
    assert "nothing of it is left" in done.stderr and "\x1b" not in done.stdout + done.stderr
