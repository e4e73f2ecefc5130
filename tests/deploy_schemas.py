"""JSON schemas of what deploy/ has that no package of the registry ships a schema for.

Of each kind exactly the fields that the manifests use, so that a misspelled field fails: those of
Kueue's v1beta2, served since 0.15, and of a task of SkyPilot 0.14. To use another field, look it
up there and add it here.
"""

_QUANTITY = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\d+\w*$"}]
}
_NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


def _object(required: str, **properties):
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items):
    return {"type": "array", "minItems": 1, "maxItems": 16, "items": items}


def _resource(kind: str, spec, *, is_namespaced: bool = False):
    place = {"namespace": _NAME} if is_namespaced else {}
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "kueue.x-k8s.io/v1beta2"},
        kind={"const": kind},
        metadata=_object(" ".join(["name", *place]), name=_NAME, **place),
        spec=spec,
    )


_FLAVOR = _object(
    "name resources",
    name=_NAME,
    resources=_list(_object("name nominalQuota", name={"type": "string"}, nominalQuota=_QUANTITY)),
)
KUEUE = {
    "ResourceFlavor": _resource(
        "ResourceFlavor",
        _object("", nodeLabels={"type": "object", "additionalProperties": {"type": "string"}}),
    ),
    "ClusterQueue": _resource(
        "ClusterQueue",
        _object(
            "",
            namespaceSelector=_object(""),
            queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
            resourceGroups=_list(
                _object(
                    "coveredResources flavors",
                    coveredResources=_list({"type": "string"}),
                    flavors=_list(_FLAVOR),
                )
            ),
        ),
    ),
    "LocalQueue": _resource(
        "LocalQueue", _object("clusterQueue", clusterQueue=_NAME), is_namespaced=True
    ),
}

_TEXT = {"type": "string"}
SKYPILOT = _object(
    "name resources num_nodes workdir envs secrets file_mounts setup run",
    name=_NAME,
    resources=_object(
        "accelerators",
        accelerators={"type": "string", "pattern": r"^[\w-]+:\d+$"},
        use_spot={"type": "boolean"},
        disk_size={"type": "integer"},
        job_recovery=_object(
            "",
            strategy={"enum": ["EAGER_NEXT_REGION", "FAILOVER"]},
            max_restarts_on_errors={"type": "integer"},
            recover_on_exit_codes=_list({"type": "integer", "maximum": 255}),
        ),
    ),
    num_nodes={"type": "integer"},
    workdir=_TEXT,
    envs={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    file_mounts={
        "type": "object",
        "additionalProperties": _object("source mode", source=_TEXT, mode={"enum": ["MOUNT"]}),
    },
    setup=_TEXT,
    run=_TEXT,
)
