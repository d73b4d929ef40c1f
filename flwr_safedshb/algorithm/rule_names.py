"""Find the rule that a text names, without running the text."""

from __future__ import annotations

import ast

from flwr_safedshb import aggregation
from flwr_safedshb.aggregation.rule import Rule


def parse_rule(text: str) -> Rule:
    """Return the rule with this repr, such as ``SMEA(max_nodes=9, time_limit=None)``.

    Raises
    ------
    ValueError
        If it is none of this package.
    """
    try:
        found = _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, RecursionError) as error:
        raise ValueError(f"{text!r:.80} names no rule: {error}") from None
    if not isinstance(found, Rule):
        raise ValueError(f"{text!r:.80} names no rule")
    return found


def is_named(rule: Rule) -> bool:
    """Return whether the rule's repr is enough to make an equal rule."""
    try:
        return repr(parse_rule(repr(rule))) == repr(rule)
    except ValueError:
        return False


def _build(node: ast.expr) -> object:
    """Return a literal, or a rule of this package with literals or rules in it."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    kind = getattr(aggregation, name, None) if name in aggregation.__all__ else None
    if not isinstance(kind, type) or not issubclass(kind, Rule):
        raise ValueError(f"{name!r} is no rule of this package")
    values = {str(word.arg): _build(word.value) for word in node.keywords}
    return kind(*map(_build, node.args), **values)
