"""The three lines of a training script: what to save, the loop, and the end of each step."""

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
from dalsegno.train.disk.folder import Visitor, open_folder
from dalsegno.train.disk.format import numbered
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
)
from dalsegno.train.progress import ProgressReporter
from dalsegno.train.rank_state import Own, digest, seed_for, take_randomness
from dalsegno.train.ranks import named, open_board, stand
from dalsegno.train.resume import Resumed, fix_layouts, from_disk, from_memory
from dalsegno.train.saver import SaverTerms
from dalsegno.train.schedule import READ_S, Leader, StepClock, due, soon
from dalsegno.train.signals import SaveWish, take_turn
from dalsegno.train.snapshots import Keeping
from dalsegno.train.state import Objects, TrainingState, take

GRACE_S = 25.0  # Slurm kills 30 s after it has asked
LAST_SAVE_S = 1800.0  # at the end of a training nobody is in a hurry
HOW_TO_BEGIN = "loop over steps() or epochs(), or call begin() before the first step and finish() after the last"
Every = Union[int, str, None]
_checkpointers = itertools.count()  # of this process
_PROCESS = secrets.token_hex(4)  # containers may share /dev/shm and have the same process ids


class Checkpointer:
    """Keeps a training run from losing its work.

    Give it what has to be saved, by name: anything with `state_dict` and `load_state_dict`. If there is something to
    go on from, it is loaded here: build the model, the optimizer and the rest first.
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
        data = objects.pop("sampler", None) if data is None else data  # an older name
        check_options(memory_every, disk_every, keep, keep_every, grace_s, signals)
        check_objects(objects, data if data is not None else per_rank)
        check_per_rank(per_rank, objects)
        self.folder = check_folder(folder)
        self._objects, self._own = Objects(objects), Own(data, per_rank or {})
        self.disk_every = parse_interval(disk_every, "disk_every", auto=False)
        self.step = 0
        self._grace_s, self._signals = grace_s, signals
        self._clock = StepClock(began=time.monotonic())
        self._number = next(_checkpointers)
        # The agent keeps one state for each rank: that of the first. A second one, say of the next phase, goes to disk.
        self._agent = find_agent() if self._number == 0 else None
        # Without an agent nobody would find a snapshot again.
        self.memory_every = parse_interval(memory_every, "memory_every") if self._agent else Never()
        self._where = stand()
        self._board = open_board(self._where.rank, self._where.world)
        has_name = bool(self._where.run)
        self._where = named(self._where, self._board.gather("run", f"{ALONE}{os.getpid()}-{_PROCESS}")[0])
        fix_layouts(objects.values(), self._warn)
        self._open_folder(has_name)
        self.resumed = self._resume()
        self._save_step = self.resumed.step if self.resumed and self.resumed.source == "disk" else -1
        self._keeping = self._start_keeping(keep, keep_every)
        self._leader = Leader(self.memory_every, self.disk_every, time.monotonic())
        self._teller = ProgressReporter(self._agent, self._where.generation, self._where.rank)
        self._words: dict[str, Any] = {}
        self._looked_at = float("-inf")
        self._total: int | None = None
        self._begun = self._ended = False
        self._wish = SaveWish()

    # The loop

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are still to be done."""
        self._begin()
        self._total = total
        if self.step >= total > 0:
            self._say(f"all {total} steps were done before; --fresh (or {contract.FRESH}=1) starts anew")
        try:
            while self.step < total:
                number = self.step
                yield number
                if self.step == number:
                    raise CheckpointError(f"step {number} was not reported", hint=f"call done({number}) at its end")
            self._finish()
        finally:
            self.end()

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the passes over the data that are not finished. They come from the place in the data."""
        place = self._own.place
        if place is None:
            raise CheckpointError("epochs() has to know the data", hint="Checkpointer(…, data=loader)")
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
        """Begin a loop of your own, right before its first step: `steps` and `epochs` do so themselves.

        Restores the random numbers and starts to listen for signals. `total`: the step that is the last one.
        """
        if not self._begun:
            self._begin()
            self._total = total

    def finish(self) -> None:
        """After the last step of a loop of your own: it is saved, and waited for."""
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
        """A loop that an error ends is not at the end of a step: nothing more is saved."""
        if kind is None:
            self.finish()
        else:
            self.end()

    def done(self, step: int | None = None, loss: Any = None, samples: int | None = None, **figures: Any) -> None:
        """A step is done: everything that has to happen between two steps happens here."""
        if self._ended:
            raise CheckpointError("this Checkpointer's loop is over", hint=f"is another one at work in {self.folder}?")
        if not self._begun:
            what = "done() was called before the loop began: random numbers are not restored, signals are not heard"
            raise CheckpointError(what, hint=HOW_TO_BEGIN)
        if step is not None and step != self.step:
            raise CheckpointError(f"step {step} is done, but step {self.step} was under way", hint="one loop, one step")
        self.step += 1
        self._own.step_done(samples)
        self._clock.step(time.monotonic())
        self._keeping.step_done()
        self._look()
        now_due = due(self.step, self.memory_every, self.disk_every, self._words, last=self._total)
        if now_due.memory or now_due.disk:
            self._keep(save=now_due.disk)
            self._clock.stall(time.monotonic())
        self._teller.tell(self.step, self._clock, loss, dict(figures, samples=samples), self._keeping.counted)
        if now_due.stop:
            self._stop()

    def settle(self) -> None:
        """Before you change parameters yourself (swap an average in, load others): a snapshot of them may be under way.
        An optimizer's step does so itself."""
        self._keeping.settle(wait=True)

    # Before the first step

    def _open_folder(self, has_name: bool) -> None:
        where = self._where
        if where.rank != 0:
            return
        aside = open_folder(
            self.folder, Visitor(where.run, has_name, where.generation, self._number, where.fresh), self._warn
        )
        if aside is not None:
            self._say(f"starting anew; the checkpoints that were there are now in {aside}")

    def _resume(self) -> Resumed | None:
        rank = self._where.rank
        found = (
            from_memory(self._objects, self._agent, self.folder, self._board, rank, self._warn) if self._agent else None
        )
        found = found or from_disk(self._objects, self.folder, self._board, rank, self._where.world, self._warn)
        if found is not None:
            self.step = found.step
            digests = [digest(found.own.get("random")), digest(take_randomness())]
            saved, now = zip(*self._board.gather("random", digests))
            self._own.load(found.own, found.world, self._where.world, seed_for(rank, saved, found.world, now))
            missing = self._own.load_per_rank(found.own, rank)
            if missing:
                names = ", ".join(f"`{name}`" for name in missing)
                self._warn(f"nothing was saved of {names} for this rank: it starts as the script created it")
            self._say(f"going on from step {found.step} ({found.source})")
        return found

    def _start_keeping(self, keep: int, keep_every: int | None) -> Keeping:
        """What it writes bears a name of its own: a cell of a notebook may be run twice."""
        where, number = self._where, self._number
        run = numbered(where.run, number)
        sweep_abandoned()
        terms = SaverTerms(
            str(self.folder), run, where.generation, where.rank, where.world,
            keep, keep_every, sweep=self._agent is None,
        )  # fmt: skip
        if self._agent is None:
            self._say_where_it_goes()
            atexit.register(lambda: None if self._keeping.left_to_saver else sweep_rank(run, where.rank))
        resumed = self.resumed.step if self.resumed else None
        return Keeping(terms, self._agent, resumed, where.local_world, self._warn, self._say)

    def _begin(self) -> None:
        if self._ended:
            raise CheckpointError(
                "this Checkpointer's loop is over", hint="make another one: it goes on from the last save"
            )
        self._begun = True
        take_turn(self.folder, self)
        atexit.register(self._tell_unfinished)
        self._own.give()
        self._wish.listen(self._signals)
        self._clock.begin(time.monotonic())

    # Between steps

    def _look(self) -> None:
        """At the board now and then; what we know ourselves is written there first."""
        now = time.monotonic()
        ahead = soon(self.step, self._clock.fastest_s, self._where.world)
        if self._wish.heard is not None:
            self._board.write("stop", ahead, replace=False)
        elif now - self._looked_at < READ_S:
            return
        self._looked_at = now
        if self._keeping.hear():
            self._board.write("failed", self.step)
        self._words = self._board.read()
        if self._where.rank == 0:
            self._lead(now, ahead)

    def _lead(self, now: float, ahead: int) -> None:
        keeping, behind = self._keeping, self._leader.behind
        about = (self._clock.mean_s, keeping.counted.stall_s, self._words.get("failed"), ahead, keeping.busy)
        for word, value in self._leader.words(self.step, now, *about).items():
            self._board.write(word, value)
            self._words[word] = value
        if self._leader.behind and not behind:
            self._warn("a save takes longer than disk_every: the next one begins when it is done")

    def _keep(self, save: bool) -> None:
        self._keeping.keep(self._state(), self._objects.steady(), save)
        self._save_step = self.step if save else self._save_step

    def _state(self) -> TrainingState:
        where = self._where
        apart = self._objects.apart() if where.world > 1 else ()
        return take(self._objects.nested(), self._own.take(where.rank), self.step, where.rank, where.world, apart)

    # The end

    def _stop(self) -> NoReturn:
        """All ranks stop after the same step. The exit code tells whoever launched us to go on later."""
        saved = self._all_saved(self._grace_s)
        self.end()
        if saved:
            self._say(f"saved step {self.step}, stopping")
        else:
            self._warn(f"stopping; step {self.step} could not be saved in time")
        if self._wish.heard == signal.SIGINT and self._agent is None:
            raise KeyboardInterrupt
        sys.exit(contract.SAVED if saved else contract.TERMINATED)

    def _finish(self) -> None:
        """All steps are done: the last one is saved, and waited for. A save that failed before is tried again."""
        if self._all_saved(LAST_SAVE_S):
            return
        self._keep(save=True)
        if not self._all_saved(LAST_SAVE_S, "again"):
            raise CheckpointError(f"the last step, {self.step}, could not be saved", hint="see the warnings above")

    def _all_saved(self, timeout_s: float, attempt: str = "") -> bool:
        """The first rank's save is done when the checkpoint is whole; no rank leaves before that."""
        self._teller.tell_end(self.step)
        ours = self._save_step == self.step and self._keeping.wait(self.step, timeout_s)
        ends = self._board.gather(f"ended{attempt}", [self.step, ours])
        self._teller.tell_end(self.step)  # with that save
        return all(end == [self.step, True] for end in ends)

    def end(self) -> None:
        """The loop is over, as it is by itself after its last step."""
        if self._ended:
            return
        self._ended = True
        self._wish.stop_listening()
        self._keeping.close()

    # Words to the user

    def _tell_unfinished(self) -> None:
        if not self._ended and self.step > max(self._save_step, 0):
            saved = f"step {self._save_step} is the last that was saved" if self._save_step > 0 else "nothing was saved"
            self._say(f"the script ended after step {self.step} without finish(): {saved}")

    def _say_where_it_goes(self) -> None:
        if self._number == 0:
            self._say("not under `dalsegno run`: what is saved goes to disk only")
        elif find_agent() is not None:
            self._say("a second Checkpointer: what it saves goes to disk only, the first one's to memory too")

    def _say(self, text: str) -> None:
        if self._where.rank == 0:
            print(f"dalsegno: {text}", file=sys.stderr, flush=True)

    def _warn(self, text: str) -> None:
        print(f"dalsegno: warning (rank {self._where.rank}): {text}", file=sys.stderr, flush=True)
