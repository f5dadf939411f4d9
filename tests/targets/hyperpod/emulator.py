"""AWS on loopback: a moto server, and in front of it a recorder that simulates what moto lacks.

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
    created: Json = field(default_factory=dict)  # CreateCluster, because moto does not keep all of it
    tags: dict[str, str] = field(default_factory=dict)
    training_plans: dict[str, Json] = field(default_factory=dict)  # answers to DescribeTrainingPlan, by ARN
    failed_nodes: dict[str, str] = field(default_factory=dict)  # instance id -> error code of batch requests
    instance_states: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> state and message
    deletion_takes: int = 0  # number of answers to DescribeCluster for which a deletion lasts
    deletion: Callable[[], tuple[int, Json]] | None = None  # completes the deletion that runs

    def sent(self, operation: str) -> list[Json]:
        return [request for name, request in self.requests if name == operation]

    def reset(self) -> None:
        for each in (self.requests, self.statuses, self.refusals, self.groups, self.failed_nodes, self.instance_states):
            each.clear()
        self.created.clear()
        self.deletion_takes, self.deletion = 0, None
        self.tags.clear()
        self.training_plans.clear()

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
        if operation == "DescribeTrainingPlan":
            found = self.training_plans.get(request["TrainingPlanName"])
            return (200, found) if found else (400, {"__type": "ResourceNotFound", "message": "no such plan"})
        if operation in ("ListTags", "AddTags", "DeleteTags"):
            return 200, self._change_tags(request)
        if operation == "DeleteCluster" and self.deletion_takes:
            self.deletion = ask
            return 200, {"ClusterArn": "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"}
        if operation == "CreateCluster" and self.deletion:
            return 400, {"__type": "ResourceInUse", "message": "the cluster is being deleted"}
        if operation == "DescribeCluster" and self.deletion:
            if self.deletion_takes:
                self.deletion_takes -= 1
                return 200, {**self._described(ask()[1]), "ClusterStatus": "Deleting"}
            self.deletion()
            self.deletion = None
            self.groups.clear()
            self.created.clear()
            return 400, {"__type": "ResourceNotFound", "message": "there is no such cluster"}
        status, found = ask()
        if operation == "CreateCluster" and status == 200:
            self.created |= request
            self.tags = {each["Key"]: each["Value"] for each in request["Tags"]}
        if operation == "DescribeCluster" and status == 200:
            found = self._described(found)
        if operation == "ListClusterNodes" and status == 200:
            found = self._listed(found)
        if operation == "DeleteCluster" and status == 200:
            self.groups.clear()
            self.created.clear()
        return status, found

    def _change_tags(self, request: Json) -> Json:
        self.tags |= {each["Key"]: each["Value"] for each in request.get("Tags", ())}
        for key in request.get("TagKeys", ()):
            self.tags.pop(key, None)
        return {"Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()]}

    def _update(self, request: Json, ask: Callable[[], tuple[int, Json]]) -> Json:
        for each in request.get("InstanceGroups", ()):
            count = {"CurrentCount": each["InstanceCount"], "TargetCount": each["InstanceCount"]}
            self.groups[each["InstanceGroupName"]] = {**each, **count}
        for name in request.get("InstanceGroupsToDelete", ()):
            self.groups[name] = None
        self.created |= {key: request[key] for key in ("NodeRecovery", "Orchestrator") if key in request}
        return {"ClusterArn": "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"}

    def _described(self, found: Json) -> Json:
        sent = {each["InstanceGroupName"]: each for each in self.created.get("InstanceGroups", ())}
        own = {name: {**sent.get(name, {}), **each} for name, each in _by_name(found["InstanceGroups"]).items()}
        own |= self.groups
        found |= {
            key: self.created[key] for key in ("NodeRecovery", "Orchestrator", "VpcConfig") if key in self.created
        }
        found["InstanceGroups"] = [
            {key: value for key, value in each.items() if key != "InstanceCount"} for each in own.values() if each
        ]
        found["ClusterArn"] = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"
        return {**found, **(self.statuses.pop(0) if self.statuses else {})}

    def _listed(self, found: Json) -> Json:
        """Add the nodes of added groups to moto's nodes, and give all nodes ids and host names like HyperPod's."""
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


def _by_name(groups: list[Json]) -> dict[str, Json]:
    return {each["InstanceGroupName"]: each for each in groups}


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
        disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the client to acknowledge the headers

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

            sent = dict(self.headers)  # a connection may send other requests before `ask` is called

            def ask() -> tuple[int, Json]:
                status, _, text = self._forward(body, sent)
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

        def _forward(self, body: bytes, sent: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
            dropped = ("host", "content-length", "transfer-encoding", "expect", "connection")
            headers = {key: value for key, value in (sent or self.headers).items() if key.lower() not in dropped}
            headers.setdefault("Content-Type", "application/octet-stream")  # the default of urllib is a form
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
