#!/usr/bin/python3 -IS
"""A stand-in for `pcluster` that simulates clusters from a folder: FAKE_PCLUSTER/scenario.json says how they behave.

Its answers have the form of ParallelCluster 3.16's API (openapi.yaml in its package). Each call of describe-cluster
moves a cluster one step on. All calls are noted in calls.jsonl.

scenario: {"version", "throttle": number of calls that are throttled, "refuse": {command: message},
           "create"/"update"/"delete": list of statuses, "failure": the event of the resource that fails}
"""

import json
import os
import sys

FOLDER = os.environ["FAKE_PCLUSTER"]
FINAL = {"create": "CREATE_COMPLETE", "update": "UPDATE_COMPLETE", "delete": "DELETE_COMPLETE"}
MISSING = "Cluster '{}' does not exist or belongs to an incompatible ParallelCluster major version."
STACK = "AWS::CloudFormation::Stack"


def path(name):
    return os.path.join(FOLDER, name)


def load(name, otherwise):
    try:
        with open(path(name)) as file:
            return json.load(file)
    except FileNotFoundError:
        return otherwise


def save(name, value):
    with open(path(name), "w") as file:
        json.dump(value, file)


def answer(value, code=0):
    print(json.dumps(value, indent=2))
    sys.exit(code)


def refuse(message):
    answer({"message": message}, 1)


def option(words, name, otherwise=""):
    return words[words.index(name) + 1] if name in words else otherwise


def describe(name, cluster):
    status = cluster["status"]
    found = {
        "clusterName": name, "region": cluster["region"], "version": "3.16.1", "clusterStatus": status,
        "cloudFormationStackStatus": status, "computeFleetStatus": cluster.get("fleet", "RUNNING"),
        "scheduler": {"type": "slurm"}, "cloudformationStackArn": "arn:aws:cloudformation:x:1:stack/" + name,
    }  # fmt: skip
    if status not in ("CREATE_IN_PROGRESS", "CREATE_FAILED"):
        found["headNode"] = {
            "instanceId": "i-0123456789abcdef0",
            "publicIpAddress": "198.51.100.7",
            "privateIpAddress": "10.0.0.7",
            "instanceType": "m5.2xlarge",
            "state": "running",
        }
    if status.endswith("FAILED"):
        found["failures"] = [{"failureCode": "HeadNodeBootstrapFailure", "failureReason": "Failed to run a script"}]
    return found


def event(number, resource, kind, status, reason=None):
    found = {
        "eventId": str(number),
        "logicalResourceId": resource,
        "resourceType": kind,
        "resourceStatus": status,
        "timestamp": "2026-11-18T09:00:00.000Z",
    }
    return {**found, "resourceStatusReason": reason} if reason else found


def events(name, cluster, scenario):
    """Return the events, the newest first, as CloudFormation does."""
    verb = cluster["verb"].upper()
    found = [
        event(0, "OldResource", "AWS::EC2::Instance", "CREATE_FAILED", "a failure of an earlier operation"),
        event(1, name, STACK, verb + "_IN_PROGRESS", "User Initiated"),
        event(2, "HeadNode", "AWS::EC2::Instance", verb + "_IN_PROGRESS"),
    ]
    if scenario.get("failure"):
        found.append(event(3, "HeadNode", "AWS::EC2::Instance", verb + "_FAILED", scenario["failure"]))
        found.append(event(4, "Queue", "AWS::EC2::LaunchTemplate", verb + "_FAILED", "Resource creation cancelled"))
    return found[::-1]


def main(words):
    scenario = load("scenario.json", {})
    with open(path("calls.jsonl"), "a") as file:
        file.write(json.dumps(words) + "\n")
    if words == ["version"]:
        answer({"version": scenario.get("version", "3.16.1")})
    command, name = words[0], option(words, "--cluster-name")
    if scenario.get("throttle", 0) > 0:
        save("scenario.json", {**scenario, "throttle": scenario["throttle"] - 1})
        refuse("An error occurred (Throttling) when calling the DescribeStacks operation: Rate exceeded")
    if command in scenario.get("refuse", {}):
        refused = scenario["refuse"][command]
        answer(refused if isinstance(refused, dict) else {"message": refused}, 1)
    clusters = load("clusters.json", {})
    if command == "create-cluster":
        if name in clusters:
            refuse(f"Cluster {name} already exists")
        with open(option(words, "--cluster-configuration")) as file:
            config = file.read()
        clusters[name] = {"region": option(words, "--region"), "config": config, "verb": "create"}
        clusters[name]["todo"] = list(scenario.get("create", ["CREATE_IN_PROGRESS", FINAL["create"]]))
    elif name not in clusters:
        refuse(MISSING.format(name))
    cluster = clusters[name]
    if command in ("update-cluster", "delete-cluster"):
        verb = command.split("-")[0]
        cluster["verb"], cluster["todo"] = verb, list(scenario.get(verb, [verb.upper() + "_IN_PROGRESS", FINAL[verb]]))
        if verb == "update":
            with open(option(words, "--cluster-configuration")) as file:
                cluster["config"] = file.read()
    if command == "update-compute-fleet":
        cluster["fleet"] = {"START_REQUESTED": "RUNNING", "STOP_REQUESTED": "STOPPED"}[option(words, "--status")]
    if command == "export-cluster-logs":
        with open(option(words, "--output-file"), "w") as file:
            file.write("logs")
    if (
        command not in ("get-cluster-stack-events", "describe-cluster-instances", "export-cluster-logs")
        and cluster["todo"]
    ):
        cluster["status"] = cluster["todo"].pop(0)
    if cluster["status"] == "DELETE_COMPLETE":
        del clusters[name]
    save("clusters.json", clusters)
    if name not in clusters:
        refuse(MISSING.format(name))
    if command == "describe-cluster":
        answer(describe(name, cluster))
    if command == "get-cluster-stack-events":
        answer({"events": events(name, cluster, scenario)})
    if command == "describe-cluster-instances":
        machine = {
            "instanceId": "i-1",
            "instanceType": "p5.48xlarge",
            "nodeType": "ComputeNode",
            "queueName": "train",
            "state": "running",
            "privateIpAddress": "10.0.128.4",
        }
        answer({"instances": [machine, {**machine, "instanceId": "i-2"}]})
    answer({"cluster": describe(name, cluster)})


main(sys.argv[1:])
