"""The symptoms that the doctor knows."""

from dalsegno.doctor.symptoms import program, submission, training

SYMPTOMS = (*program.SYMPTOMS, *submission.SYMPTOMS, *training.SYMPTOMS)
