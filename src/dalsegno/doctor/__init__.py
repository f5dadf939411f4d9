"""Find what is wrong with a job, before it starts or after it failed, and name the fix.

`gather.py` reads the sources into a `Case`; each symptom judges the case alone.
"""

from dalsegno.doctor.case import Case, DoctorFinding, Evidence, Severity, Symptom
from dalsegno.doctor.symptoms import SYMPTOMS

__all__ = ["SYMPTOMS", "Case", "DoctorFinding", "Evidence", "Severity", "Symptom", "examine"]


def examine(case: Case) -> list[tuple[Symptom, DoctorFinding]]:
    """Return all findings, errors first. Findings of equal severity are in the order of the symptoms."""
    found = [(symptom, finding) for symptom in SYMPTOMS for finding in symptom.judge(case)]
    order = list(Severity)
    return sorted(found, key=lambda pair: order.index(pair[1].severity))
