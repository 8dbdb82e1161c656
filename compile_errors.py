"""What a compiler said, and whose fault it is.

Theory of operation. `diagnostics` reads the errors out of the output of g++, nvcc, ptxas and the
linker; `report` makes of them the short text that goes back to the model, with the candidate's own
lines. `blame` decides whether a failure at rung 0 of the build ladder (thin headers) can only be
the candidate's own. It looks at the first error of a file alone, because later ones may follow from
it, and it says yes only for three kinds: bad syntax, plain C types that do not fit, and names that
the stock headers could not have declared. For the last kind `read_stock_names` lists, once per
torch, what those headers contain. "No" costs a slow build with the stock headers; a wrong "yes"
would be a wrong verdict, so anything unknown is a no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ERROR_CHARACTERS = 1200


# ---- compiler messages --------------------------------------------------------------------------

_GCC = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$")
_GCC_COLUMN = re.compile(r"^[^:\n]+:\d+:(\d+):")
_EDG = re.compile(
    r"^(?P<file>[^(\n]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<text>.*)$"
)
_UNBOUND = re.compile(r"'(\w+)' was not declared in this scope.*")
_REQUIRED = re.compile(r"^(kernel\.(?:cpp|cu)):(\d+):(\d+): +required from here")
_TOOL = re.compile(
    r"^(ptxas (?:error|fatal)|nvlink error|nvcc (?:error|fatal)"
    r"|(?:cc1plus|g\+\+|c\+\+|as): .*error)"
)
_LINKER = re.compile(r"(?:undefined reference to|multiple definition of) ['`].*")


@dataclass(frozen=True)
class Diagnostic:
    """One error of a compiler."""

    # "kernel.cpp", "kernel.cu", "bindings", the last part of a header's path, or "" (ptxas, linker)
    file: str
    line: int  # 0 when there is none
    column: int  # 0 when there is none
    text: str


def diagnostics(output: str) -> list[Diagnostic]:
    """The errors in the output of g++, nvcc, ptxas or the linker, in order, with paths cut to their
    last part.

    An error inside a header is moved to the candidate's line that made the compiler go there, where
    that is known.
    """
    found = []
    required: tuple[str, int, int] | None = None
    for raw in output.splitlines():
        here = _REQUIRED.match(raw)
        if here:
            required = (here.group(1), int(here.group(2)), int(here.group(3)))
            continue
        match = _GCC.match(raw) or _EDG.match(raw)
        if match:
            file, line = _short(match["file"]), int(match["line"])
            column = _GCC_COLUMN.match(raw)
            place = (file, line, int(column.group(1)) if column else 0)
            if required and not file.startswith(("kernel.", "bindings")):
                place = required
            text = clean(match["text"])
            if "'namespace' definition is not allowed here" in text:
                text = UNCLOSED  # the builder puts a namespace after the candidate's last line
            if file == "bindings" and (unknown := _UNBOUND.fullmatch(text)):
                text = f"functions asks for {unknown[1]!r}, which cpp_sources does not declare"
            found.append(Diagnostic(*place, text))
            required = None
        elif _TOOL.match(raw):
            found.append(Diagnostic("", 0, 0, clean(raw)))
        elif linked := _LINKER.search(raw):
            found.append(Diagnostic("", 0, 0, clean(linked.group(0))))
    return found


def _short(path: str) -> str:
    return path.strip().rsplit("/", 1)[-1]


def clean(text: str) -> str:
    """Without paths and warning switches; plain quotes, whatever the locale."""
    text = text.replace("\u2018", "'").replace("\u2019", "'")
    text = re.sub(r"(?<![\w<\"'])(/[\w.+\-]+)+/", "", text)
    text = re.sub(r" \[-[\w\-=+]+\]$", "", text)
    return re.sub(r"tmpxft_\w+[.\-\w]*", "kernel.cu", text).strip()


def report(
    errors: Sequence[Diagnostic], output: str, sources: Mapping[str, str], limit: int = 3
) -> str:
    """The first errors with their source lines, for the model: deterministic, at most
    ERROR_CHARACTERS."""
    lines = []
    for error in errors[:limit]:
        column = f"{error.column}:" if error.column else ""
        place = f"{error.file}:{error.line}:{column} error: " if error.file in sources else ""
        lines.append(place + error.text[:400])
        text = sources[error.file].split("\n") if error.file in sources else []
        if 0 < error.line <= len(text):
            lines.append(f"{error.line:5d} | {text[error.line - 1].rstrip()[:160]}")
    if not lines:
        lines = [clean(line)[:300] for line in output.splitlines() if line.strip()][:4] or [
            "the compiler failed"
        ]
    if len(errors) > limit:
        lines.append(f"({len(errors) - limit} more errors)")
    return "\n".join(lines)[:ERROR_CHARACTERS]


# ---- whose error is it? -------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """What the stock headers declare, as far as `blame` needs it; what the facade defines
    itself."""

    anywhere: frozenset[str]  # every identifier and macro
    outermost: frozenset[
        str
    ]  # identifiers at global scope (not inside a namespace, class or body) and macros
    macros: frozenset[str]
    facade_macros: frozenset[str]  # macros that the thin headers define too
    headers: frozenset[str]  # files that #include <...> would find below torch's include folders


_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|[A-Za-z_]\w*|[{}();*]')


def read_stock_names(preprocessed: str) -> dict[str, list[str]]:
    """{"anywhere", "outermost", "macros"} of the output of `g++ -E -dD` on the stock header."""
    macros = set(re.findall(r"^#define (\w+)", preprocessed, re.M))
    body = re.sub(r"^#.*$", "", preprocessed, flags=re.M)
    anywhere: set[str] = set()
    outermost: set[str] = set()
    stack: list[
        bool
    ] = []  # one entry per open brace: does it hide its names from the global scope?
    hidden = parens = 0
    head: list[str] = []  # tokens since the last ; { or } at this level
    for token in _TOKEN.findall(body):
        if token == "{":
            opaque = not (
                head[:1] == ["extern"]
                and len(head) == 2
                or ("enum" in head and "class" not in head)
            )
            stack.append(opaque)
            hidden += opaque
            head = []
        elif token == "}":
            hidden -= stack.pop() if stack else 0
            head = []
        elif token == ";":
            head = []
        elif token in "()":
            parens = max(0, parens + (1 if token == "(" else -1))
            head.append(token)
        else:
            if token[0].isalpha() or token[0] == "_":
                anywhere.add(token)
                if not hidden and (not parens or head[-2:] == ["(", "*"]):
                    outermost.add(token)
            head.append(token)
    return {
        "anywhere": sorted(anywhere | macros),
        "outermost": sorted(outermost | macros),
        "macros": sorted(macros),
    }


UNCLOSED = "'}' is missing: a brace is not closed"
_BUILTIN = (
    r"(?:const |volatile |unsigned |signed |long |short |int|char|float|double|bool|void"
    r"|\*|&|\s|\[\d*\])+"
)
_SURE = [  # about the candidate's own names and plain C types; g++ first, then nvcc's front end
    rf"(invalid )?conversion from '{_BUILTIN}' to (non-scalar type )?'{_BUILTIN}'.*",
    rf"invalid conversion from '{_BUILTIN}' to '{_BUILTIN}'.*",
    rf"cannot convert '{_BUILTIN}' to '{_BUILTIN}'.*",
    rf"invalid operands of types '{_BUILTIN}' and '{_BUILTIN}' to binary '.*",
    rf"invalid type argument of unary '\*' \(have '{_BUILTIN}'\)",
    rf"invalid types '{_BUILTIN}\[{_BUILTIN}\]' for array subscript",
    r"assignment of read-only (location|variable) .*",
    r"(lvalue required as .*|break statement not within .*|continue statement not within .*)",
    r"'else' without a previous 'if'",
    r"(unterminated|missing terminating) .*",
    rf'a value of type "{_BUILTIN}" cannot be used to initialize an entity of type "{_BUILTIN}"',
    rf'a value of type "{_BUILTIN}" cannot be assigned to an entity of type "{_BUILTIN}"',
    rf'argument of type "{_BUILTIN}" is incompatible with parameter of type "{_BUILTIN}"',
    r'"\w+" has already been declared in the current scope',
    r"expression must be a modifiable lvalue",
    r"a break statement may only be used within .*",
    rf"cannot convert '(const )?at::Tensor' to '{_BUILTIN}'.*",
    r"'(class|struct) std::(?!.*(at|c10|torch)::).*' has no member named '\w+'.*",
    UNCLOSED,
]
_SYNTAX = [
    r"(expected .*|.* expected before .*)",
    r"stray '.*' in program",
    r"missing binary operator .*",
    r"this declaration has no storage class or type specifier",
    r"unrecognized token",
    r"missing closing quote",
    r"unterminated .*",
    r"invalid preprocessing directive .*",
    r"(unterminated|missing) (#if|#endif|argument list).*",
    r"#(else|endif|elif) without #if",
    r"too many decimal points in number",
    r"unable to find numeric literal operator .*",
    r"identifier .* not allowed here",
    r"template instantiation depth exceeds .*",
    r"a function-definition is not allowed here .*",
    r"(redeclaration of|conflicting declaration) '.*'",
    r"invalid use of '(this|void)'.*",
    r"return-statement with (no value|a value), in function .*",
]


def blame(errors: Sequence[Diagnostic], sources: Mapping[str, str], names: Names | None) -> bool:
    """True when the first error can only be the candidate's own, so that the stock headers would
    fail too.

    Only the first error of a file is looked at: later ones may follow from something that the
    facade lacks.
    """
    if names is None or not errors:
        return False
    error = errors[0]
    if not error.file:
        return error.text.startswith(("ptxas", "nvlink error"))
    if error.file == "bindings":
        text = sources.get("kernel.cpp", "")
    elif error.file in sources:
        text = sources[error.file]
    else:
        return False
    return _sure(error, text, names)


_NO_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"", re.S)


def _sure(error: Diagnostic, source: str, names: Names) -> bool:
    words = set(re.findall(r"[A-Za-z_]\w*", _NO_CODE.sub(" ", source)))
    unknown_macros = {
        word
        for word in (words & names.macros) - names.facade_macros
        if not _COMMON_MACROS.fullmatch(word)
    }
    lines = source.split("\n")
    line = (
        lines[error.line - 1] if 0 < error.line <= len(lines) and error.file != "bindings" else ""
    )
    if "redefinition of 'void kv_module_" in error.text:
        return True  # two PYBIND11_MODULE for one module
    unbound = re.fullmatch(r"functions asks for '(\w+)', which .*", error.text)
    if unbound:
        return unbound[1] not in names.outermost and not _OPENED.search(source)
    if any(re.fullmatch(p, error.text) for p in _SYNTAX):
        return not unknown_macros
    if any(re.fullmatch(p, error.text) for p in _SURE):
        return not unknown_macros and "auto" not in line
    if error.text.endswith(": Permission denied"):
        return True  # an include of a file that no compiler may read here
    missing = re.fullmatch(
        r'(?:(\S+): No such file or directory|cannot open source file "([^"]+)")', error.text
    )
    if missing:
        return (missing.group(1) or missing.group(2)) not in names.headers and "/" in error.text
    return _sure_name(error.text, line, source, names)


_COMMON_MACROS = re.compile(  # of the C library: the same at every rung
    r"M_\w+|\w+_(MAX|MIN|EPSILON|DIG)|INFINITY|NAN|NULL|EOF|HUGE_VALF?|assert|offsetof|alloca|errno"
    r"|is(nan|inf|finite|normal|less|greater)\w*|signbit|fpclassify|std(in|out|err)|va_\w+"
)
_OPENED = re.compile(r"\busing\s+(namespace\s+)?(std|at|torch|c10|pybind11|caffe2)\b")
_UNDECLARED = [
    r"'(?P<n>\w+)' was not declared in this scope.*",
    r"'(?P<n>\w+)' does not name a type.*",
    r"'(?P<n>\w+)' has not been declared",
    r'identifier "(?P<n>\w+)" is undefined',
]
_NO_MEMBER = [
    r"'(?P<n>\w+)' is not a member of '[\w:]*'.*",
    r"'[\w: ]*' has no member named '(?P<n>\w+)'.*",
    r'(?:class|struct|namespace) "[\w:]*" has no member "(?P<n>\w+)"',
]


def _sure_name(text: str, line: str, source: str, names: Names) -> bool:
    """Undeclared names: sure when the stock headers could not have declared them either."""
    for pattern in _NO_MEMBER:
        match = re.fullmatch(pattern, text)
        if match:
            return match["n"] not in names.anywhere and not match["n"].startswith("kv")
    for pattern in _UNDECLARED:
        match = re.fullmatch(pattern, text)
        if not match:
            continue
        name = match["n"]
        if name.startswith(("kv", "cu", "Cu", "CU", "__", "_mm")):
            return False
        if name not in names.anywhere:
            return True
        called = re.search(rf"\b{name}\s*[<{{(]", line)
        if called and not _plain_arguments(line, name, source, names):
            return False  # the types of its arguments may bring in a namespace of torch
        qualified = re.search(rf"::\s*{name}\b", line)
        return name not in names.outermost and not (qualified or _OPENED.search(source))
    return False


_PLAIN_TYPE = r"(?:float|double|int|long|short|char|unsigned|bool|size_t|u?int(?:8|16|32|64)_t)"
_KEYWORDS = "return else const constexpr static case in goto throw typename __restrict__ restrict"


def _plain_arguments(line: str, name: str, source: str, names: Names) -> bool:
    """Are the arguments of the call of `name` numbers, or variables that `source` declares with
    plain C types and no other? Then argument-dependent lookup finds nothing."""
    call = re.search(rf"\b{name}\s*\(([^;]*)", line)
    if not call:
        return False
    inside, depth = "", 1
    for c in call[1]:
        depth += (c == "(") - (c == ")")
        if depth == 0:
            break
        inside += c
    if re.search(r"[\"'{}<>:]|->|\.\s*[A-Za-z_]", inside):
        return False
    for word in set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", inside)):
        if (
            re.fullmatch(_PLAIN_TYPE, word)
            or word in names.outermost
            and re.search(rf"{word}\(", inside)
        ):
            continue
        plain = re.search(rf"\b{_PLAIN_TYPE}\b[\w\s*&,=\[\].+\-]*[\s*&,]{word}\b", source)
        types = set(re.findall(rf"([A-Za-z_>][\w:>]*)[\s*&]+{word}\b(?!\s*\()", source))
        other = {t for t in types if not re.fullmatch(_PLAIN_TYPE, t)} - set(_KEYWORDS.split())
        if not plain or other:
            return False
    return True
