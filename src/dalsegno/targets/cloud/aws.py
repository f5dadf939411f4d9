"""Requests to AWS. All of them go through `AwsApi.call`: to boto3 or, in tests, to a fake."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dalsegno.errors import TargetError, install_hint
from dalsegno.targets.cloud.credentials import CloudRefusal, explain, refusal_of_code, repeat_throttled

Answers = Mapping[str, Any]


class AwsApi(Protocol):
    """Sends one request to AWS and returns the answer. A refusal is a `CloudError`."""

    def call(self, service: str, operation: str, **parameters: Any) -> Answers: ...


class BotoApi:
    """Sends requests with boto3, which finds the credentials. `operation` is a method of boto3's client."""

    def __init__(self, region: str, pause: Callable[[float], None] = time.sleep) -> None:
        self.region, self._pause = region, pause
        self._clients: dict[str, Any] = {}

    def call(self, service: str, operation: str, **parameters: Any) -> Answers:
        """Send a request and return the answer. If AWS throttles the request, repeat it, in addition to boto3's own
        attempts."""
        return repeat_throttled(lambda: self._send(service, operation, parameters), self._pause)

    def _send(self, service: str, operation: str, parameters: Mapping[str, Any]) -> Answers:
        client = self._client(service)
        from botocore import exceptions

        doing = f"AWS {service} {operation.replace('_', '-')} in {self.region}"
        try:
            answer: Answers = getattr(client, operation)(**parameters)
        except exceptions.ClientError as error:
            found = error.response.get("Error", {})
            code, message = str(found.get("Code", "")), str(found.get("Message", ""))
            raise explain(refusal_of_code(code), doing, message, code) from None
        except exceptions.ParamValidationError as error:
            raise explain(CloudRefusal.INVALID, doing, str(error)) from None
        except exceptions.BotoCoreError as error:
            raise explain(_refusal_of(error, exceptions), doing, str(error)) from None
        return answer

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = _new_client(service, self.region)
        return self._clients[service]


def _new_client(service: str, region: str) -> Any:
    try:
        import boto3
        from botocore import exceptions
        from botocore.config import Config
    except ImportError:
        raise TargetError("the AWS SDK for Python is not installed", hint=install_hint("aws")) from None
    settings = Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=10, read_timeout=60)
    try:
        return boto3.session.Session(region_name=region).client(service, config=settings)
    except exceptions.BotoCoreError as error:
        raise explain(_refusal_of(error, exceptions), f"AWS {service}", str(error)) from None


# boto3 raises these errors before AWS answers. They are listed by class name, because older releases lack some classes.
_BEFORE_AN_ANSWER: dict[CloudRefusal, tuple[str, ...]] = {
    CloudRefusal.NO_CREDENTIALS: (
        "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError",
        "NoAuthTokenError",
    ),
    CloudRefusal.EXPIRED: (
        "SSOTokenLoadError", "UnauthorizedSSOTokenError", "TokenRetrievalError", "SSOError", "LoginRefreshRequired",
    ),
    CloudRefusal.UNREACHABLE: (
        "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionError", "HTTPClientError",
    ),
}  # fmt: skip


def _refusal_of(error: Exception, exceptions: Any) -> CloudRefusal:
    for refusal, names in _BEFORE_AN_ANSWER.items():
        kinds = tuple(kind for name in names if (kind := getattr(exceptions, name, None)) is not None)
        if isinstance(error, kinds):
            return refusal
    return CloudRefusal.UNKNOWN


def caller_account(api: AwsApi) -> str:
    """Return the id of the account that the credentials belong to. Raise CloudError if there are no credentials."""
    return str(api.call("sts", "get_caller_identity").get("Account", ""))


def create_bucket(api: AwsApi, bucket: str, region: str) -> None:
    """Create a bucket of this account that the public cannot read. S3 encrypts its objects by default."""
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    api.call("s3", "create_bucket", Bucket=bucket, **place)
    closed = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    api.call(
        "s3",
        "put_public_access_block",
        Bucket=bucket,
        ExpectedBucketOwner=caller_account(api),
        PublicAccessBlockConfiguration=dict.fromkeys(closed, True),
    )


@dataclass
class FakeAws:
    """An `AwsApi` that answers from a function, and records each request."""

    answer: Callable[[str, str, Mapping[str, Any]], Answers]
    calls: list[tuple[str, str, Mapping[str, Any]]] = field(default_factory=list)

    def call(self, service: str, operation: str, **parameters: Any) -> Answers:
        self.calls.append((service, operation, parameters))
        return self.answer(service, operation, parameters)

    def operations(self) -> Sequence[str]:
        return [operation for _, operation, _ in self.calls]
