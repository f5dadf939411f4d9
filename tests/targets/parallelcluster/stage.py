"""A target on ParallelCluster whose `pcluster` returns recorded answers, and whose account of AWS is in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dalsegno.setup.delivery import CodeBundle
from dalsegno.targets.parallelcluster.plan import PclusterPlan
from dalsegno.targets.parallelcluster.target import PclusterTarget
from tests.targets.parallelcluster.fake_aws import FakeAccount
from tests.targets.parallelcluster.files import MINIMAL, cluster_of

CODE = CodeBundle("0.1-abc", ((Path(__file__), "dalsegno/x.py"),))
FAKE = Path(__file__).with_name("fake_pcluster.py")


@dataclass
class Stage:
    """A target with its folder, its account and its `pcluster`."""

    root: Path
    account: FakeAccount = field(default_factory=FakeAccount)
    said: list[str] = field(default_factory=list)
    pauses: int = 0

    def __post_init__(self) -> None:
        (self.root / "bin").mkdir()
        (self.root / "fake").mkdir()
        shutil.copy(FAKE, self.root / "bin" / "pcluster")

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": str(self.root / "bin"), "FAKE_PCLUSTER": str(self.root / "fake")}

    @property
    def folder(self) -> Path:
        return self.root / "home" / "clusters" / "demo"

    def scenario(self, **how: Any) -> None:
        (self.root / "fake" / "scenario.json").write_text(json.dumps(how))

    def target(self) -> PclusterTarget:
        """Return a new target, as another process would open it."""
        return PclusterTarget(
            self.folder, lambda region: self.account, env=self.env, pause=self._pause, code=lambda: CODE
        )

    def _pause(self, seconds: float) -> None:
        self.pauses += 1
        assert self.pauses < 100, self.said

    def up(self, text: str = MINIMAL) -> PclusterPlan:
        target = self.target()
        plan = target.plan(cluster_of(text))
        target.apply(plan, self.said.append)
        return plan

    @property
    def calls(self) -> list[list[str]]:
        lines = (self.root / "fake" / "calls.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def clusters(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((self.root / "fake" / "clusters.json").read_text())
        return found

    def config(self) -> Any:
        return yaml.safe_load(self.clusters["demo"]["config"])
