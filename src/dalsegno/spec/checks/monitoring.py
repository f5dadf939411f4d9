"""Check the `monitoring:` section."""

from __future__ import annotations

from dalsegno.spec.checks.report import Problems
from dalsegno.spec.model import ClusterSpec


def check_monitoring(spec: ClusterSpec, report: Problems) -> None:
    """Check that Prometheus has metrics to read, and that every receiver of alerts is complete."""
    monitoring = spec.monitoring
    if monitoring.prometheus and not monitoring.enabled:
        what = "`prometheus` is on, but the metrics that it reads are turned off"
        report.add(monitoring, "prometheus", what, "remove `enabled: false`, or `prometheus`", reads=("enabled",))
    for email in monitoring.alerts.email:
        if bool(email.user) != (email.password_file is not None):
            missing = "password_file" if email.user else "user"
            what = f"an e-mail receiver of alerts needs `{missing}`"
            report.add(email, "to", what, "give `user` and `password_file`, or neither", ("user", "password_file"))
    for webhook in monitoring.alerts.webhook:
        if (webhook.url is None) == (webhook.url_file is None):
            what = "a webhook receiver of alerts needs either `url` or `url_file`"
            field = "url" if webhook.url else "url_file"
            report.add(
                webhook, field, what, "`url_file` keeps an address with a secret in it out of this file", ("url",)
            )
