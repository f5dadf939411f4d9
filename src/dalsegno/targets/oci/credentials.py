"""Choose how requests to OCI are signed, and say why OCI refuses a signature.

There are three ways: the API key of a profile in ~/.oci/config, the session of a profile that `oci session
authenticate` wrote, and the machine itself (an instance principal). The last way is used only on an instance of OCI
without the file ~/.oci/config.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dalsegno.errors import TargetError, install_hint
from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal, explain

CONFIG_FILE = "~/.oci/config"
METADATA = "OCI_METADATA_BASE_URL"  # the SDK asks the metadata service at this address, if it is set
_ASSET_TAG = Path("/sys/class/dmi/id/chassis_asset_tag")
_TAG_OF_OCI = "OracleCloud.com"

HINTS = {
    CloudRefusal.WRONG_CREDENTIALS: "check key, fingerprint and user in ~/.oci/config, and the clock of this machine; "
    "`oci iam region list` tests them",
    CloudRefusal.EXPIRED: "log in again: `oci session authenticate`, then repeat the command",
    CloudRefusal.DENIED: "`dalsegno plan --write FOLDER` writes the IAM policies that the tenancy needs",
    CloudRefusal.CAPACITY: "choose another availability domain, reserve capacity, or ask for fewer nodes",
    CloudRefusal.QUOTA: "request a higher service limit in the console (Limits, Quotas and Usage)",
    CloudRefusal.NOT_THERE: "check `oci.stack`, `oci.compartment` and `oci.region` in the cluster file",
}


class SignerKind(Enum):
    """The kinds of credentials that sign the requests."""

    API_KEY = "API key"
    SESSION = "session"
    INSTANCE = "instance principal"


def import_sdk() -> Any:
    try:
        import oci
        import oci.resource_manager
    except ImportError:
        raise TargetError("the OCI SDK for Python is not installed", hint=install_hint("oci")) from None
    return oci


@dataclass(frozen=True)
class OciCredentials:
    """The settings and the signer for a client of the SDK."""

    kind: SignerKind
    region: str
    profile: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    signer: Any = field(default=None, repr=False)  # of a class of the SDK
    token: str = field(default="", repr=False)  # of the session
    expires: float | None = None  # when the session ends, in seconds since 1970; None if unknown

    def explain_refusal(self, refusal: CloudRefusal, doing: str, message: str, code: str, now: float) -> CloudError:
        """Return the error for a refused request. OCI has one code for a wrong signature and for an expired session."""
        if refusal is CloudRefusal.WRONG_CREDENTIALS:
            refusal = cause_of_refused_signature(self.kind, self.expires, now)
        return explain(refusal, doing, message, code, self.hints())

    def hints(self) -> dict[CloudRefusal, str]:
        """Return the hint for each cause of a refusal, as it applies to these credentials."""
        if self.kind is SignerKind.SESSION:
            login = f"log in again: `{login_command(self.profile, self.region)}`, then repeat the command"
            return {**HINTS, CloudRefusal.EXPIRED: login, CloudRefusal.WRONG_CREDENTIALS: login}
        if self.kind is SignerKind.INSTANCE:
            group = "put this machine into a dynamic group, and name it in the IAM policies: `dynamic-group NAME`"
            return {
                **HINTS,
                CloudRefusal.DENIED: f"{group} in place of `group GROUP`",
                CloudRefusal.WRONG_CREDENTIALS: f"check the clock of this machine, or write a profile to {CONFIG_FILE}",
            }
        return HINTS


def login_command(profile: str, region: str) -> str:
    return f"oci session authenticate --profile-name {profile} --region {region}"


def cause_of_refused_signature(kind: SignerKind, expires: float | None, now: float) -> CloudRefusal:
    """Return why OCI refused a signature (status 401): the session has expired, or else the credentials are wrong."""
    expired = kind is SignerKind.SESSION and expires is not None and expires <= now
    return CloudRefusal.EXPIRED if expired else CloudRefusal.WRONG_CREDENTIALS


def read_expiry(token: str) -> float | None:
    """Return when a token (JWT) expires, in seconds since 1970; None if it does not say so."""
    payload = token.split(".")[1:2]
    try:
        claims = json.loads(base64.urlsafe_b64decode("".join(payload) + "==="))
        return float(claims["exp"])
    except (ValueError, KeyError, TypeError):
        return None


def is_oci_instance(environ: Mapping[str, str], asset_tag: Path = _ASSET_TAG) -> bool:
    """Return whether this machine is an instance of OCI. Elsewhere, the SDK would wait minutes for its metadata."""
    if environ.get(METADATA, "").strip():
        return True
    try:
        return asset_tag.read_text(encoding="utf-8", errors="replace").strip() == _TAG_OF_OCI
    except OSError:
        return False


def find_credentials(sdk: Any, region: str, profile: str, file: str, federation: str = "") -> OciCredentials:
    """Return the credentials of the profile or, without the file and on an instance of OCI, of the instance.

    `federation` is the address that gives instances their tokens, for tests. Raise CloudError if there are none.
    """
    try:
        config = {**sdk.config.from_file(file, profile), "region": region}
        if config.get("security_token_file"):
            return _session(sdk, region, profile, config)
        return OciCredentials(SignerKind.API_KEY, region, profile, config, sdk.signer.Signer.from_config(config))
    except sdk.exceptions.ConfigFileNotFound as error:
        if not is_oci_instance(os.environ):
            raise _unusable(profile, file, error) from None
    except Exception as error:  # the SDK raises a different class for each error in a profile
        raise _unusable(profile, file, error) from None
    return _instance(sdk, region, federation)


def _unusable(profile: str, file: str, error: Exception) -> CloudError:
    return CloudError(
        CloudRefusal.NO_CREDENTIALS,
        f"profile `{profile}` of {file} cannot be used: {error}",
        hint="`oci setup config` or `oci session authenticate` writes it; `oci.profile` of the cluster file names "
        "another one",
    )


def _session(sdk: Any, region: str, profile: str, config: Mapping[str, Any]) -> OciCredentials:
    token = Path(config["security_token_file"]).expanduser().read_text(encoding="utf-8").strip()
    key_file = os.path.expanduser(config["key_file"])
    key = sdk.signer.load_private_key_from_file(key_file, config.get("pass_phrase"))
    signer = sdk.auth.signers.SecurityTokenSigner(token, key)
    return OciCredentials(SignerKind.SESSION, region, profile, config, signer, token, read_expiry(token))


def _instance(sdk: Any, region: str, federation: str) -> OciCredentials:
    settings = {"federation_endpoint": federation} if federation else {}
    try:
        signer = sdk.auth.signers.InstancePrincipalsSecurityTokenSigner(**settings)
    except Exception as error:  # the SDK lets the errors of several libraries through
        raise CloudError(
            CloudRefusal.NO_CREDENTIALS,
            f"this instance of OCI gets no token, and there is no {CONFIG_FILE}: {error}",
            hint="`oci setup config` or `oci session authenticate` writes a profile",
        ) from None
    config = {"region": region, "tenancy": signer.tenancy_id}
    return OciCredentials(SignerKind.INSTANCE, region, config=config, signer=signer)
