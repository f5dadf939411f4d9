"""Tests that every field of the cluster file is read by code or refused."""

import ast
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import dalsegno
from dalsegno.spec import facts
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import _children
from dalsegno.spec.targets import TARGETS
from dalsegno.spec.unbuilt import UNBUILT_FIELDS, UNBUILT_TARGETS

SOURCE = Path(dalsegno.__file__).parent
REFUSED = {each.path for each in UNBUILT_FIELDS}
# Facts that no code reads: the field of the first is refused, and the sizes of the second come from the catalog.
UNREAD_FACTS = {"User.ssh_keys", "Node.instance"}


def attributes(files: Iterable[Path]) -> set[str]:
    trees = (ast.parse(file.read_text()) for file in files)
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_field_of_a_built_target_becomes_a_fact_or_is_refused():
    read = attributes([SOURCE / "spec/resolve.py", SOURCE / "spec/layout.py"])
    blocks = dict(_children(ClusterSpec))
    fields = {name for name in ClusterSpec.model_fields if name not in UNBUILT_TARGETS}
    inner = {f"{name}.{field}" for name in fields & set(blocks) for field in blocks[name].model_fields}
    silent = {path for path in fields | inner if path.split(".")[-1] not in read}
    assert {path for path in silent if path not in REFUSED and path.split(".")[0] not in REFUSED} == set()


def test_every_fact_is_read_outside_the_spec_package():
    read = attributes(file for file in SOURCE.rglob("*.py") if "spec" not in file.relative_to(SOURCE).parts)
    classes = [each for each in vars(facts).values() if dataclasses.is_dataclass(each) and each is not facts.Storage]
    unread = {f"{each.__name__}.{field.name}" for each in classes for field in dataclasses.fields(each)}
    assert {name for name in unread if name.split(".")[1] not in read} == UNREAD_FACTS


def test_every_unimplemented_field_exists_in_the_model():
    blocks = dict(_children(ClusterSpec))
    for path in REFUSED:
        block, _, field = path.partition(".")
        assert block in ClusterSpec.model_fields and (not field or field in blocks[block].model_fields), path
    assert {"local", *UNBUILT_TARGETS} == set(TARGETS)
