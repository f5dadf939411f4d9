"""The check settings from the cluster file, stored beside slurm.conf on every node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.check import Check
from dalsegno.health.result import Remedy, Result, Verdict
from dalsegno.spec.facts import CheckSetting, Health, facts_from_json, facts_to_json
from dalsegno.system.files import damaged, read_text

FILE = "health.json"  # name of the file in the folder of slurm.conf
Settings = Mapping[str, CheckSetting]
_DEFAULT = CheckSetting()


def settings_text(health: Health) -> str:
    return json.dumps(facts_to_json(health), indent=1)


def read_settings(path: Path) -> Settings:
    """Return the settings in a file; empty if the file is missing. Raise an error if its content is not valid."""
    text = read_text(path)
    if text is None:
        return {}
    hint = "`dalsegno up` writes it from `health:` in the cluster file"
    try:
        value = json.loads(text)
        return facts_from_json(Health, value).checks
    except (ValueError, AttributeError, TypeError, DalsegnoError) as error:
        raise damaged(path, str(error), hint) from error


def is_enabled(check: Check, settings: Settings) -> bool:
    return settings.get(check.name, _DEFAULT).enabled


def every_s(check: Check, settings: Settings) -> float:
    chosen = settings.get(check.name, _DEFAULT).every_s
    return check.every_s if chosen is None else float(chosen)


def thresholds(check: Check, settings: Settings) -> dict[str, float]:
    """Return the thresholds of a check: its defaults, overridden by the settings."""
    chosen = settings.get(check.name, _DEFAULT).thresholds
    return {name: chosen.get(name, default) for name, default in check.thresholds.items()}


def cap_remedy(check: Check, settings: Settings, result: Result) -> Result:
    """Limit the remedy to the heaviest one that the settings allow. If that is `watch`, a failure becomes a warning."""
    action = settings.get(check.name, _DEFAULT).action
    if not action or result.verdict is not Verdict.FAILED or not Remedy(action) < result.remedy:
        return result
    verdict = Verdict.WARNED if action == Remedy.WATCH.value else Verdict.FAILED
    return Result(verdict, result.text, Remedy(action), result.code)


# Time limits of a validation: a side that waits has a longer limit than the side it waits for


MARGIN_S = 10.0  # time that a message from a busy machine may take
PORT_S = 30.0  # time limit for the partner to open its port; after that, the node is tested alone
VALIDATE_S = 160.0  # time limit for the node's own tests; after that, its agent ends them and reports a timeout
ANSWER_S = VALIDATE_S + MARGIN_S  # the controller waits this long for the node, and the partner for its first message
LISTEN_S = PORT_S + ANSWER_S + MARGIN_S  # time limit for all work of the partner
PARTNER_S = LISTEN_S + MARGIN_S  # the controller waits this long for the partner's answer
PHASE_S = PARTNER_S + MARGIN_S  # after this time, the validation has failed
