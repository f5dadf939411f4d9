"""Messages over the size limit are refused by their sender, and no process ends because of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from dalsegno.errors import UsageError
from dalsegno.runs.agent.evidence import MAX_CHARS
from dalsegno.runs.agent.worker_processes import trim_reports
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.site import GenerationLayout, NodeEnv
from dalsegno.runs.submit.request import RunRequest
from dalsegno.wire.frames import MAX_BYTES, Message, pack
from tests.runs.played import Played, played
from tests.runs.small_site import SmallSite
from tests.submit.torchrun.launcher import Launcher

SOURCE = str(Path(__file__).parents[2] / "src")
LONG = "x" * (MAX_BYTES + 1)

# The worker's message is within the limit, but the message that its agent derives from it exceeds the limit.
SAYS_MUCH = """
sys.path.insert(0, %r)
from dalsegno.wire.frames import MAX_BYTES, frame
message = {"step": 1, "generation": 1, "progress": {"\\u00e9" * (MAX_BYTES // 2 - 100): 1.0}}
sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
sock.connect("\\0" + os.environ["DALSEGNO_AGENT"])
sock.sendall(frame(json.dumps(message, ensure_ascii=False).encode()))
sock.sendall(frame(b'{"grant": 1}'))
sock.settimeout(60)
assert sock.recv(4096)
"""


def test_overlong_worker_message_ends_neither_agent_nor_coordinator(tmp_path: Path):
    async def run() -> None:
        async with played(tmp_path, SAYS_MUCH % SOURCE, "n1", shape=Shape(1, 1, 1), max_restarts=0) as run:
            ending = asyncio.ensure_future(run.ends())
            await run.until(lambda: ending.done() or "lost" in run.events())
            assert "lost" not in run.events() and ending.result() == 0
            assert "n1 dropped a message (`step`" in run.folder.journal.read_text()

    asyncio.run(run())


class LongSetup(SmallSite):
    def setup(self) -> Message:
        return {**super().setup(), "args": [LONG]}


class LongStart(SmallSite):
    def node_env(self, seats: GenerationLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
        return super().node_env(seats, group_rank, found).with_common({"LONG": LONG})


@pytest.mark.parametrize(("site", "word"), [(LongSetup, "setup"), (LongStart, "start")])
def test_overlong_order_ends_the_run_with_a_reason(tmp_path: Path, site: type[SmallSite], word: str):
    async def run() -> None:
        run = Played(tmp_path, "")
        run.site = site(run.folder, script=run.site.script)
        await run.coordinate()
        run.join("n1")
        assert await run.ends() == 1
        assert f"a message to n1 is too long: `{word}`" in run.status.message
        assert run.agents["n1"].wait(60) == 0, "its agent exits normally"

    asyncio.run(run())


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600", "\udc80", "\0"])
@pytest.mark.parametrize("workers", [1, 16, 256])
def test_tracebacks_of_all_workers_of_a_node_fit_into_a_message(letter: str, workers: int):
    reports = [{"rank": rank, "traceback": letter * (MAX_CHARS - 4) + "last"} for rank in range(workers)]
    trimmed = trim_reports(reports)
    assert len(pack({"stopped": 1, "reports": trimmed})) < MAX_BYTES
    assert all(report["traceback"].endswith("last") for report in trimmed)


def test_overlong_script_arguments_are_refused_at_submission():
    with pytest.raises(UsageError, match="the arguments of the script take 1024 KiB") as refused:
        RunRequest(script="train.py", args=(LONG,))
    assert "file" in refused.value.hint


def test_torchrun_refuses_arguments_that_are_too_long_for_its_workers(tmp_path: Path):
    launcher = Launcher(tmp_path, "python3")
    launcher.script("")
    words = ["x" * 100_000] * 8  # the kernel's limit for one argument
    done = launcher.run("--standalone", "train.py", *words)
    assert done.returncode == 2 and "the arguments of the script take" in done.stderr
