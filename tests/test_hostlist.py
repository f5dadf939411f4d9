"""Tests of host lists, by example and against Slurm's own commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.hostlist import MAX_NODES, HostlistError, closest, compress, expand
from dalsegno.system.processes import LocalRunner


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("n[1,01,001]", ["n1", "n01", "n001"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("n[1-2],x,gpu-a", ["n1", "n2", "x", "gpu-a"]),
        ("10.1.0.[11-12]", ["10.1.0.11", "10.1.0.12"]),
        ("[17001-17002]", ["17001", "17002"]),
        ("gpu-01x[1-2],gpu-02x1", ["gpu-01x1", "gpu-01x2", "gpu-02x1"]),
        ("n[99-101]", ["n99", "n100", "n101"]),
        ("", []),
    ],
)
def test_host_list_expands_to_names_and_back(short: str, names: list[str]) -> None:
    assert expand(short) == names
    assert compress(names) == short


def test_several_brackets_multiply_and_the_last_varies_fastest() -> None:
    assert expand("r[1-2]n[01-02]") == ["r1n01", "r1n02", "r2n01", "r2n02"]


def test_order_and_repetition_are_kept() -> None:
    names = ["n2", "n1", "n1", "a", "n3"]
    assert expand(compress(names)) == names


@pytest.mark.parametrize(
    "text",
    ["n[1", "n1]", "n[[1-2]]", "n[]", "n[a-b]", "n[3-1]", "n[1-2", "n[1]2]", "n[-1]", "a b", "n[1-2]x", "n[1,,2]"],
)
def test_invalid_host_list_is_refused(text: str) -> None:
    with pytest.raises(HostlistError):
        expand(text)


@pytest.mark.parametrize("text", ["n[0-99999999999]", "a[1-300]b[1-300]", f"n[1-{MAX_NODES}],m"])
def test_huge_host_list_is_refused_before_expansion(text: str) -> None:
    with pytest.raises(HostlistError, match="the limit is 65,536"):
        expand(text)


@pytest.mark.parametrize("name", ["", "a,b", "a b", "n[1]"])
def test_invalid_host_name_is_not_compressed(name: str) -> None:
    with pytest.raises(HostlistError):
        compress([name])


NAMES = st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,3}[a-z])?[0-9]{0,4}", fullmatch=True)
NUMBERS = st.integers(0, 120)
WIDTHS = st.integers(1, 4)


@st.composite
def brackets(draw: st.DrawFn) -> str:
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        first, more, width = draw(NUMBERS), draw(st.integers(0, 5)), draw(WIDTHS)
        parts.append(f"{first:0{width}d}-{first + more}" if more else f"{first:0{width}d}")
    return f"[{','.join(parts)}]"


@st.composite
def short_lists(draw: st.DrawFn) -> str:
    """Return a text with at most two brackets: with three, Slurm 22.05 uses another order."""
    word = draw(st.sampled_from(["n", "gpu-", "rack0x"])) + draw(brackets())
    return word + "x" + draw(brackets()) if draw(st.booleans()) else word


@given(st.lists(NAMES, max_size=30))
def test_compress_then_expand_returns_the_same_names(names: list[str]) -> None:
    assert expand(compress(names)) == names


@given(st.text(alphabet="n01-9[],x .\n", max_size=25))
def test_expand_accepts_or_refuses_any_text(text: str) -> None:
    try:
        names = expand(text)
    except HostlistError:
        return
    assert expand(compress(names)) == names


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a slurm.conf, which scontrol needs even to expand host lists."""
    if shutil.which("scontrol") is None:
        pytest.skip("no scontrol on this machine")
    path: Path = tmp_path_factory.mktemp("hostlist") / "slurm.conf"
    path.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return str(path)


def scontrol_show(what: str, hosts: str, conf: str) -> list[str]:
    done = LocalRunner().run(["scontrol", "show", what, hosts], env={"SLURM_CONF": conf, "PATH": "/usr/bin:/bin"})
    return done.checked().stdout.split()


@given(lists=st.lists(short_lists(), min_size=5, max_size=40))
def test_slurm_expands_to_the_same_names(slurm_conf: str, lists: list[str]) -> None:
    text = ",".join(lists)
    assert expand(text) == scontrol_show("hostnames", text, slurm_conf)


@given(names=st.lists(NAMES, min_size=5, max_size=60))
def test_slurm_compresses_to_the_same_list(slurm_conf: str, names: list[str]) -> None:
    assert compress(names) == scontrol_show("hostlist", ",".join(names), slurm_conf)[0]


def test_different_number_is_not_a_misspelling() -> None:
    assert closest("train1", ["train-1", "lab-1"]) == closest("trian-1", ["train-1", "lab-1"]) == "train-1"
    assert closest("train-9", ["train-1", "train-5"]) == ""
    assert closest("train-", ["train-1"]) == "train-1"
