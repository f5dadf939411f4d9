"""What the cluster file says of checks, as it lies beside slurm.conf on every node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.check import Check
from dalsegno.health.result import Remedy, Result, Verdict
from dalsegno.spec.facts import CheckSetting, Health, facts_from_json, facts_to_json
from dalsegno.system.files import damaged, read_text

FILE = "health.json"  # beside slurm.conf
Settings = Mapping[str, CheckSetting]
_DEFAULT = CheckSetting()


def settings_text(health: Health) -> str:
    return json.dumps(facts_to_json(health), indent=1)


def read_settings(path: Path) -> Settings:
    """None of its own where there is no file; a file that is something else is an error."""
    text = read_text(path)
    if text is None:
        return {}
    hint = "the cluster file's `health:` is written there by `dalsegno up`"
    try:
        value = json.loads(text)
        return facts_from_json(Health, value).checks
    except (ValueError, AttributeError, TypeError, DalsegnoError) as error:
        raise damaged(path, str(error), hint) from error


def enabled(check: Check, settings: Settings) -> bool:
    return settings.get(check.name, _DEFAULT).enabled


def every_s(check: Check, settings: Settings) -> float:
    said = settings.get(check.name, _DEFAULT).every_s
    return check.every_s if said is None else float(said)


def thresholds(check: Check, settings: Settings) -> dict[str, float]:
    """The check's own, but for those that the file changes."""
    said = settings.get(check.name, _DEFAULT).thresholds
    return {name: said.get(name, default) for name, default in check.thresholds.items()}


def capped(check: Check, settings: Settings, result: Result) -> Result:
    """No more is asked for than the file allows; what may only be watched is a warning."""
    action = settings.get(check.name, _DEFAULT).action
    if not action or result.verdict is not Verdict.FAILED or not Remedy(action) < result.remedy:
        return result
    verdict = Verdict.WARNED if action == Remedy.WATCH.value else Verdict.FAILED
    return Result(verdict, result.text, Remedy(action), result.code)


# ---- How long a validation may take, for all who have a part in it: whoever waits, waits longer than whom it waits
# for.


MARGIN_S = 10.0  # for a word to come, on machines that are busy
PORT_S = 30.0  # the partner says where it listens, or the node is tried alone
VALIDATE_S = 160.0  # the node's own: its agent ends it then, and says so
ANSWER_S = VALIDATE_S + MARGIN_S  # the controller waits so long for the node; the partner, for its first word
LISTEN_S = PORT_S + ANSWER_S + MARGIN_S  # the partner's own, from the beginning
PARTNER_S = LISTEN_S + MARGIN_S  # the controller waits so long for the partner's answer
PHASE_S = PARTNER_S + MARGIN_S  # nothing came of it: the validation has failed
