"""What the training of a drill has noted, read as it grows."""

from __future__ import annotations

from pathlib import Path

from dalsegno.drill.story import Step


class Notes:
    """A file that the first rank of every generation adds lines to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[Step] = []
        self.last: Step | None = None  # of the newest generation: a lost node may still note one of the one before
        self.weights = ""  # their digest, at the end
        self._read_to = 0

    def read(self) -> list[Step]:
        """What is new. A line that is not whole yet is left for later, one cut off by a crash passed over."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._read_to)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._read_to += len(whole) + bool(whole)
        before = len(self.steps)
        for line in whole.decode(errors="replace").splitlines():
            self._take(line.split())
        return self.steps[before:]

    def _take(self, words: list[str]) -> None:
        if len(words) == 5 and words[0] == "step":
            step = Step(float(words[1]), int(words[2]), float(words[3]), int(words[4]))
            self.steps.append(step)
            self.last = step if self.last is None or step.generation >= self.last.generation else self.last
        elif len(words) == 2 and words[0] == "weights":
            self.weights = words[1]
