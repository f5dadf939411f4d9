"""The coordinator in its thread may end at any moment, even during a call."""

from __future__ import annotations

from dalsegno.runs.torchrun.args import TorchrunArgs
from dalsegno.runs.torchrun.coordinator import CoordinatorThread, TorchrunSite
from dalsegno.runs.torchrun.rendezvous import ALONE, Keys


def test_ended_coordinator_accepts_leave_and_stop() -> None:
    keys, said = Keys("j", "h:1", None), list[str]()
    keys.make()
    hosted = CoordinatorThread(TorchrunSite(TorchrunArgs("train.py"), "j", "id", 1, ALONE), keys, said.append)
    assert hosted.open() > 0
    hosted.stop("seen enough")
    hosted.join(30)
    hosted.leave("SIGTERM")
    hosted.stop("seen more than enough")
    assert said == []
