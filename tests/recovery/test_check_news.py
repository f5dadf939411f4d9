"""Which of the checks' findings are written down, so that `why` can tell of them when they are long over."""

from __future__ import annotations

from dalsegno.health import Finding, Remedy, Result, failed, passed, unknown, warned
from dalsegno.recovery.run_hints import CALM_S, MOST, CheckNews
from tests.recovery.clinic import MakeClinic


def hear(news: CheckNews, result: Result, now: float) -> list[str]:
    heard = news.hear("n1", [Finding("gpu-ecc", result, 0.0)], now)
    return [f"{each.node} {each.check} {each.verdict.value}: {each.text}" for each in heard]


def test_a_check_that_fails_and_passes_again_is_told_of_once_each():
    news, bad = CheckNews(), failed("4 errors", Remedy.RESET)
    assert hear(news, passed("none"), 0.0) == [], "that all is well is no news"
    assert hear(news, bad, 1.0) == ["n1 gpu-ecc failed: 4 errors"]
    assert hear(news, failed("5 errors", Remedy.RESET), 100.0) == [], "it still does"
    assert hear(news, passed("none"), 200.0) == ["n1 gpu-ecc passed: none"]


def test_a_warning_another_code_and_what_nobody_knows():
    news = CheckNews()
    assert hear(news, warned("hot"), 0.0) == ["n1 gpu-ecc warned: hot"]
    assert hear(news, unknown("its tool hangs"), 100.0) == []
    assert hear(news, failed("Xid 48", Remedy.RESET, "48"), 200.0) == ["n1 gpu-ecc failed: Xid 48"]
    assert hear(news, failed("Xid 79", Remedy.REBOOT, "79"), 300.0) == ["n1 gpu-ecc failed: Xid 79"]


def test_a_check_that_cannot_make_up_its_mind_fills_no_disk_and_its_last_word_is_told():
    news, told = CheckNews(), list[str]()
    for second in range(1000):
        told += hear(news, failed("no", Remedy.DRAIN) if second % 2 else passed("yes"), float(second))
    assert len(told) <= MOST * (1000 / CALM_S + 1)
    told += hear(news, failed("no", Remedy.DRAIN), 2000.0) or hear(news, passed("yes"), 2000.0)
    told += hear(news, failed("no", Remedy.DRAIN), 2001.0)
    assert told[-1] == "n1 gpu-ecc failed: no"


def test_a_controller_s_successor_knows_what_was_told(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.healer.note_findings("n2", (Finding("xid", failed("Xid 48", Remedy.RESET, "48"), 0.0),))
    clinic.store.close()
    clinic.open()
    clinic.healer.note_findings("n2", (Finding("xid", failed("Xid 48", Remedy.RESET, "48"), 1.0),))
    clinic.healer.note_findings("n2", (Finding("xid", failed("Xid 79", Remedy.REBOOT, "79"), 2.0),))
    clinic.store.close()
    clinic.open()
    clinic.healer.note_findings("n2", (Finding("xid", passed("no Xid"), 3.0),))
    assert [each.text for each in clinic.store.last_checks("n2", 10)] == ["Xid 48", "Xid 79", "no Xid"]
