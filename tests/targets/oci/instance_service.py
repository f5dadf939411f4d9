"""The metadata service of an instance, and the service that gives instances their tokens, on loopback."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.targets.oci.emulator import token_until

TENANCY = "ocid1.tenancy.oc1..instance"


def _certificate() -> tuple[bytes, bytes]:
    """Return a certificate of an instance in `TENANCY`, and its private key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, f"opc-tenant:{TENANCY}")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    return made.public_bytes(pem), private


@contextmanager
def instance_service(expires: float) -> Iterator[str]:
    """Run both services, and return their address. Tokens expire at this time."""
    certificate, key = _certificate()
    answers = {
        "/opc/v2/instance/region": b"eu-frankfurt-1",
        "/opc/v2/identity/cert.pem": certificate,
        "/opc/v2/identity/key.pem": key,
        "/opc/v2/identity/intermediate.pem": certificate,
        "/v1/x509": json.dumps({"token": token_until(expires)}).encode(),
    }

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # the body must not wait for the client to acknowledge the headers

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _serve(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = answers.get(self.path, b"")
            self.send_response(200 if answer else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
