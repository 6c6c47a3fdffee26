"""The OpenAPI document, written by hand: one request may come in three forms, which no signature says."""

from typing import Any

from vitrail._version import __version__
from vitrail.explanations.request import METHODS
from vitrail.serving.settings import Settings

Json = dict[str, Any]
_WORDS = {
    400: "The body cannot be understood: empty, no JSON, no form, no base64.",
    401: "The token is missing or wrong.",
    403: "A browser sends this for a page of another site, or for a host name, which no setting allows.",
    404: "There is nothing at this address.",
    408: "The body did not arrive in time.",
    409: "The bundle cannot be opened; the model that was there keeps serving.",
    413: "Too many bytes, pixels or images.",
    415: "The body, or the only image, is of a kind that is not taken.",
    422: "An option does not fit the model, or the only image is damaged or takes too long to decode.",
    503: "Starting, stopping, or too much to do already; try again after Retry-After seconds.",
    504: "There was no answer within the deadline.",
}


def document(settings: Settings) -> Json:
    """Describe the service for programs."""
    secured = settings.token is not None
    described: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Vitrail",
            "version": __version__,
            "description": "Vision Transformers behind HTTP: predictions, features and explanations of images.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {**_work(settings), **_others(secured)},
        "components": {"schemas": _schemas()},
    }
    if secured:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return described


def _work(settings: Settings) -> Json:
    names = [model.name for model in settings.models]
    whole = {"type": "integer", "minimum": -1_000_000, "maximum": 1_000_000}
    model = ("model", {"type": "string", "enum": names}, "The model that is asked; without it, the first.")
    layer = ("layer", whole, "A layer, from 0, or from the end: -1 is the last.")
    top = ("top", {"type": "integer", "minimum": 1, "maximum": 1_000_000, "default": 5}, "How many classes to name.")
    normalise = ("normalise", {"type": "boolean", "default": False}, "Scale every vector to length 1.")
    explain = (
        ("method", {"type": "string", "enum": list(METHODS), "default": "relevance"}, "How to explain."),
        layer,
        ("head", whole, "A head, from 0; without it, the mean of all. For attention."),
        (
            "query",
            {"type": "string", "maxLength": 200},
            "Who asks: class, distillation, register:N, mean, pool, 'row,column' of a patch; all gives every token's "
            "weights. For attention and rollout.",
        ),
        (
            "target",
            {"type": "string", "maxLength": 200},
            "The class to explain, by its name or number; without it, the likeliest. For relevance and gradcam.",
        ),
        ("fuse", {"type": "string", "enum": ["mean", "max", "min"]}, "How heads are joined. For rollout."),
    )
    return {
        "/v1/predict": {"post": _asking("predict", "The likeliest classes", "Predictions", settings, model, top)},
        "/v1/embed": {"post": _asking("embed", "Features", "Embeddings", settings, model, normalise, layer)},
        "/v1/explain": {"post": _asking("explain", "Where a model looks", "Explanations", settings, model, *explain)},
    }


