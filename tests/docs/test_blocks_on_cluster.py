"""Pages that make a cluster are played from top to bottom, each in a home of its own.

Not on the cluster that tests share: a page brings its own up, changes it and takes it down, as its reader would.
"""

import os
from pathlib import Path

import pytest

from tests.cluster.conftest import Cli
from tests.docs.blocks import PAGES, needs_cluster, play

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="the pages show virtual hosts, which need root"),
]


@pytest.mark.parametrize("page", [page for page in PAGES if needs_cluster(page)], ids=lambda page: page.name)
def test_commands_answer_as_the_page_says(page: Path, cli: Cli):
    folder = cli.home / "page"
    folder.mkdir()
    assert play(page, folder, cli.env) == []
