"""One rank of a benchmark on this machine: `python -m dalsegno.bench.ladder_rank FOLDER`.

The folder holds `ask.json` and the rendezvous file of the ranks. Rank 0 writes `progress` and `report.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dalsegno.bench.ladder import ASK, MEETING, PROGRESS, REPORT, LadderAsk, make_importable


def main(folder: Path) -> None:
    make_importable()
    from dalsegno.bench.ladder_measure import measure

    parent = os.getppid()
    ask = LadderAsk.from_json((folder / ASK).read_text())

    def each_round(number: int) -> None:
        if os.getppid() != parent:
            sys.exit("the process that started this benchmark has ended")
        if os.environ["RANK"] == "0" and ask.progress(number):
            (folder / PROGRESS).write_text(ask.progress(number))

    report = measure(ask, f"file://{folder / MEETING}", each_round)
    if report:
        (folder / REPORT).write_text(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
