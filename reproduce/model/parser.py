"""From text to syntax, by the grammar in grammar.lark."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken
from lark.indenter import Indenter

from reproduce.model.source import ModelError, Source, Span, fault
from reproduce.model.syntax import (
    Argument,
    Assignment,
    Call,
    Chain,
    Expression,
    Literal,
    Model,
    Name,
    Repeat,
    Statement,
)

MAX_NESTING = 16
"""Parentheses within parentheses, and blocks within blocks. Nothing a model needs comes near, and no input can make
the recursion over the syntax deep."""

MAX_TOKENS = 2000
"""Words, numbers and signs of one text; a model has some two hundred."""

_GRAMMAR = Path(__file__).with_name("grammar.lark")

# How tokens read in messages; the others stand for themselves.
_TOKENS = {
    "NAME": "a name",
    "NUMBER": "a whole number",
    "DECIMAL": "a decimal",
    "TEXT": "a text in double quotes",
    "_NL": "the end of the line",
    "_INDENT": "an indented block",
    "_DEDENT": "the end of the block",
    "$END": "the end of the file",
    "PLUS": "'+'",
    "MINUS": "'-'",
    "STAR": "'*'",
    "LPAR": "'('",
    "RPAR": "')'",
    "COMMA": "','",
    "COLON": "':'",
    "SEMICOLON": "';'",
    "EQUAL": "'='",
    "MODEL": "model",
    "REPEAT": "repeat",
    "TRUE": "true",
    "FALSE": "false",
}
# Tokens that go by one name where all of them may stand.
_GROUPS = {
    "a value": frozenset({"NAME", "NUMBER", "DECIMAL", "TEXT", "LPAR"}),
    "an operator": frozenset({"PLUS", "MINUS", "STAR"}),
}
# What to write instead of a character that the language has not.
_INSTEAD = {
    "\t": "indent with spaces",
    "'": "write texts in double quotes",
    '"': "end the text with a double quote on the same line",
    "/": "there are + - and *",
}


def parse(source: Source) -> Model:
    """The syntax of a model. Raises ModelError with line, column and caret."""
    # With a last line end, no line is a special case.
    text = source.text + "\n"
    try:
        tree = _parser().parse(text)
    except _Refused as refusal:
        raise fault(source, refusal.span, refusal.message) from None
    except UnexpectedInput as error:
        raise _explain(source, error) from None
    return _model(_only(tree))


class _Refused(Exception):
    def __init__(self, token: Token, message: str) -> None:
        super().__init__(message)
        self.span = _span_of(token)
        self.message = message


class _Blocks(Indenter):
    """Makes blocks of indentation, down to MAX_NESTING."""

    NL_type = "_NL"
    OPEN_PAREN_types = ["LPAR"]  # noqa: RUF012 -- as the base class has it
    CLOSE_PAREN_types = ["RPAR"]  # noqa: RUF012
    INDENT_type = "_INDENT"
    DEDENT_type = "_DEDENT"
    tab_len = 8

    def handle_NL(self, token: Token) -> Iterator[Token]:
        if self.paren_level > 0:
            return
        yield token
        after = token.rsplit("\n", 1)[1]
        indent = len(after)
        if indent > self.indent_level[-1]:
            if len(self.indent_level) > MAX_NESTING:
                raise _Refused(token, f"expected blocks at most {MAX_NESTING} deep, found more")
            self.indent_level.append(indent)
            yield Token.new_borrow_pos(self.INDENT_type, after, token)
            return
        deeper = indent
        while indent < self.indent_level[-1]:
            deeper = self.indent_level.pop()
            yield Token.new_borrow_pos(self.DEDENT_type, after, token)
        if indent != self.indent_level[-1]:
            raise _Refused(
                _line_start(token),
                f"expected {self.indent_level[-1]} or {deeper} spaces before this line, as a block has, found {indent}",
            )

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        for number, token in enumerate(super().process(stream)):  # type: ignore[no-untyped-call]
            if number == MAX_TOKENS:
                raise _Refused(token, f"expected at most {MAX_TOKENS:,} words and signs, found more: shorten it")
            if self.paren_level >= MAX_NESTING and token.type == "LPAR":
                raise _Refused(token, f"expected parentheses at most {MAX_NESTING} deep, found more")
            yield token


@cache
def _parser() -> Lark:
    return Lark(
        _GRAMMAR.read_text(encoding="utf-8"),
        parser="lalr",
        postlex=_Blocks(),
        propagate_positions=True,
        maybe_placeholders=True,
    )


def _line_start(token: Token) -> Token:
    """An empty token at the end of a line-end token, where the next line's text begins."""
    assert token.end_pos is not None
    return Token("_NL", "", token.end_pos, None, None, None, None, token.end_pos)


