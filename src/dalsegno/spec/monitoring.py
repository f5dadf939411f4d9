"""The `monitoring:` section of the cluster file: metrics, Prometheus, receivers of alerts, remote write."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dalsegno.spec.section import Section
from dalsegno.spec.values import AbsolutePath, Seconds, matching

_URL = r"https?://[^\s\"'`\\\x00-\x1f]{1,500}"
_ADDRESS = r"[A-Za-z0-9.!#$%&*+/=?^_{|}~-]{1,64}@[A-Za-z0-9.-]{1,190}"

Url = Annotated[str, matching(_URL, "write an address that starts with https://")]
MailAddress = Annotated[str, matching(_ADDRESS, "write `name@example.org`")]
MailServer = Annotated[str, matching(r"[A-Za-z0-9.-]{1,190}:\d{1,5}", "write host and port: `smtp.example.org:587`")]
MailUser = Annotated[str, matching(r"[A-Za-z0-9@._+=-]{0,200}", "write the name that the mail server knows")]
Channel = Annotated[str, matching(r"[#@]?[A-Za-z0-9._-]{0,80}", "write `#channel`")]
Region = Annotated[str, matching(r"[a-z]{2}(-[a-z]{1,12}){1,3}-\d{1,2}", "it looks like `eu-west-1`")]
RoleArn = Annotated[
    str, matching(r"arn:aws[a-z-]{0,12}:iam::\d{12}:role/[A-Za-z0-9+=,.@_/-]{1,128}", "it looks like `arn:aws:iam::…`")
]


class EmailReceiver(Section):
    """Alerts by e-mail."""

    to: list[MailAddress] = Field(min_length=1, max_length=50, description="Recipients of the alerts.")
    sender: MailAddress = Field(description="Address that the alerts come from.")
    smarthost: MailServer = Field(description="Mail server and port: smtp.example.org:587.")
    user: MailUser = Field(default="", description="User at the mail server.")
    password_file: AbsolutePath | None = Field(
        default=None, description="File with the user's password, of mode 0600. Needed with `user`."
    )
    require_tls: bool = Field(default=True, description="Refuse to send without STARTTLS.")


class SlackReceiver(Section):
    """Alerts to a Slack channel."""

    url_file: AbsolutePath = Field(description="File with the address of the incoming webhook, of mode 0600.")
    channel: Channel = Field(default="", description="Channel, if the webhook allows another than its own.")


class WebhookReceiver(Section):
    """Alerts to any program that accepts Alertmanager's JSON. Give `url` or `url_file`."""

    url: Url | None = Field(default=None, description="Address of the receiver.")
    url_file: AbsolutePath | None = Field(
        default=None, description="File with the address, of mode 0600, if the address contains a secret."
    )


class AlertReceivers(Section):
    """The receivers of alerts. Every receiver gets all alerts."""

    email: list[EmailReceiver] = Field(default=[], max_length=20, description="E-mail addresses.")
    slack: list[SlackReceiver] = Field(default=[], max_length=20, description="Slack channels.")
    webhook: list[WebhookReceiver] = Field(default=[], max_length=20, description="Other programs.")


class RemoteWriteSpec(Section):
    """A copy of all metrics for Amazon Managed Service for Prometheus, with requests signed by SigV4."""

    url: Url = Field(description="Remote write address of the workspace.")
    region: Region = Field(description="AWS region of the workspace.")
    role_arn: RoleArn | None = Field(default=None, description="IAM role to assume. If not given: the head's own.")


class MonitoringSpec(Section):
    """Metrics, the web page, Prometheus and alerts."""

    enabled: bool = Field(default=True, description="Serve metrics and the web page.")
    compat: Literal["vpenso", "sckyzo"] = Field(
        default="vpenso",
        description="Names of Slurm's metrics: vpenso (dashboard 4323) or sckyzo (HyperPod's exporter).",
    )
    open_metrics: bool = Field(default=False, description="/metrics answers without a token.")
    interval: Seconds = Field(default=15, description="How often metrics are collected and read.")
    prometheus: bool = Field(
        default=False, description="Run Prometheus and Alertmanager on the head node, and node_exporter on every node."
    )
    retention: Seconds = Field(default=15 * 86400, description="How long Prometheus keeps metrics.")
    gpu_hour_price: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Price of a GPU hour, with which the web page shows goodput in money. If not given: a list price, "
        "if one is known. 0: no money is shown.",
    )
    alerts: AlertReceivers = Field(default_factory=AlertReceivers, description="Receivers of alerts.")
    remote_write: RemoteWriteSpec | None = Field(default=None, description="Amazon Managed Service for Prometheus.")
