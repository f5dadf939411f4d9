"""AWS on loopback: a moto server, and in front of it a recorder that plays what moto lacks.

moto has HyperPod's create, describe, list and delete, S3 and FSx. It lacks UpdateCluster and the batch requests, is in
service at once, and never fails. The recorder answers those requests itself and can make others fail. Its invented
answers prove nothing about AWS. They show which requests are sent, and how such answers are handled.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
DEFAULT_ADDRESS = "10.3.0."


@dataclass
class Emulator:
    """The recorder's memory. `requests` are the operations of SageMaker, in order."""

    url: str = ""
    moto: str = ""
    requests: list[tuple[str, Json]] = field(default_factory=list)
    statuses: list[Json] = field(default_factory=list)  # the next answers to DescribeCluster; then moto's own
    refusals: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)  # operation -> next refusals
    groups: dict[str, Json | None] = field(default_factory=dict)  # groups since UpdateCluster; None: deleted
    failed_nodes: dict[str, str] = field(default_factory=dict)  # instance id -> error code of batch requests
    instance_states: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> state and message

    def sent(self, operation: str) -> list[Json]:
        return [request for name, request in self.requests if name == operation]

    def reset(self) -> None:
        for each in (self.requests, self.statuses, self.refusals, self.groups, self.failed_nodes, self.instance_states):
            each.clear()

    # What the recorder adds to moto

    def answer(self, operation: str, request: Json, ask: Callable[[], tuple[int, Json]]) -> tuple[int, Json]:
        self.requests.append((operation, request))
        if self.refusals.get(operation):
            status, code, message = self.refusals[operation].pop(0)
            return status, {"__type": code, "message": message}
        if operation == "UpdateCluster":
            return 200, self._update(request, ask)
        if operation in ("BatchReplaceClusterNodes", "BatchRebootClusterNodes"):
            wrong = [each for each in request["NodeIds"] if each in self.failed_nodes]
            failed = [{"NodeId": each, "ErrorCode": self.failed_nodes[each], "Message": "it said"} for each in wrong]
            return 200, {"Successful": [each for each in request["NodeIds"] if each not in wrong], "Failed": failed}
        status, found = ask()
        if operation == "DescribeCluster" and status == 200:
            found = self._described(found)
        if operation == "ListClusterNodes" and status == 200:
            found = self._listed(found)
        if operation == "DeleteCluster" and status == 200:
            self.groups.clear()
        return status, found

    def _update(self, request: Json, ask: Callable[[], tuple[int, Json]]) -> Json:
        for each in request.get("InstanceGroups", ()):
            self.groups[each["InstanceGroupName"]] = {
                **{key: each[key] for key in ("InstanceGroupName", "InstanceType", "LifeCycleConfig", "ExecutionRole")},
                "CurrentCount": each["InstanceCount"],
                "TargetCount": each["InstanceCount"],
            }
        for name in request.get("InstanceGroupsToDelete", ()):
            self.groups[name] = None
        return {"ClusterArn": "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"}

    def _described(self, found: Json) -> Json:
        own = {each["InstanceGroupName"]: each for each in found["InstanceGroups"]}
        own |= self.groups
        found["InstanceGroups"] = [each for each in own.values() if each]
        found["ClusterArn"] = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"
        return {**found, **(self.statuses.pop(0) if self.statuses else {})}

    def _listed(self, found: Json) -> Json:
        """Give moto's nodes the ids and host names that HyperPod's have, and those of groups that were added."""
        nodes = [
            each for each in found["ClusterNodeSummaries"] if self.groups.get(each["InstanceGroupName"], {}) is not None
        ]
        counts: dict[str, int] = {}
        for each in nodes:
            counts[each["InstanceGroupName"]] = counts.get(each["InstanceGroupName"], 0) + 1
        for name, group in self.groups.items():
            for number in range(counts.get(name, 0), group["TargetCount"] if group else 0):
                assert group
                nodes.append({
                    "InstanceGroupName": name, "InstanceId": f"{name}-{number}", "InstanceType": group["InstanceType"],
                    "LaunchTime": 1.0, "InstanceStatus": {"Status": "Running"},
                })  # fmt: skip
            if group:
                nodes = [e for e in nodes if e["InstanceGroupName"] != name][: len(nodes)] + [
                    e for e in nodes if e["InstanceGroupName"] == name
                ][: group["TargetCount"]]
        for number, each in enumerate(sorted(nodes, key=lambda each: each["InstanceGroupName"])):
            each["InstanceId"] = f"i-{number:017x}"
            each["PrivateDnsHostname"] = f"ip-10-3-0-{number}.ec2.internal"
            status, message = self.instance_states.get(each["InstanceId"], ("Running", ""))
            each["InstanceStatus"] = {"Status": status, "Message": message}
        return {**found, "ClusterNodeSummaries": nodes}


@contextmanager
def serving() -> Iterator[Emulator]:
    """Run moto and the recorder on free ports of loopback."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    emulator = Emulator(moto=f"http://{host}:{port}")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(emulator))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    emulator.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield emulator
    finally:
        server.shutdown()
        server.server_close()
        moto.stop()


def _available(text: bytes) -> bytes:
    """Give moto's file systems the state and the mount name that FSx gives them."""
    answer = json.loads(text)
    for each in [answer["FileSystem"]] if "FileSystem" in answer else answer["FileSystems"]:
        each |= {"Lifecycle": "AVAILABLE", "LustreConfiguration": {"MountName": "abcdefgh"}}
    return json.dumps(answer).encode()


def _handler(emulator: Emulator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _serve(self) -> None:
            body = self._body()
            target = self.headers.get("X-Amz-Target", "")
            if not target.startswith("SageMaker."):
                status, headers, text = self._forward(body)
                if target.endswith(("CreateFileSystem", "DescribeFileSystems")) and status == 200:
                    text = _available(text)
                self._reply(status, headers, text)
                return

            def ask() -> tuple[int, Json]:
                status, _, text = self._forward(body)
                return status, json.loads(text or b"{}")

            status, found = emulator.answer(target.partition(".")[2], json.loads(body or b"{}"), ask)
            self._reply(status, {"Content-Type": "application/x-amz-json-1.1"}, json.dumps(found).encode())

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") == "chunked":
                found = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    found += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return found
            if self.headers.get("Expect"):
                self.send_response_only(100)
                self.end_headers()
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            dropped = ("host", "content-length", "transfer-encoding", "expect", "connection")
            headers = {key: value for key, value in self.headers.items() if key.lower() not in dropped}
            headers.setdefault("Content-Type", "application/octet-stream")  # urllib would call it a form
            request = urllib.request.Request(emulator.moto + self.path, body or None, headers, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.status, dict(answer.headers), answer.read()
            except urllib.error.HTTPError as error:
                return error.code, dict(error.headers), error.read()

        def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for key, value in headers.items():
                if key.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

    return Handler
