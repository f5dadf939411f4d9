"""Spares of a partition: validated, kept, lent to the job that joins a run, and taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.phase import Phase
from dalsegno.slurm import SPARE_REASON, JobState, NodeFlag
from tests.recovery.clinic import Clinic, MakeClinic


def spare_clinic(clinic_of: MakeClinic) -> Clinic:
    clinic = clinic_of(4, spares=frozenset({"n4"}))
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason, node.effects[:] = frozenset({NodeFlag.DRAIN}), SPARE_REASON, []
    clinic.settle()
    return clinic


def test_a_spare_is_validated_and_kept(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)
    assert clinic.effects("n4") == ["validate"]
    clinic.wait(86400)
    clinic.settle()
    assert clinic.effects("n4") == ["validate", "validate"], "burned in again every day"


def test_a_spare_is_released_for_the_job_that_joins_a_run_and_kept_again_after_it(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9, comment="dalsegno:join")
    clinic.round()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.LENT, "")
    assert clinic.cluster.queue[9].reservation == "n4", "for this job"
    clinic.cluster.start(9, "n4", comment="dalsegno:join")
    clinic.rounds(20)
    clinic.cluster.end(9)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)


@pytest.mark.parametrize("running", [False, True])
def test_a_lent_spare_that_a_restarted_slurmctld_drains_again_is_given_back_to_its_job(
    clinic_of: MakeClinic, running: bool
):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9, comment="dalsegno:join")
    clinic.round()
    if running:
        clinic.cluster.start(9, "n4", comment="dalsegno:join")
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason = frozenset({NodeFlag.DRAIN}), SPARE_REASON
    clinic.rounds(2)
    assert (node.flags, clinic.phase("n4")) == (frozenset(), Phase.LENT)
    assert clinic.cluster.queue[9].state is (JobState.RUNNING if running else JobState.PENDING)
    clinic.cluster.end(9)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)


def test_a_spare_that_cannot_be_released_is_tried_again_after_a_while_and_not_at_once(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9, comment="dalsegno:join")
    facts = clinic.cluster.facts()
    del clinic.cluster.queue[9]  # Slurm does not know it any more when it is told
    for _ in range(10):
        clinic.cluster.now += 0.1
        clinic.healer.round(replace(facts, slurm_at=clinic.cluster.now))
    assert len([text for text in clinic.told("n4") if "could not release" in text]) == 1


def test_other_jobs_get_no_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9)
    clinic.rounds(20)
    assert clinic.phase("n4") is Phase.SPARE


def test_a_spare_whose_agent_was_silent_for_a_moment_is_still_one(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    for lent in (False, True):
        if lent:
            clinic.cluster.start(9, comment="dalsegno:join")
            clinic.round()
            clinic.cluster.start(9, "n4", comment="dalsegno:join")
        clinic.cluster.nodes["n4"].agent = False  # the host answers, the agent does not
        clinic.rounds(3)
        assert clinic.phase("n4") is (Phase.LENT if lent else Phase.SPARE)
        clinic.cluster.nodes["n4"].agent = True
        clinic.rounds(3)
        assert clinic.phase("n4") is (Phase.LENT if lent else Phase.SPARE)


def test_a_broken_spare_is_mended_and_is_a_spare_again(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.break_gpu("n4", Remedy.REBOOT)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)
    assert clinic.effects("n4").count("reboot") == 1
