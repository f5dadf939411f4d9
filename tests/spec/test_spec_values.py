"""Tests of times, sizes, shares and host lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import SpecError
from dalsegno.hostlist import expand
from dalsegno.spec.load import parse_spec
from dalsegno.spec.targets import addresses
from dalsegno.spec.values import parse_size_mib, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 1800),
        ("30", 1800),
        ("90s", 90),
        ("30m", 1800),
        ("30 min", 1800),
        ("2h", 7200),
        ("2 hours", 7200),
        ("1h30m", 5400),
        ("1d 12h", 129600),
        ("1w", 604800),
        ("1-00:00:00", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("30:00", 1800),
        ("1:30:00", 5400),
        ("infinite", None),
        ("UNLIMITED", None),
    ],
)
def test_times_in_our_format_and_in_slurms(text, seconds):
    assert parse_time(text, bare_s=60) == seconds


@pytest.mark.parametrize("text", ["", "soon", "2x", "h", "1h x", "1--2", True, None, 1.5, [], "-5m", "²"])
def test_invalid_time_is_refused(text):
    with pytest.raises(ValueError):
        parse_time(text, bare_s=60)


@pytest.mark.parametrize(
    ("text", "mib"),
    [("512M", 512), ("64G", 65536), ("2048 GiB", 2097152), ("2T", 2097152), ("1.5g", 1536), ("64 GB", 65536)],
)
def test_sizes_with_units(text, mib):
    assert parse_size_mib(text) == mib


@pytest.mark.parametrize("text", ["64", 64, "G", "-1G", "64 Gbit", "", None, "1e3G"])
def test_invalid_size_is_refused(text):
    with pytest.raises(ValueError):
        parse_size_mib(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1,3-4],m2", ["n1", "n3", "n4", "m2"]),
        ("r[1-2]-n[1-2]", ["r1-n1", "r1-n2", "r2-n1", "r2-n2"]),
    ],
)
def test_host_lists_are_expanded(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text",
    ["", "n[", "n]", "n[]", "n[a]", "n[3-1]", "n[1-999999999]", "n 1", "n;1", "[1-2][", "n[1-300][1-300]", "n[1-2]x"],
)
def test_invalid_node_list_is_refused(text):
    file = f"name: a\ntarget: local\npartitions: [{{name: p, nodes: {text!r}}}]\n"
    with pytest.raises(SpecError):
        parse_spec(file, "cluster.yaml")


@given(st.text(alphabet="n[]0123456789-,x ", max_size=30))
def test_any_text_is_a_host_list_or_refused(text):
    try:
        names = expand(text)
    except ValueError:
        return
    assert len(names) <= 65_536
    assert all(name and " " not in name and "[" not in name for name in names)


def test_names_and_addresses_are_paired():
    assert addresses("t-[1-2]", "10.0.0.[8-9]") == {"t-1": "10.0.0.8", "t-2": "10.0.0.9"}
    assert addresses("t-[1-2]", "") == {"t-1": "t-1", "t-2": "t-2"}
    assert addresses("head", "2001:db8::1") == {"head": "2001:db8::1"}
    assert addresses("t-[1-2]", "t[1-2].example.com") == {"t-1": "t1.example.com", "t-2": "t2.example.com"}
    with pytest.raises(ValueError, match="2 machines, 1 addresses"):
        addresses("t-[1-2]", "10.0.0.8")
