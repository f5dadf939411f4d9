"""Symptoms of the program: the script, its Python environment, and the backend."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dalsegno.doctor.case import Case, DoctorFinding, Evidence, Severity, Symptom, evidence_of
from dalsegno.doctor.logs import LogSign
from dalsegno.doctor.script import FRAMEWORKS, ScriptFacts


def _line(script: ScriptFacts, number: int, text: str = "") -> Evidence:
    return Evidence(f"{script.path}:{number}", text)


def _torch_missing(case: Case) -> Iterator[DoctorFinding]:
    python, signs = case.python, case.seen(LogSign.TORCH_MISSING)
    name = python.python if python else "python3"
    fix = f"{shlex.quote(name)} -m pip install torch"
    if signs:
        yield DoctorFinding(Severity.ERROR, "PyTorch is not installed in the job's Python", fix, evidence_of(signs))
        return
    without = [probe for probe in case.probes if probe.torch is False and probe.python]
    if without:
        seen = tuple(Evidence(probe.node, f"torch is not installed in {name}") for probe in without)
        yield DoctorFinding(Severity.ERROR, f"PyTorch is not installed in {name} on the nodes", fix, seen)
    elif python and python.torch == "" and not case.started and _needs_torch(case):
        what = f"PyTorch is not installed in {name}"
        yield DoctorFinding(Severity.ERROR, what, fix, (Evidence(python.place.path, "no folder torch"),))


def _needs_torch(case: Case) -> bool:
    """Return whether the job needs torch in `case.python`. Return False if a batch script may select another Python."""
    unknown = case.batch is not None and case.python is not None and not case.python.active
    return not unknown and (case.script is None or "torch" in case.script.imports)


def _launcher_missing(case: Case) -> Iterator[DoctorFinding]:
    if signs := case.seen(LogSign.LAUNCHER_MISSING):
        fix = "activate the environment that has PyTorch in the batch script: `source /path/to/venv/bin/activate`"
        if case.python and case.python.torch == "":
            fix = f"{shlex.quote(case.python.python)} -m pip install torch"
        what = "torchrun is not on the job's PATH: the environment was not activated, or was never created"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
    elif missing := case.missing_launcher:
        prefix = shlex.quote(missing.text.rpartition("/bin/")[0])
        what = f"{missing.text} does not exist: the environment was never created, or is elsewhere"
        fix = f"python3 -m venv {prefix} && {prefix}/bin/pip install torch"
        yield DoctorFinding(Severity.ERROR, what, fix, (missing,))


def _script_unreadable(case: Case) -> Iterator[DoctorFinding]:
    for sign in case.seen(LogSign.SCRIPT_MISSING)[:1]:
        path = sign.values.get("path", "the script")
        fix = (
            "use an absolute path on shared storage, and submit from the folder that the job expects;"
            f" then `ls {shlex.quote(path)}`"
        )
        yield DoctorFinding(Severity.ERROR, f"{path} does not exist on the node", fix, evidence_of([sign]))
    for sign in case.seen(LogSign.SCRIPT_UNREADABLE)[:1]:
        path = sign.values.get("path", "the script")
        yield DoctorFinding(
            Severity.ERROR, f"{path} is not readable on the node", f"chmod a+r {shlex.quote(path)}", evidence_of([sign])
        )
    if case.missing_script:
        path = case.missing_script.text
        fix = f"check the path: `ls {shlex.quote(path)}`; a relative path is relative to the folder you submit from"
        where = (Evidence(case.missing_script.where),)
        yield DoctorFinding(Severity.ERROR, f"{path} does not exist", fix, where)
    yield from _script_on_nodes(case)


def _script_on_nodes(case: Case) -> Iterator[DoctorFinding]:
    place = case.place
    if place is None:
        return
    path, quoted = place.path, shlex.quote(place.path)
    blind = [probe for probe in case.probes if probe.script is not None and "r" not in probe.script]
    if blind:
        what = f"{path} is not readable on {len(blind)} of {len(case.probes)} nodes"
        fix = f"copy it to shared storage, or `chmod a+r {quoted}` if it is there"
        seen = tuple(Evidence(each.node, "unreadable" if each.script else "no such file") for each in blind[:3])
        yield DoctorFinding(Severity.ERROR, what, fix, seen)
    elif case.started or case.probes:
        return
    elif place.mode and "r" not in place.mode:
        yield DoctorFinding(Severity.ERROR, f"{path} is not readable", f"chmod a+r {quoted}", (Evidence(path),))
    elif place.shared is False and case.cluster and not case.cluster.same_files:
        what = f"{path} is on a file system of this machine ({place.fstype}), which the nodes may not have"
        fix = (
            "copy it to shared storage, such as your home folder on the cluster; `dalsegno doctor --probe` looks there"
        )
        yield DoctorFinding(Severity.WARNING, what, fix, (Evidence(path, place.fstype),))


def _not_executable(case: Case) -> Iterator[DoctorFinding]:
    for sign in case.seen(LogSign.NOT_EXECUTABLE)[:1]:
        path = sign.values.get("path", "the script")
        fix = f"chmod +x {shlex.quote(path)}"
        yield DoctorFinding(Severity.ERROR, f"{path} is started as a program, but is not executable", fix, (
            Evidence(sign.where, sign.text),))  # fmt: skip


def _syntax(case: Case) -> Iterator[DoctorFinding]:
    script = case.script
    if script and script.fault:
        where = (_line(script, script.fault_line, script.fault),)
        fix = f"python3 -m py_compile {shlex.quote(script.path)}"
        yield DoctorFinding(Severity.ERROR, f"{script.path} is not valid Python: {script.fault}", fix, where)
    elif signs := case.seen(LogSign.SYNTAX):
        yield DoctorFinding(
            Severity.ERROR, "the script is not valid Python", "fix the line that the log names", evidence_of(signs)
        )


CHOOSE = 'backend = "nccl" if torch.cuda.is_available() else "gloo"'


def _wrong_backend(case: Case) -> Iterator[DoctorFinding]:
    script = case.script
    gloo = 'init_process_group(backend="gloo")'
    if signs := case.seen(LogSign.NCCL_WITHOUT_GPU, LogSign.WRONG_DEVICE):
        fix = f"on nodes without GPUs, {gloo}; for both kinds of nodes, {CHOOSE}"
        if any(sign.values.get("device") == "cpu" for sign in signs):
            fix = f"move the tensors to the GPU, or {gloo}"
        what = "the NCCL backend needs GPUs, and the process had none, or its torch was built without CUDA"
        yield DoctorFinding(Severity.ERROR, what, fix, evidence_of(signs))
    elif script and script.backend == "nccl" and not case.started:
        yield from _nccl_before(case, script)
    elif script and script.backend == "gloo" and script.cuda_line and not case.started:
        seen = (_line(script, script.backend_line, "gloo"), _line(script, script.cuda_line, "uses a GPU"))
        what = "the script trains on GPUs but averages gradients with gloo, which copies them through the CPU"
        yield DoctorFinding(Severity.WARNING, what, CHOOSE, seen)


def _nccl_before(case: Case, script: ScriptFacts) -> Iterator[DoctorFinding]:
    seen = (_line(script, script.backend_line, 'backend "nccl"'),)
    cluster, python, batch = case.cluster, case.python, case.batch
    if cluster and not cluster.gpus_per_node:
        where = Evidence(cluster.where, "no GPUs")
        fix = f"{script.path}:{script.backend_line}: {CHOOSE.replace('backend = ', 'backend=')}"
        yield DoctorFinding(Severity.ERROR, f"NCCL needs GPUs, and {cluster.where} has none", fix, (*seen, where))
    elif python and python.active and python.cuda is False and python.torch:
        fix = f"{shlex.quote(python.python)} -m pip install torch  # the default build has CUDA"
        what = f"NCCL needs CUDA, and torch {python.torch} in {python.python} was built without it"
        yield DoctorFinding(Severity.ERROR, what, fix, seen)
    elif cluster and batch and not batch.requests_gpus:
        fix = f"#SBATCH --gpus-per-node={cluster.gpus_per_node}"
        yield DoctorFinding(Severity.ERROR, "the script uses NCCL, but its job requests no GPUs", fix, seen)


def _no_process_group(case: Case) -> Iterator[DoctorFinding]:
    script = case.script
    fix = (
        'call `torch.distributed.init_process_group(backend="gloo")` first ("nccl" on GPUs), then wrap the model in DDP'
    )
    if signs := case.seen(LogSign.NO_PROCESS_GROUP):
        yield DoctorFinding(
            Severity.ERROR, "the process group was used before `init_process_group`", fix, evidence_of(signs)
        )
        return
    if script is None or script.imports & FRAMEWORKS or not script.is_program:
        return
    uses = sorted((*script.wrappers, *script.collectives), key=lambda call: call.line)
    if uses and not script.starts:
        what = f"{uses[0].name} is used, but `init_process_group` is never called"
        yield DoctorFinding(Severity.ERROR, what, fix, (_line(script, uses[0].line, uses[0].text),))
        return
    for start in script.starts:
        early = [use for use in uses if use.function == start.function and use.line < start.line]
        if early and all(other.line >= start.line for other in script.starts if other.function == start.function):
            what = f"{early[0].name} is used before `init_process_group`"
            seen = (_line(script, early[0].line, early[0].text), _line(script, start.line, start.text))
            yield DoctorFinding(Severity.ERROR, what, f"move line {start.line} before line {early[0].line}", seen)


def _environment_not_shared(case: Case) -> Iterator[DoctorFinding]:
    python = case.python
    if python is None:
        return
    without = [probe for probe in case.probes if probe.python is False]
    fix = "create it on shared storage: `python3 -m venv ~/venv && ~/venv/bin/pip install torch`"
    if without:
        seen = tuple(Evidence(probe.node, f"no {python.python}") for probe in without[:3])
        what = f"the Python environment {python.python} is missing on {len(without)} of {len(case.probes)} nodes"
        yield DoctorFinding(Severity.ERROR, what, fix, seen)
        return
    known = python.active and python.place.shared is False and not (case.probes or case.started)
    if known and case.cluster and not case.cluster.same_files:
        place = python.place
        what = f"{place.path} is on a file system of this machine ({place.fstype}), not on shared storage"
        yield DoctorFinding(Severity.WARNING, what, fix, (Evidence(place.path, place.fstype),))


def _every_rank_saves(case: Case) -> Iterator[DoctorFinding]:
    script = case.script
    if script and script.distributed and script.open_saves and not case.started:
        seen = tuple(_line(script, call.line, call.text) for call in script.open_saves[:3])
        what = "every rank writes the same snapshot file at the same time, which can damage it"
        fix = "if torch.distributed.get_rank() == 0: torch.save(...), or use `dalsegno.train.Checkpointer`"
        yield DoctorFinding(Severity.WARNING, what, fix, seen)


def _no_numpy(case: Case) -> Iterator[DoctorFinding]:
    if signs := case.seen(LogSign.NO_NUMPY):
        what = "NumPy is not installed; PyTorch warns, and works without it unless the script uses NumPy"
        name = case.python.python if case.python else "python3"
        yield DoctorFinding(Severity.NOTE, what, f"{shlex.quote(name)} -m pip install numpy", evidence_of(signs[:1]))


SYMPTOMS = (
    Symptom("torch-missing", "Is PyTorch installed in the job's Python?", _torch_missing),
    Symptom("launcher-missing", "Is torchrun on the job's PATH?", _launcher_missing),
    Symptom("script-unreadable", "Can the nodes read the script?", _script_unreadable),
    Symptom("not-executable", "May the script be started as a program?", _not_executable),
    Symptom("syntax", "Is the script valid Python?", _syntax),
    Symptom("wrong-backend", "Does the backend match the hardware?", _wrong_backend),
    Symptom("no-process-group", "Is the process group initialized before it is used?", _no_process_group),
    Symptom("environment-not-shared", "Do the nodes have the Python environment?", _environment_not_shared),
    Symptom("every-rank-saves", "Does only one rank write a snapshot file?", _every_rank_saves),
    Symptom("no-numpy", "Is NumPy installed?", _no_numpy),
)
