"""Does every host of a cluster know `--container-image`: asked on each, judged, and mended."""

from dalsegno.containers.plugstack.asking import ask_all
from dalsegno.containers.plugstack.facts import HostFacts, parse_answer
from dalsegno.containers.plugstack.judge import Finding, judge
from dalsegno.containers.plugstack.repairs import Repair, decide_repairs
from dalsegno.containers.plugstack.ways import Way

__all__ = ["Finding", "HostFacts", "Repair", "Way", "ask_all", "decide_repairs", "judge", "parse_answer"]
