"""`dalsegno compare`, and the target that `dalsegno init` chooses."""

from __future__ import annotations

import json
import re

import pytest

from dalsegno.errors import UsageError
from dalsegno.spec.choices import (
    Needs,
    TrainingDuration,
    TrainingPlace,
    TrainingPurpose,
    choices,
    fit_starter,
    recommend,
)
from dalsegno.spec.load import parse_spec
from dalsegno.spec.model import starter
from dalsegno.spec.targets import TARGETS

AWS = Needs(TrainingPlace.AWS)


def test_every_target_is_compared_and_every_other_choice_says_when_it_is_right():
    assert {choice.target for choice in choices()} - {""} == set(TARGETS)
    assert all(choice.choose_it for choice in choices() if not choice.target)
    assert any("Kubernetes" in choice.orchestrator for choice in choices())


@pytest.mark.parametrize(
    ("needs", "target"),
    [
        (Needs(), "local"),
        (Needs(TrainingPlace.OWN_HOSTS), "ssh"),
        (Needs(TrainingPlace.RUNNING_SLURM), "existing"),
        (Needs(TrainingPlace.OCI), "oci"),
        (AWS, "parallelcluster"),
        (Needs(TrainingPlace.AWS, duration=TrainingDuration.WEEKS), "hyperpod"),
        (Needs(TrainingPlace.AWS, TrainingPurpose.PRETRAINING), "hyperpod"),
        (Needs(TrainingPlace.AWS, duration=TrainingDuration.WEEKS, managed=False), "parallelcluster"),
        (Needs(TrainingPlace.AWS, managed=True, spot=True), "parallelcluster"),
        (Needs(spot=True), "parallelcluster"),
    ],
)
def test_target_fits_the_needs(needs, target):
    found = recommend(needs)
    assert found.target == target
    assert len(found.why) == 2


def test_inference_is_refused_with_the_choices_that_fit():
    with pytest.raises(UsageError, match="belong on Kubernetes") as caught:
        recommend(Needs(purpose=TrainingPurpose.INFERENCE))
    assert "dalsegno compare" in caught.value.hint


def test_limits_of_the_recommended_target_are_named():
    found = recommend(Needs(TrainingPlace.OWN_HOSTS, managed=True, spot=True, mig=True))
    assert len(found.cautions) == 3
    assert recommend(AWS).cautions == ()


def test_starter_has_the_requested_settings():
    needs = Needs(TrainingPlace.AWS, containers=True, spot=True)
    spec = parse_spec(fit_starter(starter("parallelcluster"), needs, "parallelcluster"), "cluster.yaml")
    assert spec.parallelcluster is not None and spec.parallelcluster.capacity_type == "SPOT"
    assert spec.containers.enabled is True


def test_hyperpod_starter_always_enables_containers():
    for wanted in (False, True):
        needs = Needs(TrainingPlace.AWS, purpose=TrainingPurpose.PRETRAINING, containers=wanted)
        found = recommend(needs)
        assert (found.target, found.cautions) == ("hyperpod", ())
        spec = parse_spec(fit_starter(starter("hyperpod"), needs, "hyperpod"), "cluster.yaml")
        assert spec.containers.enabled is True


def test_init_ask_asks_each_question_and_writes_the_chosen_file(tmp_path):
    from click.testing import CliRunner

    from dalsegno.cli.cluster.cluster_file import init

    file = tmp_path / "cluster.yaml"
    answers = ["mars", "aws", "pretraining", "weeks", "y", "n", "n", "n"]
    done = CliRunner().invoke(init, ["--ask", str(file)], input="".join(f"{each}\n" for each in answers))
    assert done.exit_code == 0, done.output
    assert "target: hyperpod" in file.read_text() and "mars" not in file.read_text()
    questions = ("How long does one training run?", "Should the provider repair broken machines?", "spot instances?")
    assert all(question in done.output for question in questions)
    assert "hyperpod: AWS replaces broken GPU machines by itself" in done.output


def test_init_ask_skips_what_a_flag_answers(tmp_path):
    from click.testing import CliRunner

    from dalsegno.cli.cluster.cluster_file import init

    file = tmp_path / "cluster.yaml"
    answers = ["pretraining", "days", "n", "n", "n"]
    words = ["--ask", "--on", "oci", str(file)]
    done = CliRunner().invoke(init, words, input="".join(f"{each}\n" for each in answers))
    assert done.exit_code == 0, done.output
    assert "Where" not in done.output and "provider repair" not in done.output
    assert "target: oci" in file.read_text()


def test_init_writes_the_file_of_the_chosen_target_and_says_why(command, tmp_path):
    file = tmp_path / "cluster.yaml"
    done = command("init", file, "--on", "aws", "--for", "pretraining")
    assert done.returncode == 0
    assert "target: hyperpod" in file.read_text()
    assert "hyperpod: AWS replaces broken GPU machines by itself" in done.stderr
    refused = command("init", tmp_path / "other.yaml", "--for", "inference")
    assert refused.returncode == 2 and not (tmp_path / "other.yaml").exists()
    assert command("init", tmp_path / "x.yaml", "--target", "ssh", "--on", "aws").returncode == 2


def test_compare_prints_a_table_and_json(command):
    text = command("compare", "hyperpod", "eks").stdout
    assert re.search(r"recovery with us +runs continue at once", text)
    assert "Dal Segno does not create it" in text
    head, *rows = command("compare").stdout.splitlines()
    assert head.split() == ["local", "ssh", "parallelcluster"], "the traits are rows, and the places are columns"
    assert max(map(len, [head, *rows])) <= 120
    assert [line.split() for line in rows if line.startswith(" ") and "hyperpod" in line.split()] == [
        ["hyperpod", "oci", "existing"]
    ]
    assert len([line for line in rows if line.startswith("spot ")]) == 4, "one row of each table"
    found = json.loads(command("compare", "--json").stdout)
    assert {each["name"] for each in found} >= {"hyperpod", "eks", "slurm-on-kubernetes"}
    wrong = command("compare", "hyperpd")
    assert wrong.returncode == 2 and "did you mean `hyperpod`?" in wrong.stderr
