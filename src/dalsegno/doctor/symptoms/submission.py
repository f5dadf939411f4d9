"""Symptoms of the submission: options, containers, ports, conda, folders for output."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dalsegno.doctor.batch import misplaced_options, option_name
from dalsegno.doctor.case import Case, DoctorFinding, Evidence, Severity, Symptom, evidence_of
from dalsegno.doctor.logs import LogSign
from dalsegno.slurm.facts import JobState
from dalsegno.why import explain_job

UNKNOWN_FAILURE = "unknown-failure"
_OFTEN_OWN = ("output", "error", "time", "mem", "gpus", "exclude", "array", "account", "chdir", "job-name")
_FREE_PORT = "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"


def _port_in_use(case: Case) -> Iterator[DoctorFinding]:
    if signs := case.seen(LogSign.PORT_IN_USE):
        port = next((sign.values["port"] for sign in signs if "port" in sign.values), "")
        what = (
            f"MASTER_PORT {port} was in use on the first node" if port else "MASTER_PORT was in use on the first node"
        )
        yield DoctorFinding(Severity.ERROR, what, _FREE_PORT, evidence_of(signs))
        return
    busy = [probe.node for probe in case.probes if probe.port_in_use]
    if busy or (case.port_in_use and not case.cluster and not case.started):
        seen = (Evidence(case.port_where, f"MASTER_PORT={case.port}"), *(Evidence(node, "in use") for node in busy[:2]))
        yield DoctorFinding(
            Severity.ERROR,
            f"MASTER_PORT {case.port} is in use on {busy[0] if busy else 'this machine'}",
            _FREE_PORT,
            seen,
        )


def _no_containers(case: Case) -> Iterator[DoctorFinding]:
    fix = "`dalsegno containers check` shows which node lacks the plugin and the commands that install it"
    if signs := case.seen(LogSign.NO_CONTAINERS):
        what = "srun on that node does not know `--container-image`: its plugstack.conf loads no container plugin"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
        return
    lines = case.batch.container_lines() if case.batch else []
    without = [probe.node for probe in case.probes if probe.containers is False]
    if not lines or case.batch is None or not (without or (case.cluster and case.cluster.containers is False)):
        return
    seen = tuple(Evidence(f"{case.batch.path}:{each.line}", each.text) for each in lines[:2])
    seen += tuple(Evidence(node, "no container plugin") for node in without[:2])
    what = "the job asks for a container, but the workers have no container runtime"
    yield DoctorFinding(Severity.ERROR, what, fix, seen)


def _conda_terms(case: Case) -> Iterator[DoctorFinding]:
    fix = (
        "conda tos accept --override-channels --channel https://repo.anaconda.com/pkgs/main"
        " --channel https://repo.anaconda.com/pkgs/r"
    )
    if signs := case.seen(LogSign.CONDA_TERMS):
        what = "conda created no environment, because the terms of Anaconda's channels were not accepted"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
    elif case.batch and (lines := case.batch.conda_lines()) and not case.started:
        seen = tuple(Evidence(f"{case.batch.path}:{each.line}", each.text) for each in lines[:2])
        what = "conda refuses to create environments in a script until the terms of Anaconda's channels are accepted"
        yield DoctorFinding(Severity.WARNING, what, fix, seen)


def _misplaced_options(case: Case) -> Iterator[DoctorFinding]:
    words = misplaced_options(case.words)
    own = case.script.options if case.script else frozenset()
    words = [word for word in words if option_name(word) not in own]
    used = case.batch is not None and case.batch.takes_arguments
    if words and not used:
        yield DoctorFinding(
            Severity.ERROR,
            f"{' '.join(words)} after the script's name is an argument of the script, not an option of the job",
            f"put {' '.join(words)} before the script's name",
            (Evidence("command line", shlex.join(case.words)),),
        )
    yield from _misplaced_in_batch(case)
    for sign in case.seen(LogSign.UNKNOWN_OPTIONS)[:1]:
        if given := misplaced_options(sign.values.get("words", "").split()):
            what = f"the script got {' '.join(given)}, which is an option of the job"
            yield DoctorFinding(
                Severity.ERROR, what, f"put {' '.join(given)} before the script's name", evidence_of([sign])
            )
    if case.batch and case.batch.late:
        seen = tuple(Evidence(f"{case.batch.path}:{each.line}", each.text) for each in case.batch.late[:3])
        what = "Slurm ignores #SBATCH lines after the first command"
        yield DoctorFinding(Severity.ERROR, what, "move them to the top of the file, below `#!`", seen)


def _misplaced_in_batch(case: Case) -> Iterator[DoctorFinding]:
    """Find options of Slurm after the name of a script that the batch script starts."""
    for call in case.batch.calls if case.batch else ():
        same = case.script is not None and case.script.path.rpartition("/")[2] == call.path.rpartition("/")[2]
        own = case.script.options if case.script and same else frozenset()
        words = [word for word in misplaced_options(call.arguments) if option_name(word) not in own]
        # the options of the script are unknown, so leave out names that scripts often use themselves
        if not (case.script and same):
            words = [word for word in words if option_name(word)[2:] not in _OFTEN_OWN]
        if words and case.batch:
            yield DoctorFinding(
                Severity.ERROR if case.script and same and not case.started else Severity.WARNING,
                f"{' '.join(words)} after {call.path} is an argument of that script, not an option of the job",
                f"#SBATCH {' '.join(words)}",
                (Evidence(f"{case.batch.path}:{call.line.line}", call.line.text),),
            )


def _launcher_arguments(case: Case) -> Iterator[DoctorFinding]:
    batch = case.batch
    broken = [Evidence(f"{batch.path}:{each.line}", each.text) for each in batch.broken] if batch else []
    if broken and batch:
        what = "a backslash with spaces after it does not continue the line: the command ends there"
        fix = f"sed -i 's/\\\\[ \\t]*$/\\\\/' {shlex.quote(batch.path)}"
        yield DoctorFinding(Severity.ERROR, what, fix, tuple(broken[:3]))
    if signs := case.seen(LogSign.LAUNCHER_ARGUMENTS):
        what = "torchrun got no script: a line of the batch script is not continued, or a variable in it is empty"
        fix = "end each line but the last with a single backslash, and name the script by its full path"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
    elif batch and not broken and (lines := batch.without_script()):
        seen = tuple(Evidence(f"{batch.path}:{each.line}", each.text) for each in lines[:2])
        fix = "torchrun --nproc-per-node=N /path/to/train.py ARGS"
        yield DoctorFinding(Severity.ERROR, "torchrun names no script", fix, seen)


def _output_folder(case: Case) -> Iterator[DoctorFinding]:
    for missing in case.missing_folders:
        what = f"the folder {missing.text} does not exist: Slurm ends the job at once and leaves no output"
        yield DoctorFinding(Severity.ERROR, what, f"mkdir -p {shlex.quote(missing.text)}", (Evidence(missing.where),))


_STATES = (
    JobState.TIMEOUT, JobState.NODE_FAIL, JobState.BOOT_FAIL, JobState.LAUNCH_FAILED, JobState.DEADLINE,
    JobState.PREEMPTED, JobState.REQUEUE_HOLD,
)  # fmt: skip


def _job_state(case: Case) -> Iterator[DoctorFinding]:
    if case.job and case.job.state in _STATES:
        explained = explain_job(case.job, case.run)
        fix = explained.next or f"dalsegno why {case.job.label}"
        if case.job.state is JobState.TIMEOUT:
            fix = "submit it with a longer `--time`, or start it with `dalsegno run`, which continues in the next job"
        yield DoctorFinding(
            Severity.ERROR, explained.sentence, fix, (Evidence(f"job {case.job.label}", case.job.state.value),)
        )


def _unknown_failure(case: Case) -> Iterator[DoctorFinding]:
    """Report a failure whose cause is unknown, with the traces that it left. `examine` drops this finding if another
    symptom found an error."""
    ends = [each for each in case.ends if each.error]
    late = [each for each in ends if each.at_end]
    seen = tuple(Evidence(f"{each.name}:{each.error_line}", each.error) for each in (late or ends)[:3])
    fix = f"{case.read_next} shows the whole error" if case.read_next else "read the lines before the error in the log"
    if case.failure:
        lines = tuple(Evidence(f"{each.name}:{at}", text) for each in case.ends[:1] for at, text in each.last)
        seen = seen or lines or (Evidence(case.subject, case.job.state.value if case.job else ""),)
        yield DoctorFinding(Severity.ERROR, f"{case.failure}; no known cause found", fix, seen)
    elif late and case.job and case.job.state is JobState.COMPLETED:
        what = f"job {case.job.label} ended with exit code 0, but its output ends with an error; no known cause found"
        yield DoctorFinding(Severity.WARNING, what, fix, seen)
    elif late and not case.run and not case.job:
        yield DoctorFinding(Severity.ERROR, f"{case.subject} ends with an error; no known cause found", fix, seen)
    elif ends and not case.run and not case.job:
        yield DoctorFinding(Severity.NOTE, f"{case.subject} contains an error, but goes on after it", fix, seen)


def _too_few_gpus(case: Case) -> Iterator[DoctorFinding]:
    if signs := case.seen(LogSign.TOO_FEW_GPUS):
        fix = "request one GPU for each process (`--gpus-per-node` equals `--nproc-per-node`)"
        fix += ', and call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` at the start of the script'
        what = "two processes use the same GPU, or one uses a GPU that the job does not have"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))


def _no_driver(case: Case) -> Iterator[DoctorFinding]:
    if signs := case.seen(LogSign.NO_DRIVER):
        fix = "use a partition with GPUs (`sinfo -o '%P %G'`); if this node has some, run `dalsegno health --node NODE`"
        yield DoctorFinding(Severity.ERROR, "the node has no GPU, or its driver does not run", fix, evidence_of(signs))


SYMPTOMS = (
    Symptom("port-in-use", "Is MASTER_PORT free?", _port_in_use),
    Symptom("no-containers", "Can the workers start the container?", _no_containers),
    Symptom("conda-terms", "Are the terms of conda's channels accepted?", _conda_terms),
    Symptom("misplaced-options", "Are the job's options before the script's name?", _misplaced_options),
    Symptom("launcher-arguments", "Does torchrun get its script?", _launcher_arguments),
    Symptom("output-folder", "Does the folder for the job's output exist?", _output_folder),
    Symptom("job-state", "How did Slurm end the job?", _job_state),
    Symptom(UNKNOWN_FAILURE, "Did it fail for an unknown reason?", _unknown_failure),
    Symptom("too-few-gpus", "Does each process have a GPU of its own?", _too_few_gpus),
    Symptom("no-driver", "Does the node have a working GPU driver?", _no_driver),
)
