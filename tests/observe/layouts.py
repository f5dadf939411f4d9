"""A layout of a small cluster's monitoring, for tests."""

from dalsegno.observe.monitor_layout import MonitorLayout, NodeTarget
from dalsegno.spec.facts import EmailAlerts, Monitoring, RemoteWrite, SlackAlerts, WebhookAlerts

NODES = (
    NodeTarget("head", "10.0.0.2:9100"),
    NodeTarget("train-1", "10.0.0.3:9100", "train", "leaf-1"),
    NodeTarget("spare-1", "10.0.0.4:9100", "train", "leaf-2", spare=True),
)
URL = "https://aps-workspaces.eu-west-1.amazonaws.com/workspaces/ws-12/api/v1/remote_write"
EVERYTHING = Monitoring(
    email=(
        EmailAlerts(("a@example.org", "b@example.org"), "c@example.org", "smtp.example.org:587", "c", "/secret/smtp"),
    ),
    slack=(SlackAlerts("/secret/slack", "#ops"), SlackAlerts("/secret/slack")),
    webhook=(WebhookAlerts("https://example.org/hook"),),
    remote_write=RemoteWrite(URL, "eu-west-1", "arn:aws:iam::123456789012:role/writer"),
)


def layout(settings: Monitoring | None = None) -> MonitorLayout:
    return MonitorLayout(
        cluster="demo",
        head="head",
        nodes=NODES,
        observer="10.0.0.2:9341",
        prometheus="10.0.0.2:9090",
        alertmanager="10.0.0.2:9093",
        token_file="/secret/token",
        password_file="/secret/password",
        exporter_password_file="/secret/exporter-password",
        settings=settings or Monitoring(),
    )
