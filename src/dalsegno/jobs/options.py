"""The options of a run as one table: word, field of RunRequest, and how its text is read.

Command line, job file and variables all go by it, so that a word means the same wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.jobs import values
from dalsegno.jobs.request import Framework, RunRequest
from dalsegno.jobs.values import shown

ENV_PREFIX = "DALSEGNO_RUN_"


@dataclass(frozen=True)
class Option:
    """One option: `time` on the command line and in a job file is `time_limit_s` of the request."""

    word: str
    parse: Callable[[str], object]
    field: str = ""  # "": the same word

    @property
    def target(self) -> str:
        return self.field or self.word

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.word.upper()

    @property
    def flag(self) -> str:
        return "--" + self.word.replace("_", "-")


def parse_framework(text: str) -> Framework:
    words = [framework.value for framework in Framework]
    if text.strip().lower() not in words:
        hint = did_you_mean(text, words, otherwise=f"there are {', '.join(words)}")
        raise UsageError(f"{shown(text)} is no framework we know", hint=hint)
    return Framework(text.strip().lower())


OPTIONS = (
    Option("nodes", values.parse_nodes),
    Option("nproc_per_node", values.parse_positive),
    Option("gpus_per_node", values.parse_gpus),
    Option("cpus_per_task", values.parse_positive),
    Option("mem", values.parse_memory, "memory_mib"),
    Option("spares", values.parse_count),
    Option("partition", str),
    Option("time", values.parse_time_limit, "time_limit_s"),
    Option("account", str),
    Option("qos", str),
    Option("constraint", str),
    Option("exclude", values.parse_hosts),
    Option("env", values.parse_env_words),
    Option("venv", str),
    Option("conda", str),
    Option("name", str),
    Option("detach", values.parse_flag),
    Option("max_restarts", values.parse_count),
    Option("preload", values.parse_modules),
    Option("no_preload", values.parse_flag),
    Option("fresh", values.parse_flag),
    Option("framework", parse_framework),
    Option("hang_timeout", values.parse_seconds, "hang_timeout_s"),
    Option("signal_lead", values.parse_seconds, "signal_lead_s"),
    Option("chdir", str),
    Option("output", str),
    Option("sbatch_args", values.parse_words),
)
_BY_WORD = {option.word: option for option in OPTIONS}


def option(word: str) -> Option:
    """The option of that word, written with `-` or `_`."""
    return _BY_WORD[word.replace("-", "_")]


def parse_option(word: str, text: str) -> object:
    """The value of one option. A fault names the option it was given to."""
    try:
        return option(word).parse(text)
    except UsageError as fault:
        raise UsageError(fault.what, where=option(word).flag, hint=fault.hint) from None


def options_from_env(environ: Mapping[str, str]) -> dict[str, object]:
    """Fields of a request that variables set: `DALSEGNO_RUN_NODES=1:4`. An empty one sets nothing."""
    return {each.target: _read(each, environ[each.variable]) for each in OPTIONS if environ.get(each.variable)}


def _read(each: Option, text: str) -> object:
    try:
        return each.parse(text)
    except UsageError as fault:
        raise UsageError(fault.what, where=each.variable, hint=fault.hint) from None


def make_request(script: str, args: tuple[str, ...] = (), *layers: Mapping[str, object]) -> RunRequest:
    """A request from fields in layers, weakest first. As with sbatch: file, then variables, then command line."""
    fields: dict[str, Any] = {}
    for layer in layers:
        fields.update(layer)
    return RunRequest(**{**fields, "script": script, "args": args})
