"""One rank of a benchmark that was started here: `python -m dalsegno.bench.ladder_rank FOLDER`.

The folder holds `ask.json`; the ranks meet over a file in it, rank 0 leaves `progress` and `report.json` there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dalsegno.bench.ladder import LadderAsk, make_importable

ASK, MEETING, PROGRESS, REPORT = "ask.json", "meeting", "progress", "report.json"


def main(folder: Path) -> None:
    make_importable()
    from dalsegno.bench.ladder_measure import measure

    who_started_us = os.getppid()

    ask = LadderAsk.from_json((folder / ASK).read_text())

    def each_round(number: int) -> None:
        if os.getppid() != who_started_us:
            sys.exit("whoever started this benchmark is gone")
        if os.environ["RANK"] == "0" and ask.progress(number):
            (folder / PROGRESS).write_text(ask.progress(number))

    report = measure(ask, f"file://{folder / MEETING}", each_round)
    if report:
        (folder / REPORT).write_text(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
