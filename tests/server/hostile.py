"""Schemas and grammars that exhaust a stack, a memory or a patience."""


def linked_definitions(n: int) -> dict:
    """Definitions that refer to one another, ``n`` deep."""
    definitions = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(n - 1)}
    return {"$defs": definitions | {str(n - 1): {"type": "integer"}}, "$ref": "#/$defs/0"}


def chained_rules(n: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(n - 1)), f'r{n - 1}: "x"'])


def many_terms() -> str:
    """An automaton of very many states."""
    return "start: T\nT: " + " & ".join(f"/(?s:.*[a-z]{{{i}}}x.*)/" for i in range(1, 200))


def slow_expression() -> str:
    """One whose first step takes seconds, and most of a gigabyte."""
    return "start: A\nA: /" + "a?" * 15_000 + "a" * 15_000 + "/"
