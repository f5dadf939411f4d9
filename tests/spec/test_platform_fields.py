"""Every field of the cluster file is applied, refused or without meaning on each remote target. None is dropped."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.spec.field_table import REASONS, TABLE, TARGETS

import dalsegno
from dalsegno.errors import SpecError
from dalsegno.spec.aws_facts import PclusterSettings
from dalsegno.spec.checks.platforms import REFUSALS
from dalsegno.spec.load import parse_spec
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.platform_facts import HyperPodFacts, InstanceGroupFacts, OciFacts
from dalsegno.spec.section import Section, _children
from dalsegno.spec.targets import TARGETS as BLOCKS

FILES: dict[str, dict[str, Any]] = {
    "ssh": {"ssh": {}, "partitions": [{"name": "train", "nodes": 2}]},
    "parallelcluster": {
        "parallelcluster": {"region": "us-east-1"},
        "partitions": [{"name": "train", "nodes": 2, "instance": "p5.48xlarge"}],
    },
    "hyperpod": {
        "hyperpod": {
            "region": "us-east-1", "bucket": "sagemaker-x", "execution_role": "arn:aws:iam::123456789012:role/x"
        },
        "partitions": [{"name": "train", "nodes": 2, "instance": "ml.p5.48xlarge"}],
    },
    "oci": {
        "oci": {"region": "eu-frankfurt-1", "compartment": "ocid1.compartment.oc1..aaaa", "ad": "EU-FRANKFURT-1-AD-1"},
        "partitions": [{"name": "train", "nodes": 2, "instance": "BM.GPU.H100.8"}],
    },
}  # fmt: skip
# The entry of a list in which a field is set.
ENTRIES = {"users": {"name": "ada"}, "accounts": {"name": "ml"}, "qos": {"name": "night"}}
STORAGE = {"ssh": "folder", "parallelcluster": "efs", "hyperpod": "lustre", "oci": "fss"}


@dataclasses.dataclass(frozen=True)
class Row:
    path: str
    value: str
    fates: dict[str, str]


def rows() -> list[Row]:
    found = []
    for line in TABLE.strip().splitlines():
        path, rest = line.split(None, 1)
        value, *fates = rest.rsplit(None, len(TARGETS))
        found.append(Row(path, value, dict(zip(TARGETS, fates, strict=True))))
    return found


def fields(model: type[Section] = ClusterSpec, prefix: str = "") -> dict[str, bool]:
    """Return all fields below a section, and for each whether it has fields of its own."""
    inner = dict(_children(model))
    found: dict[str, bool] = {}
    for name in model.model_fields:
        if prefix or name not in BLOCKS:
            found[f"{prefix}{name}"] = name in inner
            found |= fields(inner[name], f"{prefix}{name}.") if name in inner else {}
    return found


def test_the_table_has_every_field_of_the_cluster_file():
    known, listed = fields(), {row.path: row for row in rows()}
    assert {path for path in listed if path not in known} == set()
    closed = {path for path, row in listed.items() if not {*row.fates.values()} & {*"AP"}}
    leaves = {path for path, has_fields in known.items() if not has_fields}
    assert {each for each in leaves - listed.keys() if not any(each.startswith(f"{path}.") for path in closed)} == set()


def test_every_letter_of_the_table_has_a_meaning():
    assert {fate for row in rows() for fate in row.fates.values()} == {*REASONS, *"ARP."}


def set_in(section: dict[str, Any], path: list[str], value: Any, target: str) -> None:
    name, *rest = path
    if not rest:
        section[name] = value
    elif name in ("partitions", "storage", *ENTRIES):
        entry = {"name": "data", "mount": "/data", "type": STORAGE[target]} if name == "storage" else ENTRIES.get(name)
        set_in(section.setdefault(name, [dict(entry or {})])[0], rest, value, target)
    else:
        set_in(section.setdefault(name, {}), rest, value, target)


def problems_of(target: str, path: str, value: str) -> list[str]:
    """Return the problems of a small file with this field that are about the field."""
    content = yaml.safe_load(yaml.safe_dump({"name": "demo", "target": target, **FILES[target]}))
    set_in(content, path.split("."), yaml.safe_load(value), target)
    try:
        parse_spec(yaml.safe_dump(content), "c.yaml")
    except SpecError as error:
        words = {path.rpartition(".")[2], path}
        return [each.what for each in error.problems if any(f"`{word}`" in each.what for word in words)]
    return []


# Values that are refused if they are alone, because another field is missing. Other tests have them together.
COMBINED = {"slurm.qos.max_time", "slurm.qos.max_tres_per_user", "slurm.qos.max_jobs_per_user", "slurm.qos.group_tres"}
COMBINED |= {"accounts.group_tres", "users.max_gpus", "users.default_account", "users.allow_privileged"}
COMBINED |= {"partitions.preempt_mode", "containers.images"}


def cases(letters: str) -> list[tuple[str, str, str]]:
    return [
        (target, row.path, row.value)
        for row in rows()
        for target in TARGETS
        if row.fates[target] in letters and row.value != "-" and not (letters == "A" and row.path in COMBINED)
    ]


@pytest.mark.parametrize(("target", "path", "value"), cases("R"))
def test_field_that_the_target_cannot_apply_is_refused_by_validate(target, path, value):
    assert problems_of(target, path, value)


@pytest.mark.parametrize(("target", "path", "value"), cases("A"))
def test_field_that_the_target_applies_is_accepted(target, path, value):
    assert problems_of(target, path, value) == []


def test_every_refusal_is_in_the_table():
    fates = {row.path: row.fates for row in rows()}
    for refusal in REFUSALS:
        for path in refusal.paths:
            assert [fates[path][target] for target in refusal.targets] == ["R"] * len(refusal.targets), path


def attributes(folder: Path) -> set[str]:
    trees = (ast.parse(file.read_text()) for file in folder.rglob("*.py"))
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize(
    ("target", "facts"),
    [
        ("parallelcluster", PclusterSettings),
        ("hyperpod", HyperPodFacts),
        ("hyperpod", InstanceGroupFacts),
        ("oci", OciFacts),
    ],
)
def test_every_setting_of_a_platforms_own_block_is_read_by_its_target(target, facts):
    read = attributes(Path(dalsegno.__file__).parent / "targets" / target)
    assert {field.name for field in dataclasses.fields(facts)} - read == set()


def test_refusal_names_the_owner_the_reason_and_what_to_do_instead():
    content = {"name": "demo", "target": "oci", **FILES["oci"], "users": [{"name": "ada", "groups": ["video"]}]}
    with pytest.raises(SpecError) as error:
        parse_spec(yaml.safe_dump(content), "c.yaml")
    (problem,) = (each for each in error.value.problems if "`groups` of user" in each.what)
    assert problem.what == "`groups` of user `ada` is not possible on OCI"
    reason, instead = "the groups are in the stack's LDAP directory", "use `cluster group` on the controller"
    assert problem.hint == f"remove it: {reason}; {instead}"
