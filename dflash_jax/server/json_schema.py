"""JSON schemas as other servers read them: an object is closed unless its schema opens it.

JSON Schema itself allows further properties. For structured output vLLM, SGLang and OpenAI do not, because a model
would invent properties.
"""

from collections.abc import Iterator
from typing import Any

# Keywords whose schemas describe the same value.
_COMBINING = ("allOf", "anyOf", "oneOf")
# Keywords with schemas of other values: one schema, a list, an object of schemas.
_ONE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains", "propertyNames")
_LISTS = ("items", "prefixItems")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` wherever properties are listed and nothing opens the object.

    An object with several schemas (``allOf``, ``anyOf``, ``oneOf``, a ``$ref`` beside properties) may have the
    properties that any of them names: each schema is closed over all of these names.
    """
    return _Closer(schema).close(schema)


def _is_open(schema: dict) -> bool:
    """Whether a schema allows properties that it does not list."""
    opened = (schema.get("additionalProperties"), schema.get("unevaluatedProperties"))
    return any(each not in (None, False) for each in opened) or bool(schema.get("patternProperties"))


class _Closer:
    def __init__(self, root: Any):
        self._root = root

    def close(self, schema: Any, names: frozenset[str] = frozenset(), refs: frozenset[str] = frozenset()) -> Any:
        """Closes a schema.

        Args:
            schema: The schema.
            names: Properties that other schemas of the same object name.
            refs: References that were replaced by their targets on the way here.
        """
        if not isinstance(schema, dict):
            return schema
        result = self._nested(schema, refs)
        described = list(self._descriptions(schema, frozenset()))
        if any(map(_is_open, described)):
            return result
        properties = [each["properties"] for each in described if isinstance(each.get("properties"), dict)]
        named = frozenset().union(*properties)
        target, inside = self._target(schema, refs)
        if target is not None and (names - named or "properties" in schema):
            # The reference's target is closed over its own names only: the copy is closed over all names.
            del result["$ref"]
            result["allOf"] = [target, *schema.get("allOf", [])]
            refs = inside
        names |= named
        for key in _COMBINING:
            if isinstance(result.get(key), list):
                result[key] = [self.close(each, names, refs) for each in result[key]]
        if isinstance(schema.get("properties"), dict):
            result["properties"] |= {name: True for name in sorted(names) if name not in schema["properties"]}
            result["additionalProperties"] = False
        return result

    def _nested(self, schema: dict, refs: frozenset[str]) -> dict:
        """A copy whose schemas of other values are closed."""
        result = dict(schema)
        for key in _ONE:
            if isinstance(schema.get(key), dict):
                result[key] = self.close(schema[key], refs=refs)
        for key in _LISTS:
            if isinstance(schema.get(key), list):
                result[key] = [self.close(each, refs=refs) for each in schema[key]]
        for key in _OBJECTS:
            if isinstance(schema.get(key), dict):
                result[key] = {name: self.close(each, refs=refs) for name, each in schema[key].items()}
        return result

    def _descriptions(self, schema: Any, refs: frozenset[str]) -> Iterator[dict]:
        """Yields all schemas of the value that ``schema`` describes."""
        if not isinstance(schema, dict):
            return
        yield schema
        target, refs = self._target(schema, refs)
        yield from self._descriptions(target, refs)
        for key in _COMBINING:
            for each in schema[key] if isinstance(schema.get(key), list) else ():
                yield from self._descriptions(each, refs)

    def _target(self, schema: dict, refs: frozenset[str]) -> tuple[Any, frozenset[str]]:
        """Resolves a local reference.

        Returns:
            The target, None where there is no such reference or it was followed before; and the references followed.
        """
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#/") or ref in refs:
            return None, refs
        target = self._root
        for part in ref[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, dict) else None
        return target, refs | {ref}
