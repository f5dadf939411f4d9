"""Tests that every field of the cluster file is read by code or refused."""

import ast
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import dalsegno
from dalsegno.spec import aws_facts, facts, platform_facts
from dalsegno.spec.checks.targets import UNBUILT_FIELDS
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import _children

SOURCE = Path(dalsegno.__file__).parent
ATTRIBUTE = re.compile(r"\.(\w+)")
REFUSED = {each.path for each in UNBUILT_FIELDS}


def read_names(names: Iterable[str], files: Iterable[Path]) -> set[str]:
    """Return the names that are used as attributes in a file.

    Parsing takes long, so only files that contain a missing name are parsed.
    """
    missing = set(names)
    for text in (file.read_text() for file in files):
        if missing & set(ATTRIBUTE.findall(text)):
            missing -= {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    return set(names) - missing


def test_every_field_of_a_built_target_becomes_a_fact_or_is_refused():
    blocks = dict(_children(ClusterSpec))
    fields = set(ClusterSpec.model_fields)
    inner = {f"{name}.{field}" for name in fields & set(blocks) for field in blocks[name].model_fields}
    names = {path: path.split(".")[-1] for path in fields | inner}
    modules = ("resolve", "resolve_aws", "resolve_platform", "layout", "targets")
    read = read_names(names.values(), [SOURCE / "spec" / f"{name}.py" for name in modules])
    silent = {path for path, name in names.items() if name not in read}
    assert {path for path in silent if path not in REFUSED and path.split(".")[0] not in REFUSED} == set()


def test_every_fact_is_read_outside_the_spec_package():
    every = {**vars(facts), **vars(aws_facts), **vars(platform_facts)}
    classes = [each for each in every.values() if dataclasses.is_dataclass(each)]
    names = {f"{each.__name__}.{field.name}": field.name for each in classes for field in dataclasses.fields(each)}
    files = (file for file in SOURCE.rglob("*.py") if "spec" not in file.relative_to(SOURCE).parts)
    read = read_names(names.values(), files)
    assert {fact for fact, name in names.items() if name not in read} == set()


def test_every_unimplemented_field_exists_in_the_model():
    blocks = dict(_children(ClusterSpec))
    for path in REFUSED:
        block, _, field = path.partition(".")
        assert block in ClusterSpec.model_fields and (not field or field in blocks[block].model_fields), path
