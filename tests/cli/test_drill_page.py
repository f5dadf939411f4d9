"""Where the page of a drill goes."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

from dalsegno.cli.drill import write_page


def test_a_file_is_replaced_and_what_is_no_file_stays_what_it_is(tmp_path: Path):
    page, pipe = tmp_path / "page.html", tmp_path / "pipe"
    write_page(page, "first")
    write_page(page, "second")
    assert page.read_text() == "second"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_page(pipe, "told")
    reader.join(60)
    assert read == ["told"] and pipe.is_fifo()
