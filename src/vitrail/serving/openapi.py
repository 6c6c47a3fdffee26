"""The OpenAPI document, written by hand because a request body has three forms."""

from typing import Any

from vitrail._version import __version__
from vitrail.explanations.request import METHODS
from vitrail.serving.settings import Settings
from vitrail.tasks.lookup import TASKS

Json = dict[str, Any]
_ERRORS = {
    400: "The body is empty, or is not valid JSON, form data or base64.",
    401: "The token is missing or wrong.",
    403: "The Host or Origin header is not allowed.",
    404: "Not found.",
    408: "The body did not arrive in time.",
    409: "The bundle cannot be opened; the loaded model keeps serving.",
    413: "Too many bytes, pixels or images.",
    415: "The type of the body, or of the only image, is not supported.",
    422: "An option does not fit the model, or the only image is corrupt or takes too long to decode.",
    503: "Starting, stopping or overloaded; try again after Retry-After seconds.",
    504: "No result within the deadline.",
}


def document(settings: Settings) -> Json:
    """Build the OpenAPI document."""
    secured = settings.token is not None
    spec: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Vitrail",
            "version": __version__,
            "description": "Vision Transformers behind HTTP: predictions, features and explanations of images.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {**_inference_paths(settings), **_other_paths(secured)},
        "components": {"schemas": _schemas()},
    }
    if secured:
        spec["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return spec


def _inference_paths(settings: Settings) -> Json:
    names = [model.name for model in settings.models]
    integer = {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000}
    model = ("model", {"type": "string", "enum": names}, "The model to use; by default, the first.")
    layer = ("layer", integer, "Layer index from 0; negative counts from the end, -1 is the last.")
    top = ("top", {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 5}, "How many classes to return.")
    normalise = ("normalise", {"type": "boolean", "default": False}, "L2-normalise every vector.")
    explain = (
        ("method", {"type": "string", "enum": list(METHODS), "default": "relevance"}, "Explanation method."),
        layer,
        ("head", integer, "Head index from 0; by default, the mean of all heads. For attention."),
        (
            "query",
            {"type": "string", "maxLength": 200},
            "The query token: class, distillation, register:N, mean, pool, or 'row,column' of a patch; all returns "
            "every token's weights. For attention and rollout.",
        ),
        (
            "target",
            {"type": "string", "maxLength": 200},
            "The class to explain, by name or index; by default, the top class. For relevance and gradcam.",
        ),
        ("fuse", {"type": "string", "enum": ["mean", "max", "min"]}, "How to combine heads. For rollout."),
    )
    return {
        "/v1/predict": {"post": _inference("predict", "Classify images", "Predictions", settings, model, top)},
        "/v1/embed": {"post": _inference("embed", "Embed images", "Embeddings", settings, model, normalise, layer)},
        "/v1/explain": {
            "post": _inference("explain", "Explain predictions", "Explanations", settings, model, *explain)
        },
    }


def _inference(name: str, summary: str, schema: str, settings: Settings, *options: tuple[str, Json, str]) -> Json:
    image = {"type": "string", "contentMediaType": "image/*", "contentEncoding": "base64"}
    fields: Json = {option: {**schema, "description": text} for option, schema, text in options}
    images = {"type": "array", "items": image, "minItems": 1, "maxItems": settings.images_limit}
    file = {"type": "string", "format": "binary"}
    return {
        "operationId": name,
        "summary": summary,
        "description": "Returns one result per image, in order. If one of several images cannot be read, its "
        "result holds an error; if it is the only image, the status says so.",
        "parameters": [
            {"name": option, "in": "query", "required": False, "schema": schema, "description": text}
            for option, schema, text in options
        ],
        "requestBody": {
            "required": True,
            "content": {
                **{f"image/{kind}": {"schema": file} for kind in settings.formats},
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["image"],
                        "additionalProperties": False,
                        "properties": {"image": {"type": "array", "items": file, "minItems": 1}, **fields},
                    }
                },
                "application/json": {
                    "schema": {
                        "type": "object",
                        "required": ["images"],
                        "additionalProperties": False,
                        "properties": {"images": images, **fields},
                    }
                },
            },
        },
        **_responses(schema, (400, 408, 413, 415, 422, 503, 504), settings.token is not None),
    }


