"""Render Alertmanager's configuration: one route, and one receiver with every channel of the cluster file."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.spec.facts import EmailAlerts, Monitoring, SlackAlerts, WebhookAlerts
from dalsegno.system.files import read_text

RECEIVER = "everyone"
_LINES = "{{ range .Alerts }}{{ .Annotations.summary }}\n{{ .Annotations.action }}\n{{ end }}"
_TITLE = "{{ .Status | toUpper }} {{ .CommonLabels.alertname }} ({{ .CommonLabels.cluster }})"


def render_alertmanager(settings: Monitoring) -> dict[str, Any]:
    """Return alertmanager.yml as a value. Without receivers, alerts are only shown by `dalsegno monitor status`.

    The file contains the secret addresses of webhooks, so it needs mode 0600. Alertmanager before 0.26 cannot read
    these addresses from separate files.
    """
    receiver: dict[str, Any] = {"name": RECEIVER}
    if settings.email:
        receiver["email_configs"] = [_email(each) for each in settings.email]
    if settings.slack:
        receiver["slack_configs"] = [_slack(each) for each in settings.slack]
    if settings.webhook:
        receiver["webhook_configs"] = [_webhook(each) for each in settings.webhook]
    same = ["alertname", "cluster", "instance", "node", "run"]
    return {
        "route": {
            "receiver": RECEIVER,
            "group_by": ["cluster", "alertname"],
            "group_wait": f"{2 * settings.interval_s}s",  # time for other alerts of the same fault to arrive
            "group_interval": "5m",
            "repeat_interval": "4h",
        },
        "inhibit_rules": [
            {"source_matchers": ['severity="critical"'], "target_matchers": ['severity="warning"'], "equal": same}
        ],
        "receivers": [receiver],
    }


def _email(receiver: EmailAlerts) -> dict[str, Any]:
    login = {"auth_username": receiver.user, "auth_password_file": receiver.password_file} if receiver.user else {}
    return {
        "to": ", ".join(receiver.to),
        "from": receiver.sender,
        "smarthost": receiver.smarthost,
        **login,
        "require_tls": receiver.require_tls,
        "headers": {"Subject": _TITLE},
        "text": _LINES,
        "send_resolved": True,
    }


def _slack(receiver: SlackAlerts) -> dict[str, Any]:
    channel = {"channel": receiver.channel} if receiver.channel else {}
    return {"api_url_file": receiver.url_file, **channel, "title": _TITLE, "text": _LINES, "send_resolved": True}


def _webhook(receiver: WebhookAlerts) -> dict[str, Any]:
    return {"url": receiver.url, "send_resolved": True}


def secret_files(settings: Monitoring) -> list[str]:
    """Return the files with secrets that Alertmanager reads."""
    found = [
        *(each.password_file for each in settings.email),
        *(each.url_file for each in settings.slack),
        *(each.url_file for each in settings.webhook),
    ]
    return [path for path in dict.fromkeys(found) if path]


def with_webhook_urls(settings: Monitoring) -> Monitoring:
    """Return the settings with the address of each webhook, which is read from a file if the settings name one."""
    found = []
    for webhook in settings.webhook:
        url = webhook.url or (read_text(Path(webhook.url_file)) or "").strip()
        if not re.fullmatch(r"https?://\S{1,2000}", url):
            raise DalsegnoError(
                f"{webhook.url_file} holds no address of a webhook", hint="write one line that starts with https://"
            )
        found.append(replace(webhook, url=url))
    return replace(settings, webhook=tuple(found))
