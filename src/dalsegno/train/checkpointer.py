"""The Checkpointer: a training script uses it to save its objects and to loop over its steps."""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Union

from dalsegno.train import contract
from dalsegno.train.agent import find_agent
from dalsegno.train.corruption import Backward, GradientCheck
from dalsegno.train.disk.folder import OpeningRun, open_folder, set_aside_untrusted
from dalsegno.train.disk.format import checkpointer_name
from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import ALONE, sweep_abandoned, sweep_rank
from dalsegno.train.options import (
    Folder,
    Never,
    check_folder,
    check_objects,
    check_options,
    check_per_rank,
    parse_interval,
    parse_trusted,
    parse_verified,
    parse_verify_every,
)
from dalsegno.train.progress import ProgressReporter
from dalsegno.train.rank_state import RankOwnState, digest, seed_for, take_randomness
from dalsegno.train.ranks import locate_process, open_rank_store, with_run_name
from dalsegno.train.resume import Resumed, fix_layouts, resume_from_disk, resume_from_memory
from dalsegno.train.saver import SaverTerms
from dalsegno.train.schedule import READ_S, Leader, StepClock, due, next_common_step
from dalsegno.train.signals import SaveSignal, replace_active
from dalsegno.train.snapshots import RankSnapshots
from dalsegno.train.state import Objects, TrainingState, take

GRACE_S = 25.0  # default of `grace_s`: less than the 30 s between Slurm's SIGTERM and SIGKILL
LAST_SAVE_S = 1800.0  # timeout of the last save, which has no other deadline
HOW_TO_BEGIN = "loop over steps() or epochs(), or call begin() before the first step and finish() after the last"
Every = Union[int, str, None]
_checkpointers = itertools.count()  # numbers the Checkpointers of this process
_PROCESS = secrets.token_hex(4)  # random, because containers may share /dev/shm and use the same process ids