def _asking(name: str, summary: str, answer: str, settings: Settings, *options: tuple[str, Json, str]) -> Json:
    image = {"type": "string", "contentMediaType": "image/*", "contentEncoding": "base64"}
    fields: Json = {option: {**schema, "description": said} for option, schema, said in options}
    images = {"type": "array", "items": image, "minItems": 1, "maxItems": settings.images_limit}
    file = {"type": "string", "format": "binary"}
    return {
        "operationId": name,
        "summary": summary,
        "description": "A result for each image, in order. Where there are several, one that cannot be read has an "
        "error as its result; where it is the only one, its fault is the status.",
        "parameters": [
            {"name": option, "in": "query", "required": False, "schema": schema, "description": said}
            for option, schema, said in options
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
        **_answers(answer, (400, 408, 413, 415, 422, 503, 504), settings.token is not None),
    }


def _others(secured: bool) -> Json:
    reload = {
        "operationId": "reload",
        "summary": "Open a bundle again, or all of them, without losing a request",
        "parameters": [{"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}],
        **_answers("Reloaded", (409, 422, 503), secured),
    }
    text = {"200": {"description": "Prometheus' text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    metrics = _answers(None, (), secured)
    named = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
    image = {
        "200": {"description": "A JPEG.", "content": {"image/jpeg": {"schema": {"type": "string", "format": "binary"}}}}
    }
    one = _answers(None, (404, 422), secured)
    return {
        "/v1/samples": {
            "get": {
                "operationId": "own_samples",
                "summary": "Images of a model's own classes, where its run kept some",
                "parameters": [named],
                **_answers("OwnSamples", (422,), secured),
            }
        },
        "/v1/samples/image": {
            "get": {
                "operationId": "own_sample",
                "summary": "One of these images",
                "parameters": [
                    named,
                    {"name": "number", "in": "query", "required": True, "schema": {"type": "integer", "minimum": 0}},
                ],
                **one,
                "responses": {**image, **one["responses"]},
            }
        },
        "/v1/models": {"get": {"operationId": "models", "summary": "The models", **_answers("Models", (), secured)}},
        "/v1/models/reload": {"post": reload},
        "/healthz": {"get": {"operationId": "healthz", "summary": "The process answers", **_answers("Status", ())}},
        "/readyz": {"get": {"operationId": "readyz", "summary": "Models answer", **_answers("Status", (503,))}},
        "/samples": {"get": {"operationId": "samples", "summary": "Images to try", **_answers("Samples", ())}},
        "/metrics": {
            "get": {
                "operationId": "metrics",
                "summary": "Numbers for Prometheus",
                **metrics,
                "responses": {**text, **metrics["responses"]},
            }
        },
    }


def _answers(schema: str | None, statuses: tuple[int, ...], secured: bool = False) -> Json:
    refused = {*statuses, 403, *((401,) if secured else ())}
    responses = {
        str(status): {"description": _WORDS[status], "content": _as_json("Error")} for status in sorted(refused)
    }
    if schema is not None:
        responses = {"200": {"description": "The answer.", "content": _as_json(schema)}, **responses}
    return {"responses": responses, **({"security": [{"token": []}]} if secured else {})}


def _as_json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _object(properties: Json, *, optional: tuple[str, ...] = ()) -> Json:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _schemas() -> Json:
    text, whole, number, truth = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
    wholes = _list(whole)
    error = _object({"error": text})
    known = _object({"name": text, "index": whole, "probability": number})
    numbers = _object({"shape": wholes, "dtype": {"enum": ["float32", "float16"]}, "data": text})
    numbers["description"] = "Numbers as base64 of little-endian bytes, the last axis running fastest."
    explained = _object(
        {"map": numbers, "attention": numbers, "image": text, "target": {"anyOf": [known, {"type": "null"}]}},
        optional=("map", "attention"),
    )

    def results(one: Json, **more: Json) -> Json:
        return _object({"model": text, **more, "results": _list({"anyOf": [one, error]})})

    model = {
        "name": text, "default": truth, "classes": {"anyOf": [_list(text), {"type": "null"}]}, "class_count": whole,
        "channels": whole, "image_size": wholes, "patch_size": wholes, "grid": wholes, "depth": whole, "heads": whole,
        "width": whole, "parameters": whole, "token_count": whole, "patch_start": whole, "pool": text, "digest": text,
        "precision": text,
        "tokens": _list(_object({"index": whole, "kind": text, "number": whole}, optional=("number",))),
        "stages": _list(_object({"name": text, "shape": wholes, "meaning": text})),
        "methods": {"type": "object", "additionalProperties": truth},
        "why_not": {"type": "object", "additionalProperties": text},
    }  # fmt: skip
    return {
        "Error": _object({"error": {**text, "description": "One sentence."}, "request_id": text}),
        "Status": _object({"status": text}),
        "Samples": _object({"samples": _list(_object({"name": text, "url": text}))}),
        "OwnSamples": _object({"model": text, "samples": _list(_object({"name": text, "number": whole}))}),
        "Reloaded": _object({"reloaded": _list(text)}),
        "Models": _object({"models": _list(_object(model))}),
        "Predictions": results(_object({"classes": _list(known)})),
        "Embeddings": results(_object({"embedding": _list(number)})),
        "Explanations": results(explained, method=text),
    }
