"""Commands that run on the head node of a cluster on other machines, and those that stay on this machine."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.cli.forwarding import FORWARDED, cluster_named, runs_here
from dalsegno.cli.main import COMMANDS, cli
from dalsegno.errors import UsageError
from dalsegno.programs import own_argv
from dalsegno.spec.facts import Cluster, Containers, Node, Partition, SshAccess, SshHost, facts_to_json
from dalsegno.targets.ssh.folder import SshFolder, SshStage, SshState, write_ssh_state

HERE = {"old.json", "slurm-7.out", "image.sqsh", "lab.yaml", "./nccl-tests", "rootfs"}


def here(line: str, **env: str) -> bool:
    return runs_here(line.split(), cli, env, lambda name: name in HERE)


@pytest.mark.parametrize(
    "line",
    [
        "bench all_reduce -b 8 -e 16G -f 2 --nodes 2 --gpus-per-node 8",
        "bench pairs --nodes=4",
        "bench storage /fsx /tmp --nodes 8",
        "bench build /fsx/nccl-tests.tar.gz --nodes 1",
        "bench read /fsx/slurm-9.out",
        "certify --quick",
        "certify --against /fsx/march.json",
        "image import ubuntu:24.04",
        "image ls",
        "image rm ubuntu",
        "image verify",
        "containers check",
        "containers ls",
        "drill --faults 3",
        "run train.py",
    ],
)
def test_command_about_the_cluster_runs_on_its_head(line):
    assert not here(line)


@pytest.mark.parametrize(
    "line",
    [
        "bench all_reduce --nproc 2",
        "bench ddp --nproc 2",
        "bench build ./nccl-tests",
        "bench read slurm-7.out",
        "bench read -",
        "bench read",
        "bench",
        "bench all_reduce --help",
        "bench all_reduce --nodes 2 --no-such-option",
        "image import ubuntu -o image.sqsh",
        "image build rootfs -o image.sqsh",
        "image show image.sqsh",
        "image --help",
        "containers check lab.yaml",
        "monitor up",
        "certify -h",
    ],
)
def test_command_with_files_or_processes_of_this_machine_runs_here(line):
    assert here(line)


def test_image_store_that_the_user_names_is_on_this_machine():
    assert here("image import ubuntu", DALSEGNO_IMAGES="/images")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("certify --against old.json", "old.json is on this machine, but the cluster is measured from its head node"),
        ("bench build ./nccl-tests --nodes 1", "./nccl-tests is on this machine, but `--nodes` compiles it"),
        ("image build rootfs", "`image build` reads files of this machine, but the image store is on the cluster"),
        ("image import image.sqsh", "`image import` reads files of this machine"),
        ("image import docker-archive:a.tar", "`image import` reads files of this machine"),
    ],
)
def test_file_of_this_machine_that_the_head_would_need_is_refused_with_what_to_do(line, what):
    with pytest.raises(UsageError, match=what) as caught:
        here(line)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("nodes --cluster lab", "lab"),
        ("nodes --cluster=lab", "lab"),
        ("nodes -M lab", "lab"),
        ("nodes -Mlab", "lab"),
        ("nodes", None),
        ("run train.py -Mlab", None),
        ("run -- train -Mlab", None),
        ("run ./train.sh -Mlarge", None),
        ("run -N 2 -Mlab ./train.sh -Mlarge", "lab"),
        ("run --nproc_per_node 8 -M lab ./train.sh", "lab"),
        ("run --nodes=2 --cluster=lab ./train.sh --cluster theirs", "lab"),
        ("run", None),
        ("submit train.sh -Mlarge", None),
        ("submit --cluster lab train.sh -Mlarge", "lab"),
        ("torchrun -m pkg.train -Mlarge", None),
        ("torchrun --nnodes 2 ./train -Mlarge", None),
    ],
)
def test_cluster_is_found_in_each_form_of_the_option(line: str, name: str | None):
    assert cluster_named(line.split(), cli) == name


def test_every_forwarded_command_exists():
    assert COMMANDS.keys() >= FORWARDED


SSH = SshAccess((SshHost("head", "192.0.2.10", "ops"), SshHost("gpu-1", "192.0.2.11", "ops")))
CLUSTER = Cluster("lab", "ssh", (Node("gpu-1", 8, 1024),), (Partition("train", ("gpu-1",)),), ssh=SSH)


@pytest.mark.parametrize(
    ("line", "folder", "asked"),
    [
        ("bench all_reduce --nodes 2", "", "192.0.2.10 /usr/local/bin/dalsegno bench all_reduce --nodes 2"),
        ("certify --quick", "", "192.0.2.10 /usr/local/bin/dalsegno certify --quick"),
        ("image ls", "", "192.0.2.10 /usr/local/bin/dalsegno image ls"),
        ("image ls", "/home/images", "192.0.2.10 sudo -- /usr/local/bin/dalsegno image ls"),
        ("containers check", "", "192.0.2.10 /usr/local/bin/dalsegno containers check"),
    ],
)
def test_command_reaches_the_head_over_ssh(tmp_path: Path, line, folder, asked):
    state = SshFolder(tmp_path / "clusters" / "lab")
    write_ssh_state(state, SshState(SshStage.UP, "c0ffee", "head", SSH))
    state.applied.write_text(json.dumps(facts_to_json(replace(CLUSTER, containers=Containers(True, folder)))))
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\necho "$*"\n')
    ssh.chmod(0o755)
    env = {"DALSEGNO_HOME": str(tmp_path), "PATH": f"{ssh.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    # A process of its own, because it becomes ssh
    done = subprocess.run([*own_argv(), *line.split()], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()[-len(asked) :]) == (0, asked), done.stderr
    assert ("where the files that it writes stay" in done.stderr) == line.startswith("certify")
