"""Tests of the limits on runs per user, with a real keeper and real processes."""

import os
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.runs.coordinators import (
    MAX_GIVEN_UP,
    MAX_RUNS,
    MAX_RUNS_OF_A_USER,
    CoordinatorKeeper,
    RunRecord,
    RunRecords,
    check_run_limit,
    find_identity,
    on_coordinator_end,
)
from dalsegno.runs.coordinator.program import MAX_SHORT_LIVES
from dalsegno.system.children import end, marked

OWN, ADA, NOBODY = os.geteuid(), 4711, 65534
SLEEP = ("/bin/sh", "-c", "exec sleep 100")  # further arguments distinguish the processes


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[CoordinatorKeeper]:
    env = {"PATH": os.defpath, "DALSEGNO_MARK": str(tmp_path)}
    with selectors.DefaultSelector() as selector:
        keeper = CoordinatorKeeper(RunRecords(tmp_path), SLEEP, env, selector)
        keeper.begin()
        yield keeper
        end(marked(str(tmp_path)))
        for watched in keeper.watched.values():
            os.close(watched.fd)


def refusal(keeper: CoordinatorKeeper, run: str, uid: int) -> DalsegnoError:
    with pytest.raises(DalsegnoError) as caught:
        keeper.request(f"/home/{run}", uid)
    return caught.value


def test_a_coordinator_gets_the_log_level_of_the_controller():
    assert find_identity(OWN, {"DALSEGNO_LOG_LEVEL": "debug", "SECRET": "x"})[1]["DALSEGNO_LOG_LEVEL"] == "debug"


@pytest.mark.cluster  # many processes or connections: too slow for the unit part
@pytest.mark.skipif(OWN != 0, reason="only root can become another user")
def test_the_limit_per_user_affects_nobody_else_and_ends_with_a_run(keeper: CoordinatorKeeper):
    for number in range(MAX_RUNS_OF_A_USER):
        keeper.request(f"/home/r{number}", NOBODY)
    refused = refusal(keeper, "one-more", NOBODY)
    assert refused.what == "you have 64 runs, the limit for one user"
    assert "dalsegno cancel" in refused.hint
    assert "one-more" not in keeper.known and len(keeper.watched) == MAX_RUNS_OF_A_USER
    keeper.request("/home/r0", NOBODY)  # a run that has already started does not count again
    keeper.request("/home/another-users", OWN)
    keeper.launcher = ("/bin/true",)
    end([keeper.known["r0"].process])
    while "r0" in keeper.known:  # the coordinator restarts and reports that the run is over
        keeper.wake()
        for key, events in keeper.selector.select(1):
            key.data(events)
    keeper.request("/home/one-more", NOBODY)


def test_id_of_a_run_that_is_over_stays_with_its_user(tmp_path: Path):
    """Otherwise a user could replace another user's run in the history."""
    with selectors.DefaultSelector() as selector:
        keeper = CoordinatorKeeper(RunRecords(tmp_path / "runs"), ("/bin/true",), {"PATH": os.defpath}, selector)
        keeper.begin()
        ended = RunRecord("/home/ada/r1", ADA)
        keeper.records.write(ended)
        keeper.records.remove(ended)
        assert refusal(keeper, "mallory/r1", OWN).what == "the run id `r1` is in use"
        assert keeper.records.read_ended("r1") == ended and keeper.known == {}


def test_only_the_last_abandoned_runs_of_each_user_are_kept(tmp_path: Path, keeper: CoordinatorKeeper):
    """Otherwise a user could fill disk and memory with abandoned runs."""
    keeper.known["before"] = RunRecord("/home/before", ADA, given_up=True)
    for number in range(MAX_GIVEN_UP + 5):
        record = RunRecord(f"/home/r{number}", NOBODY, short_lives=MAX_SHORT_LIVES - 1)
        keeper.records.write(record)
        keeper._do(on_coordinator_end(record, 1, 0.0))
    assert list(keeper.known) == ["before", *(f"r{number}" for number in range(5, MAX_GIVEN_UP + 5))]
    assert len(list(tmp_path.glob("*.json"))) == MAX_GIVEN_UP


def test_the_controllers_own_user_has_only_the_total_limit():
    check_run_limit(OWN, [OWN] * (MAX_RUNS - 1))
    check_run_limit(ADA, [OWN] * (MAX_RUNS - 1))
    with pytest.raises(DalsegnoError, match="has 500 runs, its limit"):
        check_run_limit(OWN, [OWN] * MAX_RUNS)


def test_the_limit_counts_each_user_separately():
    check_run_limit(ADA, [ADA] * (MAX_RUNS_OF_A_USER - 1) + [NOBODY] * MAX_RUNS_OF_A_USER)
    with pytest.raises(DalsegnoError, match="you have 64 runs"):
        check_run_limit(ADA, [ADA] * MAX_RUNS_OF_A_USER)
