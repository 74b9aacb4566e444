"""examples/ray/merge.yaml is a RayJob as KubeRay has it: its keys, their types, and what must be there.

The facts are those of RayJob v1 in KubeRay 1.7.0 (ray-operator/config/crd/bases/ray.io_rayjobs.yaml, which
is the same in commit feeaf72fa), as far as the example uses them; the definition itself is 1.4 MB. The
example was held to all of it once, by hand, and has no key that is not there.
"""

import re
from pathlib import Path

import pytest
import yaml

import covmerge

jsonschema = pytest.importorskip("jsonschema")

EXAMPLE = Path(covmerge.__file__).parents[2] / "examples" / "ray" / "merge.yaml"
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def has(required, **optional):
    """An object of these keys and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def several(of):
    return {"type": "array", "items": of, "minItems": 1}


# Kubernetes' quantities are numbers, or text such as 8Gi.
QUANTITY = {"anyOf": [NUMBER, {"type": "string", "pattern": "^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}]}
QUANTITIES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = has(
    {"name": TEXT},
    image=TEXT,
    resources=has({}, limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=several(has({"name": TEXT, "mountPath": TEXT})),
)
VOLUME = has({"name": TEXT}, persistentVolumeClaim=has({"claimName": TEXT}))
POD = has({"spec": has({"containers": several(CONTAINER)}, volumes=several(VOLUME))})
START = {"type": "object", "additionalProperties": TEXT}
WORKERS = has(
    {"groupName": TEXT, "minReplicas": NUMBER, "maxReplicas": NUMBER, "template": POD},
    replicas=NUMBER,
    rayStartParams=START,
)
RAY_JOB = has(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": has({"name": TEXT}),
        "spec": has(
            {
                # One of this and a clusterSelector, by the operator's ValidateRayJobSpec.
                "rayClusterSpec": has(
                    {"headGroupSpec": has({"template": POD}, rayStartParams=START)},
                    workerGroupSpecs=several(WORKERS),
                )
            },
            entrypoint=TEXT,
            shutdownAfterJobFinishes=FLAG,
            backoffLimit=NUMBER,
        ),
    }
)


@pytest.fixture
def job():
    return yaml.safe_load(EXAMPLE.read_text())


def test_the_example_is_a_ray_job(job):
    jsonschema.Draft202012Validator.check_schema(RAY_JOB)
    jsonschema.validate(job, RAY_JOB)


@pytest.mark.parametrize(
    "path, value",
    [
        (("spec", "shutDownAfterJobFinishes"), True),
        (("spec", "rayClusterSpec", "headGroupSpec", "replicas"), 1),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "maxReplicas"), "4"),
    ],
)
def test_what_the_operator_would_refuse_is_seen(job, path, value):
    *above, key = path
    place = job
    for step in above:
        place = place[step]
    place[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, RAY_JOB)


def test_its_pods_have_what_they_name(job):
    """What no schema says: mounts are of the pod's volumes, all pods have one image and one folder."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    containers = [(pod, own) for pod in pods for own in pod["containers"]]
    for pod, own in containers:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in own["volumeMounts"]} <= volumes
    assert len({own["image"] for _, own in containers}) == 1
    (shared,) = {mount["mountPath"] for _, own in containers for mount in own["volumeMounts"]}
    named = re.findall(r"/\S+", job["spec"]["entrypoint"])
    assert len(named) == 2 and all(path.startswith(f"{shared}/") for path in named)
