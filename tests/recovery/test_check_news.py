"""Tests of which check results are recorded, so that `why` can show them later."""

from __future__ import annotations

from dalsegno.health import Finding, Remedy, Result, failed, passed, unknown, warned
from dalsegno.recovery.runs.run_hints import CALM_S, MAX_RECORDS, CheckChanges
from tests.recovery.clinic import MakeClinic


def hear(news: CheckChanges, result: Result, now: float) -> list[str]:
    heard = news.update("n1", [Finding("gpu-ecc", result, 0.0)], now)
    return [f"{each.node} {each.check} {each.verdict.value}: {each.text}" for each in heard]


def test_a_failure_and_its_end_are_recorded_once_each():
    news, bad = CheckChanges(), failed("4 errors", Remedy.RESET)
    assert hear(news, passed("none"), 0.0) == [], "a first pass is not recorded"
    assert hear(news, bad, 1.0) == ["n1 gpu-ecc failed: 4 errors"]
    assert hear(news, failed("5 errors", Remedy.RESET), 100.0) == [], "it still fails"
    assert hear(news, passed("none"), 200.0) == ["n1 gpu-ecc passed: none"]


def test_warnings_and_new_codes_are_recorded_and_unknown_results_are_not():
    news = CheckChanges()
    assert hear(news, warned("hot"), 0.0) == ["n1 gpu-ecc warned: hot"]
    assert hear(news, unknown("its tool hangs"), 100.0) == []
    assert hear(news, failed("Xid 48", Remedy.RESET, "48"), 200.0) == ["n1 gpu-ecc failed: Xid 48"]
    assert hear(news, failed("Xid 79", Remedy.REBOOT, "79"), 300.0) == ["n1 gpu-ecc failed: Xid 79"]


def test_an_alternating_check_is_recorded_at_a_limited_rate():
    news, recorded = CheckChanges(), list[str]()
    for second in range(1000):
        recorded += hear(news, failed("no", Remedy.DRAIN) if second % 2 else passed("yes"), float(second))
    assert len(recorded) <= MAX_RECORDS * (1000 / CALM_S + 1)
    recorded += hear(news, failed("no", Remedy.DRAIN), 2000.0) or hear(news, passed("yes"), 2000.0)
    recorded += hear(news, failed("no", Remedy.DRAIN), 2001.0)
    assert recorded[-1] == "n1 gpu-ecc failed: no"


def test_a_new_controller_knows_the_recorded_results(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.loop.record_findings("n2", (Finding("xid", failed("Xid 48", Remedy.RESET, "48"), 0.0),))
    clinic.store.close()
    clinic.open()
    clinic.loop.record_findings("n2", (Finding("xid", failed("Xid 48", Remedy.RESET, "48"), 1.0),))
    clinic.loop.record_findings("n2", (Finding("xid", failed("Xid 79", Remedy.REBOOT, "79"), 2.0),))
    clinic.store.close()
    clinic.open()
    clinic.loop.record_findings("n2", (Finding("xid", passed("no Xid"), 3.0),))
    assert [each.text for each in clinic.store.last_checks("n2", 10)] == ["Xid 48", "Xid 79", "no Xid"]
