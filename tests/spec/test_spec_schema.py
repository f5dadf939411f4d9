"""Tests of the JSON schema and the starter files."""

import pytest
import yaml

from dalsegno.errors import UsageError
from dalsegno.spec.load import parse_spec
from dalsegno.spec.model import json_schema, starter
from dalsegno.spec.targets import TARGETS

SCHEMA = json_schema()


def test_schema_lists_required_keys():
    assert SCHEMA["required"] == ["name", "target", "partitions"]
    assert SCHEMA["additionalProperties"] is False
    assert SCHEMA["properties"]["target"]["enum"] == list(TARGETS)


@pytest.mark.parametrize("name", ["ClusterSpec", *SCHEMA["$defs"]])
def test_every_key_is_described(name):
    model = SCHEMA if name == "ClusterSpec" else SCHEMA["$defs"][name]
    assert model["description"]
    assert [key for key, value in model["properties"].items() if not value.get("description")] == []


def allows(schema, value):
    """Return whether a value matches the schema in types, keys and enums, which is enough for the starters."""
    if "$ref" in schema:
        return allows(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], value)
    if "anyOf" in schema:
        return any(allows(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", False)
        fits = [
            allows(known[key], each) if key in known else other and allows(other, each) for key, each in value.items()
        ]
        return schema.get("type") == "object" and all(fits) and set(schema.get("required", [])) <= value.keys()
    if isinstance(value, list):
        return schema.get("type") == "array" and all(allows(schema["items"], each) for each in value)
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(isinstance(value, kinds[each]) for each in types if each in kinds)


@pytest.mark.parametrize("target", TARGETS)
def test_starter_is_valid_for_schema_and_model(target):
    text = starter(target, "my-cluster")
    spec = parse_spec(text)
    assert (spec.name, spec.target) == ("my-cluster", target)
    assert allows(SCHEMA, yaml.safe_load(text)), "an editor would complain"


@pytest.mark.parametrize("target", TARGETS)
def test_commented_parts_of_a_starter_are_valid(target):
    text = starter(target)
    asides = [part for part in text.split("\n\n") if all(line.startswith("#") for line in part.splitlines())]
    for aside in asides:
        block = "\n".join(line[2:] for line in aside.splitlines())
        parse_spec(f"{text}\n{block}\n")


def test_unknown_target_gets_a_suggestion():
    with pytest.raises(UsageError) as caught:
        starter("hyperpd")
    assert (caught.value.what, caught.value.hint) == ("there is no target `hyperpd`", "did you mean `hyperpod`?")
