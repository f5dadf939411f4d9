"""Logs of a node that does not see the run folder."""

from pathlib import Path

import pytest

from dalsegno.runs.agent.log_stream import CHUNK_BYTES, LogStream
from dalsegno.runs.folder import RunFolder


def received(stream: LogStream) -> dict[str, bytes]:
    """Return what a coordinator would have written."""
    files: dict[str, bytes] = {}

    def tell(message: dict[str, str]) -> bool:
        data = message["text"].encode("utf-8", "surrogateescape")
        files[message["log"]] = files.get(message["log"], b"") + data
        return True

    while stream.pump(tell):
        pass
    return files


def test_new_log_data_is_sent_once_with_any_bytes():
    stream = LogStream("train-k3f9x", "n1")
    log = Path(stream.folder, "logs", "g0001", "rank0.log")
    log.parent.mkdir(parents=True)
    log.write_bytes("schön\n".encode() + b"\xff\xfe" + b"x" * CHUNK_BYTES)
    assert received(stream) == {"logs/g0001/rank0.log": log.read_bytes()}
    with log.open("ab") as file:
        file.write(b"more")
    assert received(stream) == {"logs/g0001/rank0.log": b"more"}
    assert received(stream) == {}
    stream.close(lambda message: False)
    assert not Path(stream.folder).exists()


def test_unsent_log_data_is_sent_later():
    stream = LogStream("train-k3f9x", "n1")
    log = Path(stream.folder, "rank0.log")
    log.write_bytes(b"said while nobody listened")
    assert not stream.pump(lambda message: False)
    assert received(stream) == {"rank0.log": log.read_bytes()}
    stream.close(lambda message: False)


@pytest.mark.parametrize(
    ("name", "inside"),
    [("logs/g0001/rank0.log", True), ("stacks/g0001-rank0.txt", True), ("plan.json", False), ("/etc/passwd", False),
     ("logs/../connect.json", False), ("", False)],
)  # fmt: skip
def test_log_names_cannot_leave_the_folder(tmp_path: Path, name: str, inside: bool):
    assert (RunFolder(tmp_path).inside(name) is not None) is inside
