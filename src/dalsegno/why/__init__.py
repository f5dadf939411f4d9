"""Explain a node, a run or a job: one timeline, a verdict in a sentence, and the next command."""

from dalsegno.why.answer import Conclusion, Explanation, Moment, merge_timelines, within
from dalsegno.why.job import exit_of, explain_job, moments_of_job, never_started
from dalsegno.why.node import ControllerView, explain_node, moments_of_node, read_controller_view
from dalsegno.why.run import explain_run, moments_of_run, nodes_given, nodes_of_run

__all__ = [
    "Conclusion",
    "ControllerView",
    "Explanation",
    "Moment",
    "exit_of",
    "explain_job",
    "explain_node",
    "explain_run",
    "merge_timelines",
    "moments_of_job",
    "moments_of_node",
    "moments_of_run",
    "never_started",
    "nodes_given",
    "nodes_of_run",
    "read_controller_view",
    "within",
]
