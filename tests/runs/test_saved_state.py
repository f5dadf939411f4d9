"""The state that a coordinator saves for its successor."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.errors import DalsegnoError
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.coordinator import Coordinator
from dalsegno.runs.coordinator.generations.causes import read_failure
from dalsegno.runs.coordinator.generations.events import Cancelled, Event, NodesReclaimed
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.runs.coordinator.generations.group import Shape, form_group
from dalsegno.runs.coordinator.nodes.node_source import NoNodeSource
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedRun, SavedStep, SavedTrust, read_saved, write_saved
from dalsegno.runs.folder import RunFolder
from dalsegno.system.children import Process
from tests.runs.small_site import SmallSite

FRESH = Run(Shape(1, 3, 2), max_restarts=4)
NODES = ["n1", "n2", "n10"]

nodes = st.lists(st.sampled_from(NODES), unique=True, max_size=3)
read_failures = st.builds(
    read_failure,
    st.integers(0, 7),
    st.sampled_from(NODES),
    st.sampled_from([1, 3, 93, -9, -11]),
    st.sampled_from(["", 'Traceback (most recent call last):\n  File "/t.py", line 1, in <module>\nValueError: é\0']),
    oom=st.booleans(),
)
failures = st.builds(replace, read_failures, why=st.text(max_size=5))
groups = st.builds(lambda number, ready: form_group(number, FRESH.shape, ready), st.integers(1, 99), nodes)
runs = st.builds(
    Run,
    st.just(FRESH.shape),
    st.just(FRESH.max_restarts),
    phase=st.sampled_from(GenerationPhase),
    generation=st.integers(0, 99),
    ready=nodes.map(tuple),
    group=groups,
    done=st.frozensets(st.integers(0, 7)),
    saved=st.booleans(),
    waiting_for=nodes.map(frozenset),
    doubted=nodes.map(frozenset),
    restarts=st.integers(0, 9),
    spent=st.integers(0, 9),
    quick=st.integers(0, 9),
    failures=st.lists(failures, max_size=2).map(tuple),
    age_s=st.floats(0, 1e6),
    lost_member=st.booleans(),
    last=st.none() | failures,
    pausing=st.booleans(),
    leaving=st.booleans(),
    taken=st.dictionaries(st.sampled_from(NODES), st.text(max_size=5)),
    exit_code=st.none() | st.integers(0, 255),
    why=st.text(max_size=9),
    smaller=st.booleans(),
)
processes = st.builds(Process, st.integers(1, 1 << 22), st.integers(0, 1 << 40))
steps = st.builds(SavedStep, processes, nodes.map(tuple))
jobs = st.builds(
    SavedJob,
    st.sampled_from(JobRole),
    st.none() | st.integers(1, 1 << 26),
    st.integers(0, 9),
    st.none() | processes,
    st.lists(steps, max_size=2).map(tuple),
)
all_saved = st.builds(
    SavedRun,
    runs,
    st.lists(jobs, max_size=2).map(tuple),
    nodes.map(tuple),
    st.dictionaries(st.sampled_from(["n1", "n2"]), st.floats(0, 2e9)),
    st.integers(0, 9),
    st.none() | st.floats(0, 2e9),
    st.builds(
        SavedTrust,
        st.integers(0, 99),
        st.integers(0, 1 << 40),
        st.none() | st.tuples(st.integers(1, 99), st.integers(0, 1 << 40)),
    ),
    nodes.map(tuple),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "state.json"


@given(saved=all_saved)
def test_saved_state_survives_the_round_trip(path: Path, saved: SavedRun):
    write_saved(path, saved)
    assert read_saved(path, FRESH) == saved


def test_shape_and_limits_come_from_the_present_request(tmp_path: Path):
    write_saved(tmp_path / "state.json", SavedRun(replace(FRESH, generation=7)))
    today = Run(Shape(2, 8, 8), max_restarts=9)
    saved = read_saved(tmp_path / "state.json", today)
    assert saved is not None and saved.run == replace(today, generation=7)


def test_saved_state_is_private(tmp_path: Path):
    write_saved(tmp_path / "state.json", SavedRun(FRESH))
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o600


def test_unknown_fields_are_ignored(tmp_path: Path):
    path = tmp_path / "state.json"
    write_saved(path, SavedRun(FRESH))
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "mood": "good", "run": {**data["run"], "colour": "blue"}}))
    assert read_saved(path, FRESH) == SavedRun(FRESH)


def test_missing_state_is_none(tmp_path: Path):
    assert read_saved(tmp_path / "state.json", FRESH) is None
    assert read_saved(tmp_path / "no" / "state.json", FRESH) is None


@pytest.mark.parametrize("text", ["", '{"run": {"pha', "[]", "{}", '{"run": {}}', "\0\0\0\0"])
def test_unreadable_state_names_the_command_to_end_its_jobs(tmp_path: Path, text: str):
    """The file is not synced to disk, so a power failure may leave an empty file."""
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(DalsegnoError, match="is damaged") as caught:
        read_saved(tmp_path / "state.json", FRESH)
    assert f"scancel --name={tmp_path.name}" in caught.value.hint


@pytest.mark.parametrize("event, kept", [(Cancelled(), "cancelled"), (NodesReclaimed(), "leaving")])
def test_event_that_is_reported_only_once_is_saved_at_once(event: Event, kept: str, tmp_path: Path):
    """The state of thousands of nodes is written rarely. A successor must still know that the user has cancelled."""
    site = SmallSite(RunFolder(tmp_path), Shape(2, 2, 1))

    async def tell() -> None:
        coordinator = Coordinator(site, lambda control: NoNodeSource())
        await coordinator.open()
        group = form_group(1, site.shape, ["n1", "n2"])
        phase = GenerationPhase.STOPPING
        coordinator.run = Run(
            site.shape, phase=phase, generation=1, group=group, ready=("n1", "n2"), waiting_for=frozenset({"n1"})
        )
        coordinator._saving._not_before = time.monotonic() + 600  # the last write was slow
        coordinator.apply(event)
        coordinator.agents.close()

    asyncio.run(tell())
    saved = read_saved(site.folder.state, Run(site.shape))
    assert saved is not None and getattr(saved.run, kept)
