"""Classify the refusals of a cloud by cause: credentials (missing, wrong or expired), permissions, quotas or capacity.

Credentials come from the SDK's own chain (environment, profile, single sign-on, instance role). This module never
reads, stores or shows a secret.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TypeVar

from dalsegno.errors import TargetError
from dalsegno.printable import one_line


class CloudRefusal(Enum):
    """The causes for which a cloud refuses a request."""

    NO_CREDENTIALS = "no credentials"
    WRONG_CREDENTIALS = "wrong credentials"
    EXPIRED = "expired credentials"
    DENIED = "not allowed"
    THROTTLED = "too many requests"
    CAPACITY = "no capacity"
    QUOTA = "quota reached"
    NOT_THERE = "does not exist"
    ALREADY_THERE = "exists already"
    UNREACHABLE = "no answer"
    INVALID = "invalid request"
    UNKNOWN = "unknown"


# Error codes of AWS and OCI. Further codes are known by their endings (see `refusal_of_code`). All others are UNKNOWN,
# and their messages are shown unchanged.
_CODES: dict[CloudRefusal, tuple[str, ...]] = {
    CloudRefusal.WRONG_CREDENTIALS: (
        "InvalidClientTokenId", "UnrecognizedClientException", "AuthFailure", "SignatureDoesNotMatch",
        "InvalidAccessKeyId", "IncompleteSignature", "MissingAuthenticationToken", "NotAuthenticated",
    ),
    CloudRefusal.EXPIRED: ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"),
    CloudRefusal.DENIED: (
        "AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "OptInRequired", "Forbidden", "403",
        "NotAuthorizedOrNotFound",
    ),
    CloudRefusal.THROTTLED: (
        "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException", "TooManyRequests",
        "SlowDown", "LimitExceededException",
    ),
    CloudRefusal.CAPACITY: (
        "InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientReservedInstanceCapacity",
        "InsufficientCapacity", "ReservationCapacityExceeded", "Unsupported", "SpotMaxPriceTooLow",
        "MaxSpotInstanceCountExceeded", "OutOfHostCapacity",
    ),
    CloudRefusal.QUOTA: (
        "VcpuLimitExceeded", "InstanceLimitExceeded", "ResourceLimitExceeded", "ServiceQuotaExceededException",
        "ServiceLimitExceeded", "VpcLimitExceeded", "AddressLimitExceeded", "NatGatewayLimitExceeded", "LimitExceeded",
        "QuotaExceeded",
    ),
    CloudRefusal.NOT_THERE: (
        "ResourceNotFound", "ResourceNotFoundException", "NoSuchBucket", "NoSuchKey", "404", "NotFound",
        "FileSystemNotFound", "InvalidKeyPair.NotFound", "DataRepositoryAssociationNotFound",
        "InvalidPlacementGroup.Unknown",
    ),
    CloudRefusal.ALREADY_THERE: (
        "AlreadyExistsException", "ResourceInUse", "BucketAlreadyOwnedByYou", "EntityAlreadyExists",
        "InvalidKeyPair.Duplicate",
    ),
    CloudRefusal.INVALID: (
        "ValidationError", "ValidationException", "InvalidParameter", "InvalidParameterValue", "BadRequest",
        "InvalidParameterCombination", "MissingParameter",
    ),
}  # fmt: skip
_BY_CODE = {code: refusal for refusal, codes in _CODES.items() for code in codes}
_WORDS = re.compile(r"[A-Za-z][A-Za-z.]+")
_WITHOUT_CODE = {"Out of host capacity": CloudRefusal.CAPACITY}  # OCI gives no code for this in Terraform logs
THROTTLE_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
Result = TypeVar("Result")

_HINTS = {
    CloudRefusal.NO_CREDENTIALS: "log in with `aws configure` or `aws sso login`, or set AWS_PROFILE",
    CloudRefusal.WRONG_CREDENTIALS: "check AWS_PROFILE and the keys: `aws sts get-caller-identity` shows who you are",
    CloudRefusal.EXPIRED: "log in again: `aws sso login`, or get new temporary keys, then repeat the command",
    CloudRefusal.DENIED: "ask the owner of the account for this permission, or use another profile (AWS_PROFILE)",
    CloudRefusal.THROTTLED: "wait a minute, then run the command again; it continues from there",
    CloudRefusal.CAPACITY: "choose another availability zone, reserve capacity, or ask for fewer nodes",
    CloudRefusal.QUOTA: "request a higher quota in the Service Quotas console, or ask for fewer nodes",
    CloudRefusal.UNREACHABLE: "check the network and the region's name",
    CloudRefusal.NOT_THERE: "check the id and the region in the cluster file",
    CloudRefusal.INVALID: "fix the setting named above in the cluster file, then run `dalsegno up` again",
}


class CloudError(TargetError):
    """A request that a cloud refused. `refusal` is the cause, and `code` is the cloud's error code."""

    def __init__(self, refusal: CloudRefusal, what: str, *, code: str = "", hint: str = "") -> None:
        super().__init__(what, hint=hint or hint_for(refusal))
        self.refusal, self.code = refusal, code


def refusal_of_code(code: str) -> CloudRefusal:
    """Return the cause that an error code of AWS or OCI stands for."""
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code.endswith((".NotFound", "NotFoundException", "NoSuchEntity", "DoesNotExist")):
        return CloudRefusal.NOT_THERE
    return CloudRefusal.UNKNOWN


def refusal_in_text(text: str) -> CloudRefusal:
    """Return the cause whose error code occurs in a message, because some tools report errors only as text.

    If there are several codes, the first one counts: the others are its consequences.
    """
    found = (refusal_of_code(word.rstrip(".")) for word in _WORDS.findall(text))
    known = next((each for each in found if each is not CloudRefusal.UNKNOWN), CloudRefusal.UNKNOWN)
    return next((each for phrase, each in _WITHOUT_CODE.items() if phrase in text), known)


def repeat_throttled(send: Callable[[], Result], pause: Callable[[float], None] = time.sleep) -> Result:
    """Send a request and return the answer. If the cloud throttles the request, repeat it after pauses, and raise an
    error if the last attempt fails."""
    for pause_s in THROTTLE_PAUSES_S:
        try:
            return send()
        except CloudError as error:
            if error.refusal is not CloudRefusal.THROTTLED:
                raise
            pause(pause_s)
    return send()


def hint_for(refusal: CloudRefusal) -> str:
    """Return a hint that fixes a refusal of AWS; "" if there is none."""
    return _HINTS.get(refusal, "")


def explain(
    refusal: CloudRefusal,
    doing: str,
    message: str = "",
    code: str = "",
    hints: Mapping[CloudRefusal, str] | None = None,
) -> CloudError:
    """Return the error for a refused request, with the attempted action, the cause, and the cloud's own message.

    `hints` replaces the default hints, which name tools of AWS.
    """
    said = f": {one_line(message)}" if message else ""
    shown = f"{doing}: {refusal.value}" if refusal is not CloudRefusal.UNKNOWN else f"{doing}: {code or 'refused'}"
    return CloudError(refusal, f"{shown}{said}", code=code, hint=(hints or {}).get(refusal, ""))
