"""`dalsegno plan --write`: the files of ParallelCluster and CloudFormation, before anything exists on AWS."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dalsegno.targets.parallelcluster.folder import PclusterFolder, read_state, write_state
from dalsegno.targets.parallelcluster.platform_files import render_files
from tests.targets.parallelcluster.files import FILES, MINIMAL, WALKTHROUGH, cluster_of

GOLDEN = Path(__file__).parents[2] / "golden/parallelcluster"


@pytest.mark.parametrize("name", FILES)
def test_files_are_those_that_up_sends_with_stand_ins_for_unknown_ids(name: str):
    files = render_files(cluster_of(FILES[name]), None, "0.1-abc")
    heading, _, config = files["cluster.yaml"].partition("\n")
    assert "stand for a resource of prerequisites.json" in heading
    assert config == (GOLDEN / f"{name}.yaml").read_text()
    recorded = json.loads((GOLDEN / f"{name}-prerequisites.json").read_text().replace("dalsegno-bucket", "-"))
    assert json.loads(files["prerequisites.json"].replace("dalsegno-new-bucket", "-")) == recorded
    scripts = {path: text for path, text in files.items() if path.startswith("scripts/")}
    assert sorted(scripts) == ["scripts/compute.sh", "scripts/head.sh", "scripts/login.sh"]
    bucket = "our-scripts" if name == "full" else "dalsegno-new-bucket"
    assert all(f"s3://{bucket}/dalsegno/" in text and text.startswith("#!/bin/bash\n") for text in scripts.values())
    assert render_files(cluster_of(FILES[name]), None, "0.1-abc") == files, "the same file gives the same text"


def test_plan_writes_the_files_without_a_query_to_aws_or_pcluster(tmp_path: Path, command, monkeypatch):
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    (tmp_path / "cluster.yaml").write_text(WALKTHROUGH)
    done = command("plan", tmp_path / "cluster.yaml", "--write", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "out/cluster.yaml").read_text())
    assert config["Scheduling"]["SlurmQueues"][0]["Name"] == "compute-gpu"
    assert "AWS::FSx::FileSystem" in (tmp_path / "out/prerequisites.json").read_text()
    assert not (tmp_path / "home/clusters/ml-cluster").exists(), "nothing is recorded"


def test_plan_lists_the_written_files_as_json(tmp_path: Path, command, monkeypatch):
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    (tmp_path / "cluster.yaml").write_text(WALKTHROUGH)
    done = command("plan", tmp_path / "cluster.yaml", "--json", "--write", tmp_path / "out")
    answer = json.loads(done.stdout)
    assert (answer["cluster"], answer["target"], done.returncode) == ("ml-cluster", "parallelcluster", 0)
    assert {Path(each).name for each in answer["files"]} == {
        "cluster.yaml", "prerequisites.json", "head.sh", "compute.sh", "login.sh"
    }  # fmt: skip
    assert all(Path(each).is_file() for each in answer["files"])


def test_plan_writes_over_its_own_files_and_over_no_others(tmp_path: Path, command, monkeypatch):
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    source, folder = tmp_path / "cluster.yaml", tmp_path / "out"
    source.write_text(WALKTHROUGH)
    refused = command("plan", source, "--write", tmp_path)
    assert (refused.returncode, source.read_text()) == (1, WALKTHROUGH)
    assert "cluster.yaml exists, and `plan --write` did not write it" in refused.stderr
    assert command("plan", source, "--write", folder).returncode == 0
    stale = folder / "scripts/old.sh"
    stale.write_text("")
    with (folder / ".dalsegno-files").open("a") as names:
        names.write("scripts/old.sh\n")
    (folder / "notes.txt").write_text("mine")
    assert command("plan", source, "--write", folder).returncode == 0
    assert not stale.exists(), "it was written for an earlier file"
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who trusts no list of another user")
def test_root_removes_and_replaces_nothing_that_the_list_of_another_user_names(tmp_path: Path, command, monkeypatch):
    monkeypatch.setenv("DALSEGNO_HOME", str(tmp_path / "home"))
    (tmp_path / "source.yaml").write_text(WALKTHROUGH)
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("cluster.yaml", "stale.sh"):
        (folder / name).write_text("kept")
    (folder / ".dalsegno-files").write_text("cluster.yaml\nstale.sh\n")
    os.chown(folder, 1234, 1234)
    assert command("plan", tmp_path / "source.yaml", "--write", folder).returncode == 1
    assert [(folder / name).read_text() for name in ("cluster.yaml", "stale.sh")] == ["kept", "kept"]


def test_files_of_a_cluster_that_exists_name_its_bucket(stage):
    stage.up()
    folder = PclusterFolder(stage.folder)
    state = read_state(folder)
    assert state is not None
    write_state(folder, replace(state, bucket="dalsegno-demo-1-us-east-1"))
    files = stage.target().platform_files(cluster_of(MINIMAL))
    assert "s3://dalsegno-demo-1-us-east-1/dalsegno/demo/head.sh" in files["cluster.yaml"]
    assert '"BucketName": "dalsegno-demo-1-us-east-1"' in files["prerequisites.json"], "`up` keeps it in the stack"
    assert not [call for call in stage.calls if call[0] == "update-cluster"]
