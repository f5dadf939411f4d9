"""The schema for editors, and the starter files."""

import pytest

from dalsegno.errors import UsageError
from dalsegno.spec import json_schema, parse_spec, starter
from dalsegno.spec.target_names import TARGETS

SCHEMA = json_schema()


def test_it_says_what_a_file_needs():
    assert SCHEMA["required"] == ["name", "target", "partitions"]
    assert SCHEMA["additionalProperties"] is False
    assert SCHEMA["properties"]["target"]["enum"] == list(TARGETS)


@pytest.mark.parametrize("name", ["ClusterSpec", *SCHEMA["$defs"]])
def test_every_key_is_described(name):
    model = SCHEMA if name == "ClusterSpec" else SCHEMA["$defs"][name]
    assert model["description"]
    assert [key for key, value in model["properties"].items() if not value.get("description")] == []


def allows(schema, value):
    """A structural check, enough for the starters: the shapes, the keys and the words."""
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
def test_the_starter_of_a_target_is_a_good_file_in_both_eyes(target):
    import yaml

    text = starter(target, "my-cluster")
    spec = parse_spec(text)
    assert (spec.name, spec.target) == ("my-cluster", target)
    assert allows(SCHEMA, yaml.safe_load(text)), "an editor would complain"


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_starter_has_in_comments_is_good_too(target):
    import yaml

    text = starter(target)
    # Whole blocks that are commented out, one after the other, so that they do not contradict each other.
    lines = [
        line for line in text.splitlines() if line.startswith("# ") and not line.startswith(("#   dalsegno", "# A "))
    ]
    blocks: list[list[str]] = []
    for line in lines:
        if not line.startswith("#  "):
            blocks.append([])
        blocks[-1].append(line[2:])
    for block in blocks:
        addition = "\n".join(block)
        key = addition.partition(":")[0]
        if key not in yaml.safe_load(text):
            parse_spec(f"{text}\n{addition}\n" + ("slurm: {}\n" if False else ""))


def test_an_unknown_target_is_guessed():
    with pytest.raises(UsageError) as caught:
        starter("hyperpd")
    assert (caught.value.what, caught.value.hint) == ("there is no target `hyperpd`", "did you mean `hyperpod`?")
