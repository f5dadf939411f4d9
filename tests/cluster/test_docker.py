"""Tests of `dalsegno demo --scene docker`, with a real Docker if one is installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from dalsegno.system.cgroups import read_cgroups
from dalsegno.system.children import arguments, environment, find
from dalsegno.system.machine import program
from dalsegno.targets.local.folder import Folder
from tests.cluster.conftest import Cli, at_home, taken_down

WITH_DOCKER = pytest.mark.skipif(
    program("dockerd") is None, reason="Docker is not installed; `./dalsegno demo --scene docker` installs it"
)
SCENE = ("demo", "--scene", "docker")


@WITH_DOCKER
def test_docker_container_outlives_its_job_and_srun_container_does_not(cache: Path):
    before = of_a_docker()
    with taken_down(at_home(cache)) as cli:
        answer = cli.run(*SCENE)
        assert answer.code == 0, answer
        assert "\x1b" not in answer.out + answer.err and "nothing of it is left" in answer.err
        assert of_docker(cli) == set()
    rows = [re.split(r"  +", line) for line in answer.out.splitlines()]
    facts = {row[0]: tuple(row[1:]) for row in rows if len(row) == 3}
    assert facts["the program's user"] == ("root", "ada")
    assert facts["is a child of"] == ("init > containerd-shim", "slurmstepd")
    assert facts["Slurm counts it as the job's"] == ("no", "yes")
    assert facts["after scancel, node idle"] == ("STILL RUNS", "gone")
    docker, ours = facts["its cgroup"]
    assert "/docker/" in docker and "job_" not in docker
    if read_cgroups().version:  # without cgroups, Slurm tracks processes by their parents
        assert ours.endswith("/job_2/step_0")
    assert "job 2 was given the GPU that the program of job 1 still had" in answer.out
    assert of_a_docker() == before


@WITH_DOCKER
def test_ctrl_c_while_docker_runs_leaves_nothing(cache: Path):
    with taken_down(at_home(cache)) as cli:
        demo = subprocess.Popen(
            cli.argv(*SCENE), env=cli.env, cwd=cli.home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert demo.stderr is not None
        before = list[str]()
        for line in demo.stderr:
            before.append(line)
            if "now: scancel 1" in line:
                break
        demo.send_signal(signal.SIGSTOP)  # stopped while the test inspects it
        assert {"dockerd", "containerd-shim-runc-v2", "sleep"} <= of_docker(cli), before
        demo.send_signal(signal.SIGINT)
        demo.send_signal(signal.SIGCONT)
        said = demo.stderr.read()
        assert demo.wait() == 130, said
        assert "Traceback" not in said
        assert of_docker(cli) == set()


def test_docker_scene_is_refused_before_anything_is_created(cache: Path):
    """The two cases are root without the right to create namespaces, and a machine without Docker."""
    with taken_down(at_home(cache)) as cli:
        powerless = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
        done = subprocess.run(
            [*powerless, *cli.argv(*SCENE)], env=cli.env, cwd=cli.home, capture_output=True, text=True, check=False
        )
        why = (
            "the scene `docker` needs root and virtual hosts"
            if program("dockerd")
            else "Docker is not installed on this machine"
        )
        assert done.returncode == 1 and f"error: {why}" in done.stderr and "hint: " in done.stderr, done
        assert list((cli.home / "clusters").glob("*/state.json")) == []


def of_docker(cli: Cli) -> set[str]:
    """Return Docker's daemon, helpers and container programs that were started for this home's cluster."""
    mark = f"DALSEGNO_MARK={cli.home}/clusters/dalsegno-demo/docker/docker.sock".encode()
    group = f"dalsegno-{Folder(cli.home / 'clusters/dalsegno-demo').id}/docker/"

    def is_of_docker(pid: int) -> bool:
        return mark in environment(pid) or group in text_of(Path(f"/proc/{pid}/cgroup"))

    return {os.path.basename(words[0]) for process in find(is_of_docker) if (words := arguments(process.pid))}


def of_a_docker() -> set[str]:
    """Return files of a Docker on the machine itself, outside the cluster's hosts."""
    names = ("run/docker*", "run/containerd*", "run/runc*", "var/lib/docker*", "etc/docker/*")
    return {str(path) for name in names for path in Path("/").glob(name)}


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
