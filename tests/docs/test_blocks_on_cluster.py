"""Run the pages that create a cluster from top to bottom, each in a separate home.

They do not use the shared cluster of the tests: a page creates, changes and removes its own, as a reader would.
"""

import os
from pathlib import Path

import pytest

from tests.cluster.conftest import Cli
from tests.docs.blocks import PAGES, needs_cluster, run_page

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="the pages show virtual hosts, which need root"),
]


LONG = {  # pages that start torch or several clusters, and the tests that run their commands in the ordinary suite
    "ddp-ladder.md": "tests/ladder and tests/bench",
    "monitoring.md": "tests/cluster/test_monitoring.py",
    "runs.md": "README.md, and tests/cluster/test_run_*.py",
    "storage.md": "tests/cluster/test_storage.py",
    "training.md": "tests/train/test_checkpointer.py, and tests/examples",
    "users.md": "tests/cluster/test_users.py",
}


def _marked(page: Path) -> object:
    return pytest.param(page, id=page.name, marks=[pytest.mark.long] * (page.name in LONG))


@pytest.mark.parametrize("page", [_marked(page) for page in PAGES if needs_cluster(page)])
def test_commands_print_what_the_page_shows(page: Path, cli: Cli):
    folder = cli.home / "page"
    folder.mkdir()
    assert run_page(page, folder, cli.env) == []