class Checkpointer:
    """Saves the state of a training run and restores it after a restart.

    Pass the objects to save by name: anything with `state_dict` and `load_state_dict`. If there is a saved state, the
    constructor loads it into these objects.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        data: Any = None,
        per_rank: Mapping[str, Any] | None = None,
        memory_every: Every = "auto",
        disk_every: Every = "10m",
        keep: int = 3,
        keep_every: int | None = None,
        grace_s: float = GRACE_S,
        signals: tuple[int, ...] = (),
        **objects: Any,
    ) -> None:
        data = objects.pop("sampler", None) if data is None else data  # `sampler` is the former name of `data`
        check_options(memory_every, disk_every, keep, keep_every, grace_s, signals)
        check_objects(objects, data if data is not None else per_rank)
        check_per_rank(per_rank, objects)
        self.folder = check_folder(folder)
        self._objects, self._own = Objects(objects), RankOwnState(data, per_rank or {})
        self.disk_every = parse_interval(disk_every, "disk_every", auto=False)
        self.step = 0
        self._grace_s, self._signals = grace_s, signals
        self._clock = StepClock(began=time.monotonic())
        self._number = next(_checkpointers)
        # The agent stores one state per rank: that of the first Checkpointer. Later Checkpointers save to disk only.
        self._agent = find_agent() if self._number == 0 else None
        # Without an agent, snapshots are taken only for saves to disk: after a restart, no process could find them.
        self.memory_every = parse_interval(memory_every, "memory_every") if self._agent else Never()
        self._where = locate_process()
        self._rank_store = open_rank_store(self._where.rank, self._where.world)
        has_name = bool(self._where.run)
        self._where = with_run_name(self._where, self._rank_store.gather("run", f"{ALONE}{os.getpid()}-{_PROCESS}")[0])
        fix_layouts(objects.values(), self._warn)
        self._open_folder(has_name)
        self.resumed = self._resume()
        self._save_step = self.resumed.step if self.resumed and self.resumed.source == "disk" else -1
        self._keeping = self._start_keeping(keep, keep_every)
        self._leader = Leader(self.memory_every, self.disk_every, time.monotonic())
        self._reporter = ProgressReporter(self._agent, self._where.generation, self._where.rank, objects.values())
        self._gradient_check = GradientCheck(parse_verify_every(os.environ), self._where, self._rank_store, self._agent)
        self._agreed: dict[str, Any] = {}
        self._read_at = float("-inf")
        self._total: int | None = None
        self._begun = self._ended = False
        self._signal = SaveSignal()

    # The training loop

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps. After the last one, wait until the state is on disk."""
        self._begin()
        self._total = total
        if self.step >= total > 0:
            self._say(f"all {total} steps are already done; to start from scratch, use --fresh (or {contract.FRESH}=1)")
        try:
            while self.step < total:
                number = self.step
                yield number
                if self.step == number:
                    raise CheckpointError(f"step {number} was not reported as done", hint=f"call done({number})")
            self._finish()
        finally:
            self.end()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the unfinished epochs. After the last one, wait until the state is on disk.

        After a resume, the first epoch continues at the saved position in the data.
        """
        place = self._own.place
        if place is None:
            raise CheckpointError("epochs() needs the data loader", hint="create it with Checkpointer(…, data=loader)")
        self._begin()
        try:
            for epoch in range(place.epoch, total):
                place.number(epoch)
                yield epoch
                place.finish(epoch)
            self._finish()
        finally:
            self.end()

    def begin(self, total: int | None = None) -> None:
        """Begin your own training loop. Call this right before the first step; `steps` and `epochs` do it themselves.

        This call restores the random states and installs signal handlers. `total` is the number of steps of the whole
        training.
        """
        if not self._begun:
            self._begin()
            self._total = total

    def finish(self) -> None:
        """Save the state after the last step of your own loop, and wait until it is on disk."""
        if self._ended:
            return
        if not self._begun:
            raise CheckpointError("finish() was called before the loop began", hint=HOW_TO_BEGIN)
        try:
            self._finish()
        finally:
            self.end()

    def __enter__(self) -> Checkpointer:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Call `finish`.

        After an error, call `end` instead and save nothing, because the state may be in the middle of a step.
        """
        if kind is None:
            self.finish()
        else:
            self.end()

    def done(self, step: int | None = None, loss: Any = None, samples: int | None = None, **figures: Any) -> None:
        """Report that a step is complete. Snapshots, saves and stops happen in this call."""
        if self._ended:
            raise CheckpointError("this Checkpointer's loop has ended", hint=f"is another one using {self.folder}?")
        if not self._begun:
            what = "done() was called before the loop began: random states and signal handlers are not set"
            raise CheckpointError(what, hint=HOW_TO_BEGIN)
        if step is not None and step != self.step:
            raise CheckpointError(f"done({step}) was called during step {self.step}", hint="call done once per step")
        self.step += 1
        self._own.step_done(samples)
        self._clock.step(time.monotonic())
        self._keeping.step_done()
        self._sync_rank_store()
        now_due = due(self.step, self.memory_every, self.disk_every, self._agreed, last=self._total)
        if now_due.memory or now_due.disk:
            self._keep(save=now_due.disk)
            self._clock.stall(time.monotonic())
        self._reporter.report(self.step, self._clock, loss, dict(figures, samples=samples), self._keeping.counted)
        if now_due.stop:
            self._stop()

    def verify(self, model: Any, batch: Any, backward: Backward) -> None:
        """Check for silent data corruption, if `--verify-every` asks for it at this step.

        Call this method on every rank in every step, before the step's own forward pass. `backward(module, batch)` must
        run a forward pass and call `loss.backward()`. `module` is the model without its DDP wrapper.

        If a majority of ranks shows that one node computed wrong gradients, the run excludes the node and resumes from
        a checkpoint that is not newer than the last check that passed. Without Dal Segno's launcher, the script fails
        instead. If there is no majority, rank 0 prints a message and training continues.
        """
        verdict = self._gradient_check.run(self.step, model, batch, backward)
        if verdict is not None:
            self._say(verdict.text)
        elif self._gradient_check.is_due(self.step):
            self._keeping.record_verified(self.step)

    def watch(self, waiting: Any) -> None:
        """Read from a DDP model or a WaitClock how long this rank waits for others. The times show which rank is slow.

        A DDP model that was passed to the constructor is read without this call. Call it for a model that a framework
        wraps later.
        """
        self._reporter.watch(waiting)

    def settle(self) -> None:
        """Wait until a running snapshot is complete.

        Call this before you change parameters yourself, for example to swap in averaged weights (EMA). An optimizer's
        step() waits automatically.
        """
        self._keeping.settle(wait=True)

    # Before the first step

    def _open_folder(self, has_name: bool) -> None:
        where = self._where
        if where.rank != 0:
            return
        aside = open_folder(
            self.folder, OpeningRun(where.run, has_name, where.generation, self._number, where.fresh), self._warn
        )
        if aside is not None:
            self._say(f"starting from scratch; the earlier checkpoints are now in {aside}")
        if trusted := parse_trusted(os.environ):
            corrupt = set_aside_untrusted(self.folder, where.run, *trusted)
            if corrupt is not None:
                self._say(f"checkpoints after step {trusted[1]} may be corrupt; they are now in {corrupt}")

    def _resume(self) -> Resumed | None:
        rank = self._where.rank
        found = (
            resume_from_memory(self._objects, self._agent, self.folder, self._rank_store, rank, self._warn)
            if self._agent
            else None
        )
        found = found or resume_from_disk(
            self._objects, self.folder, self._rank_store, rank, self._where.world, self._warn
        )
        if found is not None:
            self.step = found.step
            digests = [digest(found.own.get("random")), digest(take_randomness())]
            saved, now = zip(*self._rank_store.gather("random", digests))
            self._own.load(found.own, found.world, self._where.world, seed_for(rank, saved, found.world, now))
            missing = self._own.load_per_rank(found.own, rank)
            if missing:
                names = ", ".join(f"`{name}`" for name in missing)
                self._warn(f"no saved state of {names} for this rank: it starts as the script created it")
            self._say(f"resuming from step {found.step} ({found.source})")
            if self._agent and rank == 0:
                generation = self._where.generation
                self._agent.send({"resumed": found.step, "source": found.source, "generation": generation})
        return found

    def _start_keeping(self, keep: int, keep_every: int | None) -> RankSnapshots:
        """Create the object that takes snapshots and writes checkpoints.

        Each Checkpointer in this process uses its own name for them, because a notebook cell may run twice.
        """
        where, number = self._where, self._number
        run = checkpointer_name(where.run, number)
        sweep_abandoned()
        terms = SaverTerms(
            str(self.folder), run, where.generation, where.rank, where.world,
            keep, keep_every, sweep=self._agent is None, verified=parse_verified(os.environ),
        )  # fmt: skip
        if self._agent is None:
            self._say_disk_only()
            atexit.register(lambda: None if self._keeping.left_to_saver else sweep_rank(run, where.rank))
        resumed = self.resumed.step if self.resumed else None
        return RankSnapshots(terms, self._agent, resumed, where.local_world, self._warn, self._say)

    def _begin(self) -> None:
        if self._ended:
            raise CheckpointError(
                "this Checkpointer's loop has ended", hint="create another one: it resumes from the last save"
            )
        self._begun = True
        replace_active(self.folder, self)
        atexit.register(self._say_unfinished)
        self._own.restore_randomness()
        self._signal.listen(self._signals)
        self._clock.begin(time.monotonic())

    # Between steps

    def _sync_rank_store(self) -> None:
        """Report a failed save of this rank to the other ranks, and read what they report, through the rank store.

        This is done at intervals. If this rank was asked to stop, it writes the request and reads the store at once.
        """
        now = time.monotonic()
        ahead = next_common_step(self.step, self._clock.fastest_s, self._where.world)
        if self._signal.received is not None:
            self._rank_store.write("stop", ahead, replace=False)
        elif now - self._read_at < READ_S:
            return
        self._read_at = now
        if self._keeping.collect_results():
            self._rank_store.write("failed", self.step)
        self._agreed = self._rank_store.read()
        if self._where.rank == 0:
            self._lead(now, ahead)

    def _lead(self, now: float, ahead: int) -> None:
        keeping, behind = self._keeping, self._leader.behind
        measured = (self._clock.mean_s, keeping.counted.stall_s, self._agreed.get("failed"), ahead, keeping.busy)
        for name, value in self._leader.decide(self.step, now, *measured).items():
            self._rank_store.write(name, value)
            self._agreed[name] = value
        if self._leader.behind and not behind:
            self._warn("a save takes longer than disk_every: the next one starts when it is done")

    def _keep(self, save: bool) -> None:
        self._keeping.keep(self._state(), self._objects.steady(), save)
        self._save_step = self.step if save else self._save_step

    def _state(self) -> TrainingState:
        where = self._where
        apart = self._objects.apart() if where.world > 1 else ()
        return take(self._objects.nested(), self._own.take(where.rank), self.step, where.rank, where.world, apart)

    # The end of training

    def _stop(self) -> NoReturn:
        """Exit after the same step as all other ranks. The exit code says whether the state was saved.

        After Ctrl-C without a launcher, raise KeyboardInterrupt instead.
        """
        saved = self._all_saved(self._grace_s)
        self.end()
        if saved:
            self._say(f"saved step {self.step}, stopping")
        else:
            self._warn(f"stopping; step {self.step} could not be saved in time")
        if self._signal.received == signal.SIGINT and self._agent is None:
            raise KeyboardInterrupt
        sys.exit(contract.SAVED if saved else contract.TERMINATED)

    def _finish(self) -> None:
        """Wait until the last step is on disk. Save it now if it was not saved yet, or if its save failed."""
        if self._all_saved(LAST_SAVE_S):
            return
        self._keep(save=True)
        if not self._all_saved(LAST_SAVE_S, "again"):
            raise CheckpointError(f"the last step, {self.step}, could not be saved", hint="see the warnings above")

    def _all_saved(self, timeout_s: float, attempt: str = "") -> bool:
        """Wait until all ranks have saved the current step, and return whether all saves succeeded."""
        self._reporter.report_end(self.step)
        ours = self._save_step == self.step and self._keeping.wait(self.step, timeout_s)
        ends = self._rank_store.gather(f"ended{attempt}", [self.step, ours])
        self._reporter.report_end(self.step)  # report the end again, now with the counts of the last save
        return all(end == [self.step, True] for end in ends)

    def end(self) -> None:
        """End the loop without saving. `steps`, `epochs` and `finish` call this themselves."""
        if self._ended:
            return
        self._ended = True
        self._signal.stop_listening()
        self._keeping.close()

    # Messages to the user

    def _say_unfinished(self) -> None:
        if not self._ended and self.step > max(self._save_step, 0):
            saved = f"the last saved step is {self._save_step}" if self._save_step > 0 else "nothing was saved"
            self._say(f"the script ended after step {self.step} without finish(): {saved}")

    def _say_disk_only(self) -> None:
        if self._number == 0:
            self._say("not under `dalsegno run`: saving to disk only")
        elif find_agent() is not None:
            self._say("this second Checkpointer saves to disk only; the first one also saves to memory")

    def _say(self, text: str) -> None:
        if self._where.rank == 0:
            print(f"dalsegno: {text}", file=sys.stderr, flush=True)

    def _warn(self, text: str) -> None:
        print(f"dalsegno: warning (rank {self._where.rank}): {text}", file=sys.stderr, flush=True)
