"""Tests that any file gives a cluster or a SpecError with lines, never a traceback."""

import string

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dalsegno.errors import SpecError
from dalsegno.spec.load import parse_spec
from dalsegno.spec.model import ClusterSpec, starter
from dalsegno.spec.resolve import resolve
from dalsegno.spec.targets import TARGETS

FULL = """\
name: demo
target: local
local: {hosts: auto}
head: {name: mgmt}
login: {count: 1}
partitions:
  - name: train
    nodes: 6
    spares: 1
    instance: p5.48xlarge
    time_limit: 7d
    max_nodes: 4
    features: [h100, efa]
    allow_accounts: [ml]
    allow_qos: high
    extra: {GraceTime: 60}
  - {name: debug, nodes_from: train, nodes: 2, time_limit: 30m}
reservations:
  - {name: maint, nodes: "train-[1-2]", duration: 2h, users: root, flags: maint}
slurm:
  enforce: associations,limits
  qos:
    - {name: high, preempts: low, max_tres_per_user: {gres/gpu: 16}}
    - {name: low}
  priority: {fair_share: 20000, half_life: 3d}
  topology: {switches: [{name: s, nodes: "train-[1-7]"}]}
  extra: {MaxArraySize: 10001}
accounts: [{name: ml, fair_share: 10}]
users:
  - {name: alice, accounts: [ml], uid: 5001}
health: {mode: off, checks: {zombies: off}}
"""
FILES = [FULL, *(starter(target) for target in TARGETS)]
SLOW = settings(suppress_health_check=[HealthCheck.too_slow])


def read(text):
    try:
        cluster = resolve(parse_spec(text, "c.yaml"))
    except SpecError as error:
        assert error.problems
        assert all(problem.what and problem.where.startswith("c.yaml") for problem in error.problems)
        assert all("\n" not in problem.what for problem in error.problems)
        return None
    return cluster


@SLOW
@given(st.text(max_size=200))
def test_any_text_gives_a_cluster_or_a_spec_error(text):
    read(text)


@SLOW
@given(st.text(alphabet=string.ascii_lowercase[:6] + ":-[]{}&*!|>'\"#%@,? \n\t0~<", max_size=80))
@example("a: &a [*a")
@example("? ? ?")
@example("<<: {<<: <<}")
@example("!!binary x: 1")
def test_any_yaml_gives_a_cluster_or_a_spec_error(text):
    read(text)


@SLOW
@given(st.data())
def test_file_with_changed_characters_gives_a_cluster_or_a_spec_error(data):
    text = data.draw(st.sampled_from(FILES))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.text(max_size=4)) + text[at + gone :]
    read(text)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["train", "local", "high", "p5.48xlarge", "64G", "2h", "infinite", "train-[1-3]", "a,b", "root"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(list(ClusterSpec.model_fields))


@SLOW
@given(st.data())
def test_file_with_a_replaced_value_gives_a_cluster_or_a_spec_error(data):
    import yaml

    tree = yaml.safe_load(FULL)
    for _ in range(data.draw(st.integers(1, 3))):
        replace_somewhere(tree, data)
    read(yaml.safe_dump(tree, allow_unicode=True))


def replace_somewhere(tree, data):
    """Walk down a random path and put a random value, or a random known key, there."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if isinstance(tree[key], (dict, list)) and tree[key] and data.draw(st.booleans()):
            tree = tree[key]
            continue
        if isinstance(tree, dict) and data.draw(st.booleans()):
            key = data.draw(KEYS | st.just(key))
        tree[key] = data.draw(VALUES)
        return


def test_base_file_of_the_fuzz_tests_is_valid():
    assert read(FULL) is not None
