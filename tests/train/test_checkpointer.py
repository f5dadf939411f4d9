"""The loops of one process: errors, signals and resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train import Checkpointer, CheckpointError
from tests.train.memory.processes import fork


def made(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder, model=torch.nn.Linear(2, 2), disk_every=None, **options)


def test_step_that_is_not_reported_is_refused(tmp_path: Path) -> None:
    ckpt = made(tmp_path)
    loop = ckpt.steps(5)
    next(loop)
    with pytest.raises(CheckpointError, match=r"call done\(0\)"):
        next(loop)
    loop = made(tmp_path).steps(5)
    next(loop)


def test_only_the_newest_checkpointer_of_a_folder_is_active(tmp_path: Path) -> None:
    first, second, elsewhere = made(tmp_path / "a"), made(tmp_path / "a"), made(tmp_path / "b")
    loops = [each.steps(5) for each in (first, elsewhere, second)]
    assert [next(loop) for loop in loops] == [0, 0, 0]
    second.done(0)
    elsewhere.done(0)
    with pytest.raises(CheckpointError, match="another one using"):
        first.done(0)


# Custom loops: each does ten steps that draw random numbers, and is interrupted after the fourth.

STEPS = """
    for step in ckpt.steps(10):
        train_one_step()
        ckpt.done(step)
"""

WHILE = """
    ckpt.begin()
    while ckpt.step < 10:
        train_one_step()
        ckpt.done()
    ckpt.finish()
"""

WITH = """
    with ckpt:
        while ckpt.step < 10:
            train_one_step()
            ckpt.done()
"""

# The shape of Hugging Face's TrainerCallback: the trainer owns the loop.
HUGGING_FACE = """
    class Callback:
        def on_train_begin(self, args, state, control, **more):
            ckpt.begin(total=10)
        def on_step_end(self, args, state, control, **more):
            ckpt.done(loss=0.5)
        def on_train_end(self, args, state, control, **more):
            ckpt.finish()

    callback = Callback()
    callback.on_train_begin(None, None, None, model=model)
    for step in range(ckpt.step, 10):
        train_one_step()
        callback.on_step_end(None, None, None)
    callback.on_train_end(None, None, None)
"""

# The shape of a Lightning callback: another control flow, the same three calls.
LIGHTNING = """
    class Callback:
        def on_train_start(self, trainer, module):
            ckpt.begin()
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            ckpt.done(ckpt.step, loss=outputs)
        def on_train_end(self, trainer, module):
            ckpt.finish()

    def fit(callback):
        callback.on_train_start(None, model)
        for index in range(ckpt.step, 10):
            callback.on_train_batch_end(None, model, train_one_step(), None, index)
        callback.on_train_end(None, model)

    fit(Callback())
"""

SCRIPT = """
    import os, signal, sys, torch
    from dalsegno.train import Checkpointer

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    class Count:
        value = 0
        def state_dict(self):
            return {"value": self.value}
        def load_state_dict(self, state):
            self.value = state["value"]
    count = Count()
    own = {"count": count}
    ckpt = Checkpointer(sys.argv[1], model=model, optimizer=optimizer, per_rank=own, disk_every=None)

    def train_one_step():
        if ckpt.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGTERM)
        count.value += 1
        optimizer.zero_grad()
        loss = torch.nn.functional.dropout(model(torch.rand(4))).sum()
        loss.backward()
        optimizer.step()
        return loss
    LOOP
    print(model.weight.sum().item(), torch.rand(1).item(), ckpt.step, count.value)
"""


def write_loop(folder: Path, loop: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT).replace("LOOP", textwrap.dedent(loop)))
    return folder / "train.py"


def run_loop(folder: Path, loop: str, stop_at: int = -1) -> tuple[int, str, str]:
    """Run the script in a forked process, which has torch loaded. Return exit code, output and errors."""
    script = write_loop(folder, loop)

    def run() -> None:
        for name, fd in (("out", 1), ("err", 2)):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        sys.argv = [str(script), str(folder / "ckpt"), str(stop_at)]
        code = 0
        try:
            exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        os._exit(code)

    _, status = os.waitpid(fork(run), 0)
    return os.waitstatus_to_exitcode(status), (folder / "out").read_text(), (folder / "err").read_text()


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of the script without an interruption."""
    code, output, errors = run_loop(tmp_path_factory.mktemp("at-once"), STEPS)
    assert code == 0, errors
    return output


@pytest.mark.cluster  # processes with torch: too slow for the unit part
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(WHILE, id="while"),
        pytest.param(WITH, id="with", marks=pytest.mark.long),
        pytest.param(HUGGING_FACE, id="hf", marks=pytest.mark.long),
        pytest.param(LIGHTNING, id="lightning", marks=pytest.mark.long),
    ],
)
def test_custom_loop_stops_at_a_signal_and_resumes_with_the_same_numbers(
    tmp_path: Path, loop: str, at_once: str
) -> None:
    code, _, errors = run_loop(tmp_path, loop, stop_at=4)
    assert code == 75 and "saved step 5, stopping" in errors, errors
    code, output, errors = run_loop(tmp_path, loop)
    assert code == 0 and "resuming from step 5" in errors, errors
    assert output == at_once and output.split()[2:] == ["10", "10"]
    assert os.readlink(tmp_path / "ckpt" / "latest") == "step-000000000010", "the last step is always saved"


def test_done_before_begin_is_refused(tmp_path: Path) -> None:
    """Otherwise a resumed training would silently draw other random numbers."""
    with pytest.raises(CheckpointError, match=r"call begin\(\) before the first step"):
        made(tmp_path).done()
    with pytest.raises(CheckpointError, match="before the loop began"):
        made(tmp_path).finish()


def test_begin_installs_signal_handlers_and_an_error_saves_nothing(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), made(tmp_path) as ckpt:
        assert signal.getsignal(signal.SIGTERM) != before
        ckpt.done()
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGTERM) == before and not (tmp_path / "latest").exists()


@pytest.mark.cluster  # processes with torch: too slow for the unit part
def test_script_that_ends_without_finish_prints_what_was_saved(tmp_path: Path) -> None:
    script = write_loop(tmp_path, WHILE.replace("    ckpt.finish()\n", ""))
    argv = [sys.executable, str(script), str(tmp_path / "ckpt"), "-1"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "the script ended after step 10 without finish(): nothing was saved" in done.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([1], "per_rank= is a list"),
        ({"cache": 1}, r"`cache` in per_rank= \(int\) has no state_dict"),
        ({"model": torch.nn.Linear(1, 1)}, "`model` is given twice"),
    ],
)
def test_invalid_per_rank_object_is_refused(tmp_path: Path, given: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        made(tmp_path, per_rank=given)
