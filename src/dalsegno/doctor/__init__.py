"""Find what is wrong with a job, before it starts or after it failed, and name the fix.

`gather.py` reads the sources into a `Case`. Each symptom is judged from the case alone.
"""

from dalsegno.doctor.case import Case, DoctorFinding, Evidence, Severity, Symptom
from dalsegno.doctor.symptoms import SYMPTOMS
from dalsegno.doctor.symptoms.submission import UNKNOWN_FAILURE

__all__ = ["SYMPTOMS", "Case", "DoctorFinding", "Evidence", "Severity", "Symptom", "examine"]


def examine(case: Case) -> list[tuple[Symptom, DoctorFinding]]:
    """Return all findings, errors first. Findings of equal severity are in the order of the symptoms.

    The finding that a job failed for an unknown reason is left out if another symptom found an error.
    """
    found = [(symptom, finding) for symptom in SYMPTOMS for finding in symptom.judge(case)]
    if any(symptom.name != UNKNOWN_FAILURE and finding.severity is Severity.ERROR for symptom, finding in found):
        found = [pair for pair in found if pair[0].name != UNKNOWN_FAILURE]
    order = list(Severity)
    return sorted(found, key=lambda pair: order.index(pair[1].severity))