def _explain(source: Source, error: UnexpectedInput) -> ModelError:
    if isinstance(error, UnexpectedCharacters):
        at: int = error.pos_in_stream  # type: ignore[assignment]
        found = source.text[at : at + 1]
        expected = _expected(set(error.allowed or ()) - {"_NL"}) or "a statement"
        advice = f": {_INSTEAD[found]}" if found in _INSTEAD else ""
        return fault(source, Span(at, at + 1), f"expected {expected}, found the character {found!r}{advice}")
    if isinstance(error, UnexpectedToken):
        token = error.token
        span = _span_of(token)
        # A line end reaches to the next line's text.
        if token.type == "_NL":
            span = Span(span.start, span.start + 1)
        if token.type in ("_INDENT", "_DEDENT"):
            span = Span(span.end, span.end + 1)
        found = "a deeper indentation" if token.type == "_INDENT" else _TOKENS.get(token.type, token.type)
        if token.type in ("NAME", "NUMBER", "DECIMAL", "TEXT"):
            shown = str(token) if len(token) <= 40 else f"{token[:40]}..."
            found = f"{found}, {shown}" if token.type != "NAME" else f"the name {shown}"
        # A tab is no indentation, so a block may seem to end before it.
        if (next_character := source.text[span.start : span.end]) == "\t":
            found = f"the character {next_character!r}"
        types = set(error.accepts or error.expected)
        advice = ": begin with model Name(context=..., vocab=...):" if "MODEL" in types else ""
        advice = f": {_INSTEAD[next_character]}" if next_character == "\t" else advice
        return fault(source, span, f"expected {_expected(types)}, found {found}{advice}")
    end = len(source.text.rstrip())
    return fault(source, Span(end, end + 1), f"expected more, found {_TOKENS['$END']}")


def _expected(types: set[str]) -> str:
    words = []
    for name, group in _GROUPS.items():
        if types >= group:
            types = types - group - ({"TRUE", "FALSE"} if name == "a value" else set())
            words.append(name)
    words += [_TOKENS.get(name, name) for name in sorted(types)]
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# --- from lark's tree to syntax; recursion is as deep as MAX_NESTING allows -----------------------------------------


def _span_of(token: Token) -> Span:
    assert token.start_pos is not None and token.end_pos is not None
    return Span(token.start_pos, token.end_pos)


def _span(tree: Any) -> Span:
    if isinstance(tree, Token):
        return _span_of(tree)
    return Span(tree.meta.start_pos, tree.meta.end_pos)


def _only(tree: Tree[Any]) -> Any:
    [child] = tree.children
    return child


def _name(token: Any) -> Name:
    return Name(_span_of(token), str(token))


def _model(tree: Tree[Any]) -> Model:
    name, arguments, body = tree.children
    return Model(_span(tree), _name(name), _arguments(arguments), _block(body))


def _block(tree: Tree[Any]) -> tuple[Statement, ...]:
    return tuple(_statement(child) for child in tree.children)


def _statement(tree: Tree[Any]) -> Statement:
    first, second = tree.children
    if tree.data == "repeat":
        count = _expression(first)
        start = _span(tree).start
        return Repeat(_span(tree), Span(start, count.span.end), count, _block(second))
    return Assignment(_span(tree), _name(first), _expression(second))


def _arguments(tree: Tree[Any] | None) -> tuple[Argument, ...]:
    if tree is None:
        return ()
    return tuple(_argument(child) for child in tree.children)


def _argument(tree: Tree[Any]) -> Argument:
    name, value = tree.children
    return Argument(_span(tree), None if name is None else str(name), _expression(value))


def _expression(tree: Tree[Any]) -> Expression:
    if tree.data == "sum":
        return _chain(tree, "+")
    if tree.data == "product":
        return _chain(tree, "*")
    if tree.data == "postfix":
        function = _expression(tree.children[0])
        for call in tree.children[1:]:
            span = Span(function.span.start, _span(call).end)
            function = Call(span, function, _arguments(_only(call)))
        return function
    if tree.data == "group":
        return _expression(_only(tree))
    span = _span(tree)
    if tree.data == "name":
        return Name(span, str(_only(tree)))
    if tree.data in ("true", "false"):
        return Literal(span, "flag", str(tree.data))
    return Literal(span, str(tree.data), str(_only(tree)))


def _chain(tree: Tree[Any], operator: str) -> Expression:
    """A token among the children is the operator before the next one."""
    first, *children = tree.children
    if not children:
        return _expression(first)
    rest = []
    following = operator
    for child in children:
        if isinstance(child, Token):
            following = str(child)
            continue
        rest.append((following, _expression(child)))
        following = operator
    return Chain(_span(tree), _expression(first), tuple(rest))
