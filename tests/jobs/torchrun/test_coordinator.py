"""The coordinator in its thread: it may end at any moment, also while it is being told something."""

from __future__ import annotations

from dalsegno.jobs.torchrun.args import TorchrunArgs
from dalsegno.jobs.torchrun.coordinator import Hosted
from dalsegno.jobs.torchrun.keys import Keys
from dalsegno.jobs.torchrun.meeting import ALONE
from dalsegno.jobs.torchrun.site import TorchrunSite


def test_one_that_is_over_can_still_be_told_to_leave_and_to_stop() -> None:
    keys, said = Keys("j", "h:1", None), list[str]()
    keys.make()
    hosted = Hosted(TorchrunSite(TorchrunArgs("train.py"), "j", "id", 1, ALONE), keys, said.append)
    assert hosted.open() > 0
    hosted.stop("seen enough")
    hosted.join(30)
    hosted.leave("SIGTERM")
    hosted.stop("seen more than enough")
    assert said == []
