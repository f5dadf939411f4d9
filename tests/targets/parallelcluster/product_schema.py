"""Ask ParallelCluster's own schema. Runs with the Python of an environment that holds aws-parallelcluster.

product_schema.py policies          print the update policy of each setting, as update_policies.csv
product_schema.py check             read a JSON list of configs from stdin, print the faults of each as JSON
"""

import json
import os
import sys

import marshmallow
from pcluster.schemas.cluster_schema import ClusterSchema

os.environ["AWS_DEFAULT_REGION"] = "us-east-1"  # the schema requires a region, but sends no request


def key_of(name, field):
    return field.data_key or "".join(word.capitalize() for word in name.split("_"))


def policies(schema, path=""):
    for name, field in sorted(schema.fields.items()):
        here = f"{path}/{key_of(name, field)}" if path else key_of(name, field)
        policy = field.metadata.get("update_policy")
        if policy is not None:
            yield here, policy.name
        nested = getattr(field, "schema", None)
        if nested is not None:
            yield from policies(nested, here)


def faults(config):
    try:
        ClusterSchema(cluster_name="demo").load(config)
    except marshmallow.ValidationError as error:
        return error.messages
    return None


if sys.argv[1] == "policies":
    print("setting,policy")
    seen = set()
    for path, policy in policies(ClusterSchema(cluster_name="demo")):
        if path not in seen and path.split("/")[0] not in ("AdditionalPackages", "DevSettings"):
            print(f"{path},{policy}")
        seen.add(path)
else:
    print(json.dumps([faults(config) for config in json.load(sys.stdin)]))
