"""A loop of one process: what is refused, and who is at work. No step is saved here: savers are processes."""

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


def test_a_step_that_is_not_reported_and_one_that_is_reported_twice_are_refused(tmp_path: Path) -> None:
    ckpt = made(tmp_path)
    loop = ckpt.steps(5)
    next(loop)
    with pytest.raises(CheckpointError, match=r"call done\(0\)"):
        next(loop)
    loop = made(tmp_path).steps(5)
    next(loop)


def test_one_checkpointer_is_at_work_in_a_folder_the_newest(tmp_path: Path) -> None:
    first, second, elsewhere = made(tmp_path / "a"), made(tmp_path / "a"), made(tmp_path / "b")
    loops = [each.steps(5) for each in (first, elsewhere, second)]
    assert [next(loop) for loop in loops] == [0, 0, 0]
    second.done(0)
    elsewhere.done(0)
    with pytest.raises(CheckpointError, match="another one at work"):
        first.done(0)


# Loops of one's own: each does ten steps that draw random numbers, and is interrupted after the fourth.

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

# The shape of Hugging Face's TrainerCallback: the loop is the trainer's.
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

# The shape of a Lightning callback: another thread of control, the same three moments.
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
    """Exit code, output and errors of the script, in a process that was forked: it need not import torch again."""
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
    """What the script prints that is never interrupted."""
    code, told, errors = run_loop(tmp_path_factory.mktemp("at-once"), STEPS)
    assert code == 0, errors
    return told


@pytest.mark.parametrize("loop", [WHILE, WITH, HUGGING_FACE, LIGHTNING], ids=["while", "with", "hf", "lightning"])
def test_a_loop_of_ones_own_stops_at_a_signal_and_goes_on_with_the_same_numbers(
    tmp_path: Path, loop: str, at_once: str
) -> None:
    code, _, errors = run_loop(tmp_path, loop, stop_at=4)
    assert code == 75 and "saved step 5, stopping" in errors, errors
    code, told, errors = run_loop(tmp_path, loop)
    assert code == 0 and "going on from step 5" in errors, errors
    assert told == at_once and told.split()[2:] == ["10", "10"]
    assert os.readlink(tmp_path / "ckpt" / "latest") == "step-000000000010", "the last step is saved unasked"


def test_done_before_the_loop_began_is_refused_at_the_first_step(tmp_path: Path) -> None:
    """A resumed training would go on with other random numbers, and nobody would know."""
    with pytest.raises(CheckpointError, match=r"call begin\(\) before the first step"):
        made(tmp_path).done()
    with pytest.raises(CheckpointError, match="before the loop began"):
        made(tmp_path).finish()


def test_begin_hears_signals_and_an_error_inside_with_saves_nothing(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), made(tmp_path) as ckpt:
        assert signal.getsignal(signal.SIGTERM) != before
        ckpt.done()
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGTERM) == before and not (tmp_path / "latest").exists()


def test_a_script_that_ends_without_finish_is_told_what_it_has_lost(tmp_path: Path) -> None:
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
def test_what_cannot_be_a_ranks_own_is_refused(tmp_path: Path, given: Any, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        made(tmp_path, per_rank=given)
