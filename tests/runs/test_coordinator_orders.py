"""Parsing of the coordinator's orders."""

from pathlib import Path

from dalsegno.runs.agent.orders import ABSENCE_S, Setup, StartOrder, WorkerOrder, read_setup, read_start
from dalsegno.runs.folder import RunFolder
from tests.runs.small_site import SmallSite


def test_setup_of_the_site_is_parsed():
    site = SmallSite(RunFolder(Path("/runs/train-k3f9x")), script="/t.py", args=("1",), python="/bin/python3")
    assert read_setup(site.setup()) == Setup(
        python="/bin/python3", modules=("json",), script="/t.py", args=("1",), folder="/runs/train-k3f9x",
        env={"DALSEGNO_RUN": "train-k3f9x"}, gone_s=1.5, absence_s=20.0,
    )  # fmt: skip


def test_setup_has_defaults_for_missing_fields():
    message = {"python": "p", "modules": [], "script": "s", "args": [], "module": False, "is_python": False, "cwd": "/",
            "folder": "", "store": False, "env": {}}  # fmt: skip
    assert read_setup(message) == Setup("p", script="s", is_python=False, absence_s=ABSENCE_S)


def test_start_order_names_workers_and_peers():
    plain = {"rank": 2, "env": {"RANK": "2"}}
    own = {"rank": 3, "env": {}, "args": ["x"], "files": {"log": "/l"}}
    message = {"generation": 5, "workers": [plain, own], "peers": [["10.0.0.1", 9002]]}
    workers = (WorkerOrder(2, {"RANK": "2"}), WorkerOrder(3, {}, ("x",), {"log": "/l"}))
    assert read_start(message) == StartOrder(5, workers, (("10.0.0.1", 9002),))
