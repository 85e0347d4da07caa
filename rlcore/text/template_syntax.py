"""Static analysis of chat templates: whether a template copies message texts unchanged.

A template that only writes a message's text and never tests it copies every text unchanged. Token counts of such
templates need no rendering.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

from jinja2 import Environment, TemplateSyntaxError, nodes

_MESSAGES, _CONTENT = "messages", "content"
_LOOP = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})  # none gives a message
_KINDS = frozenset({"string", "defined", "undefined", "none"})  # tests with the same result for all texts
_COUNTS = frozenset({"length", "count"})
# Macros, blocks and filter blocks are excluded: they may change the text inside them.
_KNOWN = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name, nodes.NSRef),
    *(nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Compare, nodes.Operand, nodes.And, nodes.Or),
    *(nodes.Not, nodes.Neg, nodes.Add, nodes.Sub, nodes.Mod, nodes.Concat, nodes.Filter, nodes.Test, nodes.Call),
    *(nodes.Keyword, nodes.CondExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
)
Parents = dict[int, nodes.Node]
N = TypeVar("N", bound=nodes.Node)


@lru_cache(maxsize=64)
def preserves_text(template: str) -> bool:
    """Return True if a template certainly copies every nonempty text.

    False if the syntax does not prove it, as with ``content | trim`` or ``'</think>' in content``.
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:  # a tag that transformers adds
        return False
    parents = {id(child): node for node in _all(tree, nodes.Node) for child in node.iter_child_nodes()}
    if not all(isinstance(node, _KNOWN) for node in _all(tree, nodes.Node)):
        return False
    lists, turns = _names(tree)
    return all(_is_harmless(name, parents, lists, turns) for name in _all(tree, nodes.Name) if name.ctx == "load")


def _all(tree: nodes.Node, kind: type[N]) -> Iterator[N]:
    if isinstance(tree, kind):
        yield tree
    yield from tree.find_all(kind)


def _names(tree: nodes.Node) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of lists of messages, and the names of single messages."""
    lists = {_MESSAGES}
    for _ in range(len(list(tree.find_all(nodes.Assign))) + 1):  # a list may be assigned from another name
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_list(assign.node, lists):
                lists.add(assign.target.name)
    loops = [loop for loop in tree.find_all(nodes.For) if _is_list(loop.iter, lists)]
    return frozenset(lists), frozenset(loop.target.name for loop in loops if isinstance(loop.target, nodes.Name))


def _is_list(node: nodes.Node, lists: set[str]) -> bool:
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node = node.node
    return isinstance(node, nodes.Name) and node.name in lists


def _is_harmless(name: nodes.Name, parents: Parents, lists: frozenset[str], turns: frozenset[str]) -> bool:
    """Return True if no text can influence how the name is used, except by being written."""
    parent = parents[id(name)]
    if name.name == "loop":
        return isinstance(parent, nodes.Getattr) and parent.attr in _LOOP
    if name.name in lists:
        return _is_harmless_list(name, parents)
    return name.name not in turns or _is_harmless_turn(name, parents)


def _is_harmless_list(node: nodes.Expr, parents: Parents) -> bool:
    parent = parents[id(node)]
    if isinstance(parent, nodes.Getitem) and parent.node is node:
        if isinstance(parent.arg, nodes.Slice):
            return _is_harmless_list(parent, parents)
        return _is_harmless_turn(parent, parents)
    if isinstance(parent, nodes.For):  # the loop variable is checked under its own name
        return parent.iter is node and isinstance(parent.target, nodes.Name)
    if isinstance(parent, nodes.Assign):
        return isinstance(parent.target, nodes.Name)
    return isinstance(parent, nodes.Filter) and parent.name in _COUNTS


def _is_harmless_turn(node: nodes.Expr, parents: Parents) -> bool:
    parent = parents[id(node)]
    if isinstance(parent, nodes.Operand):  # 'tool_calls' in message: all messages have the same two fields
        test = parents[id(parent)]
        return parent.op in ("in", "notin") and isinstance(test, nodes.Compare) and isinstance(test.expr, nodes.Const)
    field = _field(parent) if isinstance(parent, nodes.Getattr | nodes.Getitem) and parent.node is node else None
    if field is None or hasattr(dict, field):  # message.items()
        return False
    return field != _CONTENT or _is_written(parent, parents) or _is_truth_test(parent, parents)


def _field(node: nodes.Getattr | nodes.Getitem) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else None


def _is_written(node: nodes.Node, parents: Parents) -> bool:
    """Return True if an expression is written to the output, alone or concatenated with other texts."""
    parent = parents[id(node)]
    while isinstance(parent, nodes.Add | nodes.Concat):
        parent = parents[id(parent)]
    return isinstance(parent, nodes.Output)


def _is_truth_test(node: nodes.Node, parents: Parents) -> bool:
    """Return True if an expression is only tested for presence, which is equal for all nonempty texts."""
    parent = parents[id(node)]
    if isinstance(parent, nodes.Test) and parent.name in _KINDS:
        return True
    while isinstance(parent, nodes.And | nodes.Or | nodes.Not):
        node, parent = parent, parents[id(parent)]
    return isinstance(parent, nodes.If | nodes.CondExpr) and parent.test is node
