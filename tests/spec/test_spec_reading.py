"""Tests of reading YAML into values with line numbers."""

import pytest

from dalsegno.errors import SpecError
from dalsegno.spec.document import MAX_DEPTH, read_document
from dalsegno.spec.load import load_spec, parse_spec

SMALLEST = "name: demo\ntarget: local\npartitions: [{name: train, nodes: 4}]\n"


def only_problem(text):
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "c.yaml")
    (problem,) = caught.value.problems
    return problem.where, problem.what


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30:00", "1:30:00"),
        ("2030-01-01", "2030-01-01"),
        (".inf", ".inf"),
        ("1-00:00:00", "1-00:00:00"),
        ("é", "é"),
    ],
)
def test_scalars_have_the_expected_types(text, value):
    assert read_document(f"a: {text}", "c.yaml").data == {"a": value}


def test_every_value_has_its_line():
    lines = read_document("a: 1\nb:\n  - x\n  - c: 2\n", "c.yaml").lines
    assert lines == {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4}


def test_anchors_aliases_and_merge_keys_are_resolved():
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: {<<: [*x, {c: 4}]}\n"
    assert read_document(text, "c.yaml").data == {
        "x": {"a": 1, "b": 2},
        "y": {"a": 1, "b": 3},
        "z": {"a": 1, "b": 2, "c": 4},
    }


def test_keys_with_x_prefix_are_ignored():
    text = "x-node: &node {cpus: 4, memory: 4G}\n" + SMALLEST.replace("{name", "{<<: *node, name")
    assert parse_spec(text).partitions[0].cpus == 4


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "c.yaml", "the file is empty"),
        ("# nothing\n", "c.yaml", "the file is empty"),
        ("- a\n", "c.yaml:1", "a cluster file is a mapping with `name`, `target` and `partitions`"),
        ("\nhello\n", "c.yaml:2", "a cluster file is a mapping with `name`, `target` and `partitions`"),
        ("a: *b\n", "c.yaml:1", "alias `*b` has no anchor `&b` before it"),
        ("a: &a [*a]\n", "c.yaml:1", "alias `*a` refers to a value that contains it"),
        ("a: 1\n---\nb: 2\n", "c.yaml:2", "the file has a second YAML document"),
        ("a: 1\nb: \x07\n", "c.yaml:2", "the file has a character that YAML does not allow"),
        ("[" * 1000 + "]" * 1000, "c.yaml:1", f"the file is nested more than {MAX_DEPTH} levels deep"),
        ("- " * 10000, "c.yaml:1", f"the file is nested more than {MAX_DEPTH} levels deep"),
    ],
)
def test_text_that_is_not_a_cluster_file_is_refused(text, where, what):
    assert only_problem(text) == (where, what)


@pytest.mark.parametrize(
    ("text", "line"), [("a: [1\nb: 2", 2), ("a:\n\t- b", 2), ("a: b: c", 1), ('a: "x', 1), ("a: 1\n b: 2", 2), ("%", 1)]
)
def test_broken_yaml_names_the_line(text, line):
    where, what = only_problem(text)
    assert what.startswith("not valid YAML: ")
    assert where in (f"c.yaml:{line}", f"c.yaml:{line + 1}")


def test_alias_expansion_is_limited():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert only_problem("\n".join(lines)) == ("c.yaml:5", "the file expands to more than 100,000 values")


def test_alias_depth_is_limited():
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 60)]
    assert only_problem("\n".join(lines))[1] == f"the file is nested more than {MAX_DEPTH} levels deep"


@pytest.mark.parametrize(
    ("addition", "line", "what"),
    [
        ("name: other", 4, "`name` is given twice, first on line 1"),
        ("? [a]\n: 1", 4, "a key must be a name, not a list, a mapping or nothing"),
        ("? \n: 1", 4, "a key must be a name, not a list, a mapping or nothing"),
        ("login: {count: 9999999999999999999999999999999999999}", 4, "the number 999999999999… is too large"),
        (
            "head: {name: !!python/name:os.system mgmt}",
            4,
            "the tag `tag:yaml.org,2002:python/name:os.system` is not supported",
        ),
        ("head: {<<: 3}", 4, "`<<` must name a mapping, or a list of them"),
    ],
)
def test_document_problems_have_their_line(addition, line, what):
    assert only_problem(SMALLEST + addition) == (f"c.yaml:{line}", what)


def test_number_as_key_is_an_unknown_key():
    assert only_problem(SMALLEST + "1: x") == ("c.yaml:4", "the cluster file has no setting `1`")


def test_missing_file_is_reported(tmp_path):
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "no.yaml")
    assert caught.value.what == "the file does not exist"
    assert caught.value.hint == "`dalsegno init` writes a starter file"


def test_folder_binary_and_huge_file_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x7fELF\x02\xff\xfe\x00")
    (tmp_path / "huge").write_bytes(b"#" * 2_000_000)
    for name, what in (
        (".", "this is a folder, not a file"),
        ("binary", "the file is not UTF-8 text"),
        ("huge", "the file is larger than 1 MiB"),
        ("a\0b", "the file cannot be read: embedded null byte"),
    ):
        with pytest.raises(SpecError) as caught:
            load_spec(str(tmp_path / name))
        assert caught.value.what == what


def test_byte_order_mark_is_accepted(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xef\xbb\xbf" + SMALLEST.encode())
    assert load_spec(tmp_path / "c.yaml").name == "demo"
