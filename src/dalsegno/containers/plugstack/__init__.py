"""Check that every host of a cluster supports `--container-image`, and plan commands that fix the hosts that do not."""

from dalsegno.containers.plugstack.check import ContainerFinding, judge
from dalsegno.containers.plugstack.commands import CommandStep, PluginBuild, plan_commands
from dalsegno.containers.plugstack.facts import PluginFacts, parse_answer
from dalsegno.containers.plugstack.hosts import HostRoute, ask_all

__all__ = [
    "CommandStep",
    "ContainerFinding",
    "HostRoute",
    "PluginBuild",
    "PluginFacts",
    "ask_all",
    "judge",
    "parse_answer",
    "plan_commands",
]
