"""Parsing indexes, manifests and configurations."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.containers.manifest import (
    Config,
    DamagedImage,
    Descriptor,
    ImageManifest,
    Index,
    architecture,
    choose_platform,
    parse_config,
    parse_manifest,
)
from dalsegno.errors import NotThere, UsageError

A, B = ("sha256:" + letter * 64 for letter in "ab")


def test_a_manifest_names_its_configuration_and_its_layers_in_order():
    value = {"schemaVersion": 2, "config": {"digest": A, "size": 1}, "layers": [{"digest": B, "size": 2}]}
    assert parse_manifest(json.dumps(value).encode()) == ImageManifest(Descriptor(A, 1), (Descriptor(B, 2),))


@pytest.mark.parametrize(
    "digest", ["", "sha256:abc", "md5:" + "a" * 32, "sha256:" + "A" * 64, "sha256:../../../etc/passwd" + "a" * 38, 7]
)
def test_malformed_digest_is_refused(digest: object):
    value = {"config": {"digest": digest, "size": 1}, "layers": []}
    with pytest.raises(DamagedImage, match="digest"):
        parse_manifest(json.dumps(value).encode())


def test_old_manifest_and_other_artifacts_are_refused_with_the_reason():
    for value, word in (
        ({"schemaVersion": 1}, "2016"),
        ({"schemaVersion": 2}, "no layers"),
        ([], "read"),
        (None, "read"),
    ):
        with pytest.raises(DamagedImage, match=word):
            parse_manifest(json.dumps(value).encode())


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(
    st.sampled_from(["config", "layers", "manifests", "digest", "size", "platform", "annotations", "rootfs", "Env"]), x
), max_leaves=12))  # fmt: skip
def test_any_json_is_parsed_or_reported_as_damaged(value: object):
    for parse in (parse_manifest, parse_config):
        try:
            parse(json.dumps(value).encode())
        except DamagedImage as error:
            assert error.hint


def test_missing_settings_of_the_configuration_are_empty():
    assert parse_config(b"{}") == Config()
    value = {"architecture": "arm64", "config": {"Env": ["A=1"], "Cmd": None, "WorkingDir": "/w", "Labels": {"a": "b"}}}
    assert parse_config(json.dumps(value).encode()) == Config("arm64", ("A=1",), workdir="/w", labels=(("a", "b"),))


def test_architectures_have_aliases():
    assert (architecture("x86_64"), architecture("aarch64"), architecture("ARM64")) == ("amd64", "arm64", "arm64")
    with pytest.raises(UsageError) as caught:
        architecture("amd46")
    assert caught.value.hint == "did you mean `amd64`?"


def test_attestations_are_not_chosen_as_images():
    index = Index((Descriptor(A, 1, "unknown", "unknown"), Descriptor(B, 1, "arm64", "linux")))
    assert choose_platform(index, "arm64", "x").digest == B
    with pytest.raises(NotThere) as caught:
        choose_platform(index, "amd64", "x")
    assert caught.value.hint == "available for arm64; choose one with `--arch`"
