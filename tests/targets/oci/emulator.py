"""Resource Manager on loopback: the HTTP interface of a `FakeResourceManager`, for the real SDK.

Its answers have the form of the API 20180917. These invented answers prove nothing about OCI. They show which requests
the SDK sends, and how such answers are handled.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dalsegno.targets.cloud.credentials import CloudError, CloudRefusal
from dalsegno.targets.oci.resource_manager import FakeResourceManager, SdkResourceManager, StackOperation

REFUSALS = {
    CloudRefusal.WRONG_CREDENTIALS: (401, "NotAuthenticated"),
    CloudRefusal.EXPIRED: (401, "NotAuthenticated"),  # OCI has no code of its own for it
    CloudRefusal.THROTTLED: (429, "TooManyRequests"),
    CloudRefusal.DENIED: (404, "NotAuthorizedOrNotFound"),
}


@dataclass
class OciServer:
    """The server's memory: the stacks and jobs, and each request as (method, path, body, authorization)."""

    memory: FakeResourceManager
    profile: Path
    endpoint: str = ""
    requests: list[tuple[str, str, dict[str, Any], str]] = field(default_factory=list)

    def connect(self) -> SdkResourceManager:
        """Return the real SDK client, which does not wait before it repeats a request."""
        return self.connect_with(self.profile)

    def connect_with(self, profile: Path, federation: str = "") -> SdkResourceManager:
        """Return a client with the profile DEFAULT of another file."""
        return SdkResourceManager(
            "eu-frankfurt-1",
            "DEFAULT",
            str(profile),
            self.endpoint,
            pause=lambda seconds: None,
            federation=federation,
        )

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, object]:
        try:
            return 200, self._answer(method, path.strip("/").split("/"), body)
        except CloudError as error:
            status, code = REFUSALS[error.refusal]
            return status, {"code": code, "message": "as the test asked"}
        except KeyError:
            return 404, {"code": "NotAuthorizedOrNotFound", "message": "not here"}

    def _answer(self, method: str, words: list[str], body: dict[str, Any]) -> object:
        memory = self.memory
        match method, words:
            case "GET", ["stacks"]:
                return [{"id": each, "lifecycleState": "ACTIVE"} for each in memory.find_stacks("demo", "")]
            case "POST", ["stacks"]:
                archive = base64.b64decode(body["configSource"]["zipFileBase64Encoded"])
                given = (body["displayName"], body["compartmentId"], archive, body["variables"], body["freeformTags"])
                made = memory.create_stack(*given)
                return {"id": made, "lifecycleState": "ACTIVE"}
            case "PUT", ["stacks", stack]:
                known = memory.tags.get(stack, {})
                tags = body.get("freeformTags", known)
                memory.update_stack(stack, body["variables"], tags, known.keys() - tags.keys())
                return {"id": stack, "lifecycleState": "ACTIVE"}
            case "DELETE", ["stacks", stack]:
                memory.delete_stack(stack)
                return {}
            case "GET", ["stacks", stack]:
                if not memory.has_stack(stack):
                    raise KeyError(stack)
                return {"id": stack, "lifecycleState": "ACTIVE", "freeformTags": memory.tags.get(stack, {})}
            case "POST", ["jobs"]:
                details = body["jobOperationDetails"]
                plan = str(details.get("executionPlanJobId") or "")
                job = memory.start(body["stackId"], StackOperation(details["operation"]), plan)
                return {"id": job, "lifecycleState": "ACCEPTED"}
            case "GET", ["jobs", job]:
                found = memory.job(job)
                failure = {"failureDetails": {"code": "TERRAFORM_EXECUTION_ERROR", "message": found.failure}}
                return {"id": job, "lifecycleState": found.state.value, **(failure if found.failure else {})}
            case "GET", ["jobs", job, "logs"]:
                return [{"message": line, "level": "INFO", "type": "TERRAFORM_CONSOLE"} for line in memory.log(job)]
            case "GET", ["jobs", job, "outputs"]:
                outputs = [*memory.outputs(job).items(), ("grafana_password", "hidden")]
                return {
                    "items": [
                        {"outputName": name, "outputValue": value, "isSensitive": name.endswith("password")}
                        for name, value in outputs
                    ]
                }
        raise AssertionError(f"unknown request {method} {words}")


def write_key(file: Path) -> None:
    """Write a new private key without a password."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    no_password = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, no_password)
    file.write_bytes(pem)
    file.chmod(0o600)


def write_profile(folder: Path) -> Path:
    """Write a profile with a new API key, and return its file."""
    write_key(folder / "key.pem")
    return _write_config(folder, f"user=ocid1.user.oc1..aaaa\nkey_file={folder}/key.pem\n")


def write_session(folder: Path, expires: float) -> Path:
    """Write a profile as `oci session authenticate` does, and return its file. It has a token and no user."""
    write_key(folder / "session.pem")
    (folder / "token").write_text(token_until(expires))
    return _write_config(folder, f"key_file={folder}/session.pem\nsecurity_token_file={folder}/token\n")


def _write_config(folder: Path, more: str) -> Path:
    profile = folder / "config"
    profile.write_text(
        "[DEFAULT]\nfingerprint=20:3b:97:13:55:1c:5b:0d:d3:37:d8:50:4e:c5:3a:34\n"
        f"tenancy=ocid1.tenancy.oc1..aaaa\nregion=eu-frankfurt-1\n{more}"
    )
    profile.chmod(0o600)
    return profile


def token_until(expires: float) -> str:
    """Return a token (JWT) with this time of expiry, and without a signature."""
    parts = ({"alg": "none", "typ": "JWT"}, {"sub": "ocid1.user.oc1..aaaa", "iat": 0, "exp": int(expires)})
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), ""])


@contextmanager
def serving(folder: Path) -> Iterator[OciServer]:
    """Run the server on a free port of loopback."""
    found = OciServer(FakeResourceManager(), write_profile(folder))

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # the body must not wait for the client to acknowledge the headers

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _serve(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            path = self.path.partition("?")[0].rpartition("/20180917")[2]
            found.requests.append((self.command, path, body, self.headers.get("Authorization", "")))
            status, answer = found.answer(self.command, path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_DELETE = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    found.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
