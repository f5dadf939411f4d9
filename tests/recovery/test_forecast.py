"""Tests that recovery does what it forecasts for a node out of service, within the budgets."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.actions import ChangePhase, Repair
from dalsegno.recovery.decisions.forecast import Forecast, forecast
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.records import BudgetMark, MarkKind
from tests.recovery.clinic import Clinic, MakeClinic


def ahead(clinic: Clinic) -> Forecast | None:
    records = clinic.store.records
    return forecast(records.get("n2"), ("train",), records, clinic.policy, clinic.cluster.now)


def drained_with_a_job(clinic: Clinic, needs: Remedy = Remedy.REBOOT) -> None:
    clinic.cluster.start(1, "n2")
    clinic.cluster.break_gpu("n2", needs, code="48")  # a fault with which jobs may stay on the node
    clinic.rounds(3)
    assert clinic.phase("n2") is NodePhase.DRAINED


def done_next(clinic: Clinic) -> Remedy | str:
    """Return the next action after the job has left: a remedy, or the reason for none."""
    clinic.cluster.end(1)
    clinic.rounds(6)
    for action in clinic.done:
        if isinstance(action, Repair):
            return action.how
        if isinstance(action, ChangePhase) and action.to is NodePhase.NEEDS_ADMIN:
            return action.why
    return ""


def marks(clinic: Clinic, kind: str, count: int, key: str = "xid[48]") -> None:
    """Record earlier repairs of the node."""
    at = clinic.cluster.now - clinic.policy.reboots_apart_s - 60
    records = clinic.store.records
    clinic.store.records = records.with_node(records.get("n2"), *[BudgetMark(kind, "n2", at, key, ("train",))] * count)


@pytest.mark.parametrize("needs", [Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE])
def test_the_needed_remedy_is_forecast_and_carried_out(clinic_of: MakeClinic, needs: Remedy):
    clinic = clinic_of()
    drained_with_a_job(clinic, needs)
    assert ahead(clinic) == Forecast(needs)
    assert done_next(clinic) is needs


def test_a_node_rebooted_too_often_is_forecast_to_be_replaced(clinic_of: MakeClinic):
    clinic = clinic_of()
    marks(clinic, MarkKind.REBOOTED, 2)
    drained_with_a_job(clinic)
    found = ahead(clinic)
    assert found == Forecast(Remedy.REPLACE, "it was rebooted 2 times for this fault within a day, the limit")
    assert done_next(clinic) is Remedy.REPLACE


def test_after_too_many_failed_replacements_none_is_forecast(clinic_of: MakeClinic):
    clinic = clinic_of(breaker=2)
    drained_with_a_job(clinic, Remedy.REPLACE)
    marks(clinic, MarkKind.REPLACED_BADLY, 2)
    why = "2 replacements in train failed in a row"
    assert ahead(clinic) == Forecast(None, why)
    why_none = done_next(clinic)
    assert isinstance(why_none, str) and why_none.endswith(why)


def test_a_fault_for_an_administrator_is_forecast_as_drain(clinic_of: MakeClinic):
    clinic = clinic_of()
    drained_with_a_job(clinic, Remedy.DRAIN)
    assert ahead(clinic) == Forecast(Remedy.DRAIN)
    assert done_next(clinic) == ""


def test_a_paused_repair_is_forecast_as_held_back(clinic_of: MakeClinic):
    clinic = clinic_of()
    drained_with_a_job(clinic)
    clinic.store.pause(True, "ada", clinic.cluster.now)
    assert ahead(clinic) == Forecast(Remedy.REBOOT, held=HeldAction.PAUSED)
    assert done_next(clinic) == ""
    clinic.store.pause(False, "ada", clinic.cluster.now)
    assert ahead(clinic) == Forecast(Remedy.REBOOT)
    assert done_next(clinic) is Remedy.REBOOT


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("observe", Forecast(Remedy.REBOOT, held=HeldAction.OBSERVING)),
        ("off", Forecast(None, "automatic recovery is off in the cluster file")),
    ],
)
def test_the_forecast_follows_the_mode_of_the_cluster_file(clinic_of: MakeClinic, mode: str, expected: Forecast):
    clinic = clinic_of()
    drained_with_a_job(clinic)
    clinic.policy = clinic.loop.policy = type(clinic.policy)(mode=mode)
    assert ahead(clinic) == expected
    assert done_next(clinic) == ""


def test_there_is_no_forecast_in_service_or_during_repair(clinic_of: MakeClinic):
    clinic = clinic_of()
    assert ahead(clinic) is None
    drained_with_a_job(clinic)
    clinic.cluster.end(1)
    while clinic.phase("n2") is NodePhase.DRAINED:
        clinic.round()
    assert clinic.phase("n2") is NodePhase.REPAIRING and ahead(clinic) is None


def test_a_forecast_survives_encoding_and_unknown_values_are_ignored():
    for one in (Forecast(Remedy.REBOOT, "why", HeldAction.PAUSED), Forecast(None, "no more")):
        assert Forecast.read(one.message()) == one
    assert Forecast.read(None) is Forecast.read({}) is Forecast.read("reboot") is None
    assert Forecast.read({"how": "anneal", "held_back": 7}) == Forecast(None)
