"""Tests of `init`, `validate` and `schema`."""

import json
import re

import pytest
import yaml
from click.testing import CliRunner

from dalsegno.cli.cluster.cluster_file import init, schema, validate
from dalsegno.errors import DalsegnoError, SpecError, UsageError
from dalsegno.spec.targets import TARGETS


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(command, *words):
        done = CliRunner().invoke(command, list(words))
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return call


@pytest.mark.parametrize("target", TARGETS)
def test_init_writes_a_valid_file(run, target):
    assert run(init, "--target", target, "--name", "mine").exit_code == 0
    done = run(validate)
    assert done.exit_code == 0
    assert done.stdout.startswith(f"cluster.yaml is valid: mine on {target}, ")


@pytest.mark.parametrize("target", TARGETS)
def test_init_names_the_examples_to_replace_and_the_next_commands(run, tmp_path, target):
    said = run(init, "own.yaml", "--target", target).stderr
    written = yaml.safe_load((tmp_path / "own.yaml").read_text())
    named = [word.split(".") for word in re.findall(r"`([a-z_.]+)`", said)]
    assert all(path[0] in written and (len(path) == 1 or path[1] in written[path[0]]) for path in named), said
    examples = {"execution_role", "bucket", "subnets", "security_groups", "compartment", "ad", "template", "hosts"}
    assert examples & {*(written.get(target) or ())} <= {path[-1] for path in named}
    commands = [words.split()[1] for words in re.findall(r"`(dalsegno [^`]*)`", said)]
    own = {"local": ["validate", "up"], "existing": ["adopt", "validate", "adopt", "run"]}
    assert commands == own.get(target, ["validate", "plan", "up"])
    assert all("own.yaml" in words for words in re.findall(r"`dalsegno ([^`]*)`", said) if "run" not in words)


@pytest.mark.parametrize(
    ("flag", "target", "warning"),
    [
        ("--spot", "hyperpod", "target `hyperpod` has no spot instances"),
        ("--spot", "local", "target `local` has no spot instances"),
        ("--managed", "parallelcluster", "with target `parallelcluster`, nobody but you manages the machines"),
        ("--mig", "oci", "Dal Segno does not create MIG slices; create them in the image, or compare `eks`"),
        ("--spot", "parallelcluster", ""),
        ("--managed", "hyperpod", ""),
        ("--self-managed", "ssh", ""),
    ],
)
def test_init_warns_of_a_need_that_the_named_target_does_not_meet(run, flag, target, warning):
    said = run(init, "--target", target, flag).stderr.splitlines()
    assert [line for line in said if line.startswith("warning: ")] == ([f"warning: {warning}"] if warning else [])


def test_validate_prints_a_summary_line(run, tmp_path):
    text = "name: demo\ntarget: local\npartitions: [{name: t, nodes: 4, spares: 1, instance: p5.48xlarge}]\n"
    (tmp_path / "c.yaml").write_text(text)
    assert run(validate, "c.yaml").stdout == (
        "c.yaml is valid: demo on local, 4 nodes and 1 spare in 1 partition, 32 GPUs\n"
    )


def test_validate_reports_all_problems(run, tmp_path):
    (tmp_path / "c.yaml").write_text("name: A\ntarget: b\npartitions: []\n")
    with pytest.raises(SpecError) as caught:
        run(validate, "c.yaml")
    assert [problem.where for problem in caught.value.problems] == ["c.yaml:1", "c.yaml:2", "c.yaml:3"]


def test_validate_as_json(run, tmp_path):
    run(init, "c.yaml")
    good = json.loads(run(validate, "c.yaml", "--json").stdout)
    assert (good["valid"], good["nodes"], good["problems"]) == (True, 4, [])
    (tmp_path / "c.yaml").write_text("name: A\ntarget: local\npartitions: [{name: t, nodes: 1}]\n")
    done = run(validate, "c.yaml", "--json")
    bad = json.loads(done.stdout)
    assert (done.exit_code, bad["valid"], bad["problems"][0]["where"]) == (1, False, "c.yaml:1")


def test_init_does_not_overwrite(run, tmp_path):
    run(init)
    with pytest.raises(DalsegnoError, match="the file already exists"):
        run(init)
    assert run(init, "--force", "--name", "other").exit_code == 0
    assert "name: other" in (tmp_path / "cluster.yaml").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


@pytest.mark.parametrize("name", ["Bad Name", "a # b", "x\ntarget: ssh", "", "'q'"])
def test_init_refuses_an_invalid_cluster_name(run, tmp_path, name):
    with pytest.raises(DalsegnoError):
        run(init, "--name", name)
    assert list(tmp_path.iterdir()) == []


def test_init_refuses_an_unknown_target(run):
    with pytest.raises(UsageError, match="there is no target `aws`"):
        run(init, "--target", "aws")


def test_init_into_a_folder_suggests_a_file_in_it(run, tmp_path):
    with pytest.raises(DalsegnoError) as caught:
        run(init, ".")
    assert caught.value.hint == "name a file in it: `cluster.yaml`"


def test_schema_is_json(run):
    assert json.loads(run(schema).stdout)["title"] == "Dal Segno cluster file"