def _other_paths(secured: bool) -> Json:
    reload = {
        "operationId": "reload",
        "summary": "Reload one bundle, or all, without dropping requests",
        "parameters": [{"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}],
        **_responses("Reloaded", (409, 422, 503), secured),
    }
    text = {
        "200": {"description": "Prometheus text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    }
    metrics = _responses(None, (), secured)
    named = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
    image = {
        "200": {"description": "A JPEG.", "content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}
    }
    one = _responses(None, (404, 422), secured)
    return {
        "/v1/samples": {
            "get": {
                "operationId": "model_samples",
                "summary": "Sample images saved by the model's training run",
                "parameters": [named],
                **_responses("ModelSamples", (422,), secured),
            }
        },
        "/v1/samples/image": {
            "get": {
                "operationId": "model_sample",
                "summary": "One sample image",
                "parameters": [
                    named,
                    {"name": "number", "in": "query", "required": True, "schema": {"type": "integer", "minimum": 0}},
                ],
                **one,
                "responses": {**image, **one["responses"]},
            }
        },
        "/v1/models": {
            "get": {"operationId": "models", "summary": "List the models", **_responses("Models", (), secured)}
        },
        "/v1/models/reload": {"post": reload},
        "/healthz": {"get": {"operationId": "healthz", "summary": "Liveness probe", **_responses("Status", ())}},
        "/readyz": {"get": {"operationId": "readyz", "summary": "Readiness probe", **_responses("Status", (503,))}},
        "/samples": {
            "get": {"operationId": "samples", "summary": "Built-in sample images", **_responses("Samples", ())}
        },
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "Prometheus metrics",
                **metrics,
                "responses": {**text, **metrics["responses"]},
            }
        },
    }


def _responses(schema: str | None, statuses: tuple[int, ...], secured: bool = False) -> Json:
    errors = {*statuses, 403, *((401,) if secured else ())}
    responses = {
        str(status): {"description": _ERRORS[status], "content": _as_json("Error")} for status in sorted(errors)
    }
    if schema is not None:
        responses = {"200": {"description": "The result.", "content": _as_json(schema)}, **responses}
    return {"responses": responses, **({"security": [{"token": []}]} if secured else {})}


def _as_json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(properties: Json, *, optional: tuple[str, ...] = ()) -> Json:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _schemas() -> Json:
    text, integer, number, boolean = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
    integers = _list(integer)
    error = _object({"error": text})
    class_entry = _object({"name": text, "index": integer, "probability": number})
    output_entry = _object({"name": text, "index": integer, "value": number})
    array = _object({"shape": integers, "dtype": {"enum": ["float32", "float16"]}, "data": text})
    array["description"] = "Array as base64 of little-endian bytes in row-major order."
    explained = _object(
        {
            "map": array,
            "attention": array,
            "image": text,
            "target": {"anyOf": [class_entry, output_entry, {"type": "null"}]},
        },
        optional=("map", "attention"),
    )

    def results(*kinds: Json, **more: Json) -> Json:
        return _object({"model": text, **more, "results": _list({"anyOf": [*kinds, error]})})

    model = {
        "name": text, "default": boolean, "task": {"anyOf": [text, {"type": "null"}]},
        "classes": {"anyOf": [_list(text), {"type": "null"}]}, "class_count": integer,
        "channels": integer, "image_size": integers, "patch_size": integers, "grid": integers, "depth": integer,
        "heads": integer, "width": integer, "parameters": integer, "token_count": integer, "patch_start": integer,
        "pool": text, "digest": text, "precision": text,
        "tokens": _list(_object({"index": integer, "kind": text, "number": integer}, optional=("number",))),
        "stages": _list(_object({"name": text, "shape": integers, "meaning": text})),
        "methods": {"type": "object", "additionalProperties": boolean},
        "why_not": {"type": "object", "additionalProperties": text},
    }  # fmt: skip
    return {
        "Error": _object({"error": {**text, "description": "What is wrong and what to do."}, "request_id": text}),
        "Status": _object({"status": text}),
        "Samples": _object({"samples": _list(_object({"name": text, "url": text}))}),
        "ModelSamples": _object({"model": text, "samples": _list(_object({"name": text, "number": integer}))}),
        "Reloaded": _object({"reloaded": _list(text)}),
        "Models": _object({"models": _list(_object(model))}),
        "Predictions": results(*(_object(dict(task.rows.schema)) for task in TASKS.values())),
        "Embeddings": results(_object({"embedding": _list(number)})),
        "Explanations": results(explained, method=text),
    }
