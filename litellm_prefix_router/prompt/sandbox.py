"""The sandbox in which chat templates run: the engines' own, with bounds on time and size built into the template.

A template comes with a model's files or with a request, so it is untrusted code. Jinja's immutable sandbox keeps it
from reaching out; it does not keep it from running for ever. So while a template is compiled, every loop is made to
count its steps and every value that is stored or passed on is made to show its size; calls look at the clock. A
C-level operation cannot be interrupted, so the ones that could make a huge value from small ones are bounded by their
arguments. Without the bounds' help a template renders exactly as it does in the engine.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

Clock = Callable[[], datetime]

_STEPS_PER_LOOK = 4
"""A look at the clock costs 0.05 µs; a step may be a filter over a long list."""
_SHORT = 256
_GROWING_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill"}
)
_MAX_POWER_BITS = 4096
_DICT_ATTRIBUTES = frozenset(dir(dict))
_OPEN_TYPES = frozenset({str, LoopContext, Namespace})
"""Types of which a template may read every attribute that is not private."""


class OutOfBounds(Exception):
    """A template ran past its time or made more text than it may."""


class _Budget(threading.local):
    """What the render in this thread may still spend."""

    deadline = float("inf")
    size = 1 << 62
    steps = 0


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; in a prompt it only encloses text."""

    tags = {"generation"}  # noqa: RUF012 - declared without ClassVar by the base class

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of chat templates; `clock` gives the local time that `strftime_now` prints."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, clock: Clock = datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
        self._budget = _Budget()
        self.filters["tojson"] = _tojson
        self.filters["_steps"] = self._counted
        self.filters["_sized"] = self._sized
        for name in ("center", "indent", "format", "replace", "join", "wordwrap"):
            self.filters[name] = self._growing(name, self.filters[name])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)

    def compile_bounded(self, source: str) -> jinja2.Template:
        """The template of `source` with its bounds built in. Raises jinja2.TemplateError."""
        tree = self.parse(source)
        _add_bounds(tree, self)
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None), None)

    def run(self, template: jinja2.Template, context: dict[str, Any], time_limit_s: float, size_limit: int) -> str:
        """The rendered text. Raises OutOfBounds and whatever the template raises."""
        budget = self._budget
        budget.deadline, budget.size, budget.steps = time.monotonic() + time_limit_s, size_limit, 0
        pieces: list[str] = []
        total = 0
        # as new_context(context) makes it, but without walking a chain of maps for the globals
        whole = template.new_context({**self.globals, **context}, shared=True)
        for piece in template.root_render_func(whole):
            total += len(piece)
            if total > size_limit:
                raise OutOfBounds(f"the chat template printed more than {size_limit} characters")
            pieces.append(piece)
        return "".join(pieces)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Nearly all that a template does is read plain dicts, loops, namespaces and strings. What the base class finds
        # by way of an exception and of checks by type is found at once here, with the same result.
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind in _OPEN_TYPES and attribute[:1] != "_" and attribute not in ("format", "format_map"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str:
            try:
                return obj[argument]
            except KeyError:
                pass
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._look()
        if getattr(__obj, "__name__", "") in _GROWING_METHODS:
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                __self._check_growth(__obj.__name__, (owner, *args))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limit = self._budget.size
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if (
                    isinstance(sequence, (str, list, tuple))
                    and isinstance(count, int)
                    and len(sequence) * count > limit
                ):
                    raise OutOfBounds("the chat template repeats a text too often")
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_POWER_BITS:
                raise OutOfBounds("the chat template computes too large a number")
        elif isinstance(left, str):
            self._check_growth("format", (left, right))
        return super().call_binop(context, operator, left, right)

    def _look(self) -> None:
        if time.monotonic() > self._budget.deadline:
            raise OutOfBounds("the chat template ran too long")

    def _counted(self, iterable: Iterable[Any]) -> Iterable[Any]:
        # what has a length is looped over many times at most when loops are nested, so each start is a step as well
        if isinstance(iterable, (list, tuple, dict)) and len(iterable) < _SHORT:
            self._step(len(iterable) + 1)
            return iterable
        return self._iterate(iterable)

    def _iterate(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._step(1)
            yield item

    def _step(self, count: int) -> None:
        budget = self._budget
        budget.steps += count
        if budget.steps > _STEPS_PER_LOOK:
            budget.steps = 0
            self._look()

    def _sized(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)) and len(value) > self._budget.size:
            raise OutOfBounds("the chat template made too long a text")
        return value

    def _growing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._look()
            plain = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, (str, int, list, tuple)))
            self._check_growth(name, plain)
            return function(*args, **kwargs)

        for mark in ("jinja_pass_arg",):
            if hasattr(function, mark):
                setattr(guarded, mark, getattr(function, mark))
        return guarded

    def _check_growth(self, name: str, values: tuple[Any, ...]) -> None:
        limit = self._budget.size
        if any(isinstance(value, int) and value > limit for value in values):
            raise OutOfBounds("the chat template asks for too wide a text")
        texts = [value for value in values if isinstance(value, str)]
        if name == "replace" and len(texts) >= 3:
            count = texts[0].count(texts[1]) if texts[1] else len(texts[0]) + 1
            if count * len(texts[2]) > limit:
                raise OutOfBounds("the chat template made too long a text")
        elif name == "join":
            items = next((value for value in values if isinstance(value, (list, tuple))), ())
            total = sum(len(item) for item in items if isinstance(item, str))
            if total + sum(len(text) for text in texts) * len(items) > limit:
                raise OutOfBounds("the chat template made too long a text")
        elif name in ("format", "format_map") and texts and _widest_number(texts[0]) > limit:
            raise OutOfBounds("the chat template asks for too wide a text")


def _widest_number(pattern: str) -> int:
    """The largest number written in a format: a field's width, if it is one."""
    widest = number = 0
    for character in pattern[:10_000]:
        number = number * 10 + ord(character) - 48 if "0" <= character <= "9" else 0
        widest = max(widest, number)
    return widest


def _add_bounds(tree: nodes.Template, environment: TemplateSandbox) -> None:
    def wrapped(node: nodes.Expr, name: str) -> nodes.Expr:
        bounded = nodes.Filter(node, name, [], [], None, None)
        bounded.set_lineno(node.lineno)
        bounded.set_environment(environment)
        return bounded

    for loop in list(tree.find_all(nodes.For)):
        loop.iter = wrapped(loop.iter, "_steps")  # type: ignore[arg-type]
    for assignment in list(tree.find_all(nodes.Assign)):
        if _combines(assignment.node):
            assignment.node = wrapped(assignment.node, "_sized")  # type: ignore[arg-type]
    for call in list(tree.find_all(nodes.Call)):
        call.args = [wrapped(argument, "_sized") if _combines(argument) else argument for argument in call.args]
        for keyword in call.kwargs:
            if _combines(keyword.value):
                keyword.value = wrapped(keyword.value, "_sized")


def _combines(node: nodes.Node) -> bool:
    kinds = (nodes.Add, nodes.Concat, nodes.Filter, nodes.Call)
    return isinstance(node, kinds) or any(node.find(kind) is not None for kind in kinds)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)
