"""A moto server with the answers that moto lacks. These answers are invented, so they prove nothing about AWS itself.

Runs with the Python of an environment that holds moto and boto3. The first argument of the program is a folder for the
list of images, which moto reads when it is imported. Import this module before boto3.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

VERSION = "3.16.1"
SYSTEMS = ("ubuntu-2204-lts", "ubuntu-2404-lts", "amzn2023")
IMAGE = {
    "description": "made up", "owner_id": "247102896272", "public": True, "virtualization_type": "hvm",
    "architecture": "x86_64", "state": "available", "platform": None, "image_type": "machine", "hypervisor": "xen",
    "root_device_name": "/dev/sda1", "root_device_type": "ebs", "sriov": "simple", "tags": {},
    "creation_date": "2026-11-01T00:00:00.000Z",
}  # fmt: skip
RESERVED = {
    "CapacityReservationId": "cr-0123456789abcdef0", "InstanceType": "p5.48xlarge", "AvailabilityZone": "us-east-1b",
    "AvailabilityZoneId": "use1-az2", "TotalInstanceCount": 8, "AvailableInstanceCount": 8, "State": "active",
    "InstancePlatform": "Linux/UNIX", "Tenancy": "default", "InstanceMatchCriteria": "targeted",
    "CapacityReservationArn": "arn:aws:ec2:us-east-1:123456789012:capacity-reservation/cr-0123456789abcdef0",
    "OwnerId": "123456789012", "EndDateType": "unlimited", "EphemeralStorage": False, "EbsOptimized": True,
}  # fmt: skip
reservation: dict[str, Any] = dict(RESERVED)  # the only one; programs change it
file_systems: list[dict[str, Any]] = []
volumes: list[dict[str, Any]] = []


AMIS = Path(sys.argv[1], "amis.json")
AMIS.write_text(json.dumps([
    {**IMAGE, "ami_id": f"ami-0123456789abcdef{at}",
     "name": f"aws-parallelcluster-{VERSION}-{system}-hvm-x86_64-202611010000"}
    for at, system in enumerate(SYSTEMS)
]))  # fmt: skip
os.environ |= {
    "MOTO_AMIS_PATH": str(AMIS), "MOTO_IAM_LOAD_MANAGED_POLICIES": "true", "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.fsx.responses import FSxResponse
from moto.moto_server.threaded_moto_server import ThreadedMotoServer


def start() -> ThreadedMotoServer:
    """Start the server, and make every AWS client of this process and its children use it."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    _add_answers()
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _host, port = server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    return server


def _add_answers() -> None:
    run_instances = EC2Response.run_instances

    def check_only(self: EC2Response) -> object:
        """Answer a dry run before moto checks the disks, because moto does not know ephemeral disks."""
        self.error_on_dryrun()
        return run_instances(self)

    EC2Response.run_instances = check_only
    EC2Response.describe_capacity_reservations = lambda self: ActionResult({"CapacityReservations": [reservation]})
    FSxResponse.describe_data_repository_associations = lambda self: json.dumps({"Associations": []})
    FSxResponse.describe_volumes = lambda self: json.dumps({"Volumes": volumes})
    FSxResponse.describe_file_systems = lambda self: json.dumps({"FileSystems": file_systems})
