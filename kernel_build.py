"""Source in, shared object out: the compile ladder and its content-hash cache.

Theory of operation. A stock `torch.utils.cpp_extension.load_inline` spends tens of seconds on
torch's headers and on pybind11. Here an answer climbs a ladder instead:

  rung 0  thin headers of our own (`facade/include`) with a `torch::Tensor` that is a handle into a
          shim (`facade/shim.cpp`), one Python extension built once per torch and compiler. The
          candidate's object links nothing of torch.
  rung 2  the stock headers, with the command line that `load_inline` would have used.
  (rung 1, lean ATen headers, is not used; the number is kept free.)

Each rung passes the candidate's code the same compiler flags, so what compiles at rung 0 computes
the same bits. What rung 0 cannot compile goes to rung 2, whose verdict counts; unless the
compiler's *first* error can only be the candidate's own (`blame`): a syntax error, an identifier
that occurs nowhere in torch's headers, and the like. Then rung 2 would fail too, and the error is
reported at once. What the stock headers declare is read off them once, when the shim is built
(`read_stock_names`). When in doubt: rung 2. A slow build is no fault, a wrong error is.

Headers of the standard library cost more than the facade, so those that the stock headers would
have brought along are included only when the source mentions a name from them (`std_headers`).

A build is a set of compiler processes, each limited and in its own process group, in a private
folder, and able to read only compilers and headers. Results, also failed ones, are kept under a key
that covers all that went in, written by atomic rename under a lock, so that many processes may
build the same thing and it is compiled once. Everything here runs on the trusted side and does not
import torch; only `install_loader` and `load_built` are for the process that runs the candidate.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import inspect
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import compile_errors
import confinement
from compile_errors import Names, blame, clean, diagnostics, read_stock_names, report

logger = logging.getLogger(__name__)

FACADE = Path(__file__).resolve().parent / "facade"
LADDER_VERSION = 1  # raise when an old cached build must not be used any more
CACHE_BYTES = 4 << 30
CACHE_GRACE_S = 600.0  # an entry used this recently is never evicted


# ---- what is asked for, what comes back ---------------------------------------------------------


@dataclass(frozen=True)
class BuildRequest:
    """One `load_inline` call."""

    name: str  # module name, a C identifier
    cpp_sources: tuple[str, ...]  # C++ strings, in order
    cuda_sources: tuple[str, ...] = ()  # CUDA strings, in order
    functions: tuple[tuple[str, str], ...] | None = None  # (name, doc) to bind; None: bound by hand
    extra_cflags: tuple[str, ...] = ()  # for g++
    extra_cuda_cflags: tuple[str, ...] = ()  # for nvcc
    extra_ldflags: tuple[str, ...] = ()  # for the linker
    extra_include_paths: tuple[str, ...] = ()  # refused unless inside the CUDA toolkit
    with_cuda: bool = False  # CUDA headers and runtime
    no_implicit_headers: bool = False  # the sources include what they need themselves
    is_python_module: bool = True  # False: registers operators when loaded (TORCH_LIBRARY)

    @classmethod
    def from_load_inline(  # same parameters, same order as torch.utils.cpp_extension.load_inline
        cls,
        name: str,
        cpp_sources: str | Sequence[str],
        cuda_sources: str | Sequence[str] | None = None,
        sycl_sources: str | Sequence[str] | None = None,
        functions: str | Sequence[str] | Mapping[str, str] | None = None,
        extra_cflags: Sequence[str] | None = None,
        extra_cuda_cflags: Sequence[str] | None = None,
        extra_sycl_cflags: Sequence[str] | None = None,
        extra_ldflags: Sequence[str] | None = None,
        extra_include_paths: Sequence[str] | None = None,
        build_directory: str | None = None,
        verbose: bool = False,
        with_cuda: bool | None = None,
        with_sycl: bool | None = None,
        is_python_module: bool = True,
        with_pytorch_error_handling: bool = True,
        keep_intermediates: bool = True,
        use_pch: bool = False,
        no_implicit_headers: bool = False,
    ) -> BuildRequest:
        """The request that this call of `load_inline` makes. TypeError/ValueError as there for
        wrong arguments."""
        if sycl_sources or with_sycl:
            raise ValueError("SYCL is not supported here")
        cuda = _texts("cuda_sources", cuda_sources)
        return cls(
            name=_text("name", name),
            cpp_sources=_texts("cpp_sources", cpp_sources),
            cuda_sources=cuda,
            functions=_functions(functions),
            extra_cflags=_texts("extra_cflags", extra_cflags),
            extra_cuda_cflags=_texts("extra_cuda_cflags", extra_cuda_cflags),
            extra_ldflags=_texts("extra_ldflags", extra_ldflags),
            extra_include_paths=_texts("extra_include_paths", extra_include_paths),
            with_cuda=bool(cuda) or bool(with_cuda),
            no_implicit_headers=bool(no_implicit_headers),
            is_python_module=bool(is_python_module),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for a pipe between processes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BuildRequest:
        """Back from `to_dict` (after JSON). TypeError/ValueError/KeyError when it is not such a
        dict: the sender may be hostile, so types are checked."""
        functions = data["functions"]
        return cls(
            name=_text("name", data["name"]),
            functions=None
            if functions is None
            else tuple((_text("functions", n), _text("functions", d)) for n, d in functions),
            with_cuda=bool(data["with_cuda"]),
            no_implicit_headers=bool(data["no_implicit_headers"]),
            is_python_module=bool(data["is_python_module"]),
            **{
                field: _texts(field, data[field])
                for field in (
                    "cpp_sources",
                    "cuda_sources",
                    "extra_cflags",
                    "extra_cuda_cflags",
                    "extra_ldflags",
                    "extra_include_paths",
                )
            },
        )

    def key(self, *context: str) -> str:
        """Content hash (hex) of the request and of everything in `context` (compiler, torch, arch,
        ...)."""
        return _hash(json.dumps(self.to_dict(), sort_keys=True), *context)


@dataclass(frozen=True)
class BuildResult:
    """What a build came to. `ok` False with no `harness_error` is the candidate's fault."""

    ok: bool
    path: str | None = None  # the shared object
    kind: str = (
        "facade"  # how to load it: "facade" through the shim, "pybind" as a Python extension
    )
    rung: int = 0  # 0 facade, 1 lean ATen, 2 stock: the rung that decided
    cached: bool = False
    seconds: float = 0.0  # wall time of this call of build()
    error: str = ""  # compiler's message against the candidate's own lines; deterministic, no paths
    timed_out: bool = False
    harness_error: str = ""  # "" unless the fault is ours: no compiler, disk full, shim broken


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string, not {type(value).__name__}")
    return value


def _texts(what: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise TypeError(f"{what} must be a string or a list of strings, not {type(value).__name__}")
    return tuple(_text(what, v) for v in value)


def _functions(value: Any) -> tuple[tuple[str, str], ...] | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return tuple((_text("functions", k), _text("functions", v)) for k, v in value.items())
    return tuple((name, name) for name in _texts("functions", value))


def _hash(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


# ---- reading the calls of load_inline out of an answer ------------------------------------------


class _Unknown(Exception):
    """A value that is not known without running the code."""


def extract_requests(code: str) -> list[BuildRequest] | None:
    """Every `load_inline` call of a Python answer, when all of them have arguments known without
    running it.

    Known are literals, module-level names assigned once, +, *, f-strings, `.strip()`-like methods,
    lists, tuples and dicts of those. None when some call is not known (or the code does not parse):
    the process that runs the answer then reports what it asks for.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    known = _constants(tree)
    requests = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _called(node.func, tree) != "load_inline":
            continue
        try:
            requests.append(_request(node, known))
        except (_Unknown, TypeError, ValueError, RecursionError):
            return None
    return requests


def _called(func: ast.expr, tree: ast.Module) -> str:
    """Last part of the name of what is called, aliases of `from ... import load_inline as x`
    resolved."""
    if isinstance(func, ast.Attribute):
        return func.attr
    if not isinstance(func, ast.Name):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.asname == func.id:
                    return alias.name
    return func.id


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Module-level names that are assigned exactly once anywhere in the file, with known values."""
    stores: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stores[node.id] = stores.get(node.id, 0) + 1
        elif isinstance(node, ast.arg):
            stores[node.arg] = stores.get(node.arg, 0) + 1
    known: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        if isinstance(target, ast.Name) and stores[target.id] == 1:
            with contextlib.suppress(_Unknown, TypeError, ValueError, RecursionError):
                known[target.id] = _value(value, known)
    return known


_METHODS = {"strip", "lstrip", "rstrip", "replace", "join", "upper", "lower", "format"}


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:  # noqa: C901 - one case per syntax
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(e, known) for e in node.elts]
    if isinstance(node, ast.Dict) and all(k is not None for k in node.keys):
        keys = [_value(k, known) for k in node.keys if k is not None]
        return dict(zip(keys, (_value(v, known) for v in node.values), strict=True))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _value(node.left, known) + _value(node.right, known)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(_value(v, known)) for v in node.values)
    if isinstance(node, ast.FormattedValue) and node.conversion == -1:
        spec = _value(node.format_spec, known) if node.format_spec else ""
        return format(_value(node.value, known), spec)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _METHODS
        and not any(k.arg is None for k in node.keywords)
    ):
        owner = _value(node.func.value, known)
        arguments = [_value(a, known) for a in node.args]
        named = {str(k.arg): _value(k.value, known) for k in node.keywords}
        if isinstance(owner, str) and all(isinstance(a, str | list) for a in arguments):
            return getattr(owner, node.func.attr)(*arguments, **named)
    raise _Unknown


_IGNORED = {
    "verbose",
    "build_directory",
    "keep_intermediates",
    "use_pch",
}  # nothing about the result


def _request(node: ast.Call, known: Mapping[str, Any]) -> BuildRequest:
    keywords = {}
    for k in node.keywords:
        if k.arg is None:
            raise _Unknown
        if k.arg not in _IGNORED:
            keywords[k.arg] = _value(k.value, known)
    return BuildRequest.from_load_inline(*[_value(a, known) for a in node.args], **keywords)


# ---- the machine's compilers --------------------------------------------------------------------


class ToolchainError(Exception):
    """A compiler, torch or the like is missing; the text says what to install."""


@dataclass(frozen=True)
class Toolchain:
    """Compilers and the flags that stock `load_inline` of the installed torch would pass."""

    torch_dir: Path
    torch_version: str
    cxx: str  # absolute path of the C++ compiler
    cxx_version: str
    std: str  # "-std=c++20"
    python_include: str
    nvcc: str  # absolute path, "" without CUDA
    nvcc_version: str
    cuda_home: Path | None
    nvcc_flags: tuple[str, ...]  # torch's own for every .cu file
    arch_flags: tuple[str, ...]  # -gencode=... of the GPUs here
    dispatch_on_type: bool  # AT_DISPATCH_*(x.type(), ...) compiles with these headers

    def identity(self, cuda: bool) -> str:
        """Everything about the machine that a build's result depends on."""
        host = [self.shim_identity, _facade_hash(), _cpu()]
        device = [self.nvcc, self.nvcc_version, *self.nvcc_flags, *self.arch_flags] if cuda else []
        return "\n".join(host + device)

    @property
    def readable(self) -> list[str]:
        """What a compiler may read."""
        paths = ["/usr", "/lib", "/lib64", "/bin", "/opt", "/etc/alternatives", "/etc/ld.so.cache"]
        paths += ["/dev/null", "/dev/urandom", "/proc", "/sys/devices/system/cpu"]
        paths += [str(self.torch_dir), self.python_include, str(FACADE)]
        paths += [str(Path(self.cxx).resolve().parent.parent)]
        return paths + ([str(self.cuda_home)] if self.cuda_home else [])

    @property
    def shim_identity(self) -> str:
        """What the shim and the list of stock names depend on."""
        parts = [self.torch_version, str(self.torch_dir), self.cxx, self.cxx_version, self.std]
        parts += [sysconfig.get_config_var("SOABI") or "", str(LADDER_VERSION)]
        parts += [(FACADE / "shim.cpp").read_text(), (FACADE / "include/kv/abi.h").read_text()]
        return "\n".join((*parts, inspect.getsource(read_stock_names)))

    @property
    def torch_includes(self) -> list[str]:
        include = self.torch_dir / "include"
        return [str(include), str(include / "torch" / "csrc" / "api" / "include")]


@lru_cache(maxsize=1)
def _facade_hash() -> str:
    files = sorted(p for p in FACADE.rglob("*") if p.is_file())
    files += [Path(__file__), Path(compile_errors.__file__)]
    return _hash(*(f"{p.name}\n{p.read_text()}" for p in files))


def _facade_macros() -> frozenset[str]:
    text = "\n".join(p.read_text() for p in (FACADE / "include").rglob("*.h"))
    return frozenset(re.findall(r"#[ \t]*define[ \t]+(\w+)", text))


@lru_cache(maxsize=1)
def _cpu() -> str:
    """The CPU's feature flags: -march=native means something else on another machine."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return _hash(line)
    return ""


@lru_cache(maxsize=2)
def toolchain(target: str) -> Toolchain:
    """Looks at the machine. ToolchainError with what to install, when something for `target` is
    missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ToolchainError("torch is not installed: pip install -r requirements.txt")
    torch_dir = Path(spec.submodule_search_locations[0])
    version = re.search(r"^__version__ = '([^']+)'", (torch_dir / "version.py").read_text(), re.M)
    cxx = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if not cxx:
        raise ToolchainError("no C++ compiler found: install g++ (e.g. apt install g++) or set CXX")
    cuda_home = _cuda_home() if target == "cuda" else None
    if target == "cuda" and cuda_home is None:
        raise ToolchainError(
            "nvcc not found: install the CUDA toolkit (nvcc) or set CUDA_HOME, or use --target cpp"
        )
    nvcc = str(cuda_home / "bin" / "nvcc") if cuda_home else ""
    std, nvcc_flags = _stock_flags((torch_dir / "utils" / "cpp_extension.py").read_text())
    return Toolchain(
        torch_dir=torch_dir,
        torch_version=version.group(1) if version else "",
        cxx=cxx,
        cxx_version=_output([cxx, "--version"]),
        std=std,
        python_include=sysconfig.get_path("include", scheme="posix_prefix"),
        nvcc=nvcc,
        nvcc_version=_output([nvcc, "--version"]) if nvcc else "",
        cuda_home=cuda_home,
        nvcc_flags=nvcc_flags,
        arch_flags=_arch_flags() if nvcc else (),
        dispatch_on_type=_dispatches_on_type(torch_dir / "include"),
    )


def _cuda_home() -> Path | None:
    found = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places += [str(Path(found).resolve().parent.parent)] if found else []
    places += ["/usr/local/cuda"]
    for place in places:
        if (
            place
            and (Path(place) / "bin" / "nvcc").exists()
            and (Path(place) / "include" / "cuda_runtime.h").exists()
        ):
            return Path(place)
    return None


def _stock_flags(cpp_extension: str) -> tuple[str, tuple[str, ...]]:
    """(-std flag, flags for every .cu file) as the installed cpp_extension.py passes them."""
    std = re.search(r"common_cflags \+ \['-fPIC', '(-std=[^']+)'\]", cpp_extension)
    block = re.search(r"^COMMON_NVCC_FLAGS = \[(.*?)\]", cpp_extension, re.M | re.S)
    flags = tuple(re.findall(r"'([^']+)'", block.group(1))) if block else ()
    return (std.group(1) if std else "-std=c++17"), flags


def _dispatches_on_type(include: Path) -> bool:
    for name in ("ATen/Dispatch.h", "torch/headeronly/core/Dispatch.h"):
        with contextlib.suppress(OSError):
            if re.search(
                r"scalar_type\(\s*const at::DeprecatedTypeProperties", (include / name).read_text()
            ):
                return True
    return False


def _arch_flags() -> tuple[str, ...]:
    """-gencode flags as torch would choose: TORCH_CUDA_ARCH_LIST, else the GPUs here, else
    sm_90."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not listed or listed == ["native"]:
        capabilities = set(
            _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()
        )
        listed = sorted(c for c in capabilities if re.fullmatch(r"\d+\.\d+", c)) or ["9.0"]
        listed[-1] += "+PTX"
    flags = []
    for arch in listed:
        number = arch.split("+")[0].replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return tuple(flags)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# ---- flags that an answer may choose ------------------------------------------------------------

_HOST_FLAGS = [
    r"-O([0-3sgz]|fast)?",
    r"-g[0-3]?",
    r"-(ansi|pedantic|pipe|pthread|w)",
    r"-std=(c|gnu)\+\+\w+",
    r"-D\s*[A-Za-z_]\w*(=[\w.+\-*/() ]*)?",
    r"-U\s*[A-Za-z_]\w*",
    r"-W(?![lpa],)[a-zA-Z0-9+=\-]*",
    r"-m[\w.+=\-]+",
    r"-f(?!plugin|profile|dump|auto-profile|diagnostics|opt-info|preprocessed|directives-only|pch|working-directory"
    r"|file-prefix|debug-prefix|macro-prefix|stack-usage|callgraph|compare-debug|checking|module|syntax-only"
    r"|use-ld|use-linker|wrapper|sanitize|self-test|save-optimization)[a-z0-9\-]+(=[a-z0-9.\-]+)?",
]
_LINK_FLAGS = [
    r"-l(gomp|m|pthread|dl|rt|stdc\+\+|cudart|cuda|nvrtc|cublas|cublasLt|curand|cufft|cusparse|cusolver|cudnn)",
    r"-fopenmp",
    r"-pthread",
    r"-O[0-3]",
    r"-Wl,(--no-as-needed|--as-needed|-O[0-3]|--gc-sections)",
]
_ARCH = r"(sm|compute|lto)_\d+[af]?"
_CUDA_FLAGS = [
    *_HOST_FLAGS,
    *_LINK_FLAGS,
    r"--?use_fast_math",
    r"--?(lineinfo|generate-line-info|extended-lambda|expt-extended-lambda|expt-relaxed-constexpr|restrict)",
    r"--?(resource-usage|ptxas-warnings|device-debug|disable-warnings|time-placeholder)",
    r"--?(ftz|prec-div|prec-sqrt|fmad|extra-device-vectorization)=(true|false)",
    r"--?(maxrregcount|threads|t|split-compile|Ofast-compile)[= ]?\w+",
    r"--?(rdc|relocatable-device-code)=(true|false)",
    r"--?default-stream[= ](legacy|null|per-thread)",
    r"--?(arch|gpu-architecture)[= ](native|all|all-major|" + _ARCH + ")",
    r"--?(code|gpu-code)[= ]" + _ARCH,
    r"--?(gencode|generate-code)[= ]?arch=" + _ARCH + r",code=(\[?" + _ARCH + r",?\]?)+",
    r"--?(diag-suppress|diag_suppress)[= ][\d,]+",
    r"(-Xcudafe|--cudafe-options)[= ]-{1,2}(diag_suppress=[\w,]+|display_error_number)",
    r"(-Xptxas|--ptxas-options)[= ](,?-{0,2}(O[0-4]|v|warn-[\w\-]+|dlcm=\w+|dscm=\w+"
    r"|allow-expensive-optimizations(=\w+)?|opt-level[= ]\d|maxrregcount[= ]\d+|verbose"
    r"|fmad=\w+|def-(load|store)-cache=\w+))+",
    r"--dopt[= ]on",
    r"--std[= ](c|gnu)\+\+\w+",
]
_PAIRED = {
    "-Xcompiler",
    "--compiler-options",
    "-Xptxas",
    "--ptxas-options",
    "-Xcudafe",
    "--cudafe-options",
}
_PAIRED |= {
    "-arch",
    "--gpu-architecture",
    "-code",
    "-gencode",
    "--generate-code",
    "--threads",
    "-t",
    "-D",
    "-U",
}
_PAIRED |= {
    "-maxrregcount",
    "--maxrregcount",
    "-diag-suppress",
    "--diag-suppress",
    "--default-stream",
    "--std",
}


def _split(flags: Sequence[str]) -> list[str]:
    """As the shell would split what load_inline joins. ValueError on unbalanced quotes."""
    return [word for flag in flags for word in shlex.split(flag)]


def _allowed(words: Sequence[str], patterns: Sequence[str]) -> str:
    """ "" when every flag is allowed, else the first that is not."""
    i = 0
    while i < len(words):
        word = words[i]
        if word in _PAIRED and i + 1 < len(words):
            word, i = f"{word} {words[i + 1]}", i + 1
        i += 1
        host = re.fullmatch(r"(?:-Xcompiler|--compiler-options)[= ](.*)", word, re.S)
        if host and patterns is _CUDA_FLAGS:
            bad = _allowed(
                [w for part in _split([host.group(1)]) for w in part.split(",")], _HOST_FLAGS
            )
            if bad:
                return bad
        elif not any(re.fullmatch(p, word) for p in patterns):
            return word
    return ""


def check_request(request: BuildRequest, target: str, cuda_home: Path | None) -> str:
    """What in the request is not allowed, as one line for the model, or ""."""
    if not re.fullmatch(r"[A-Za-z_]\w*", request.name, re.A):
        return "load_inline: name must be a C identifier"
    if target == "cpp" and (request.cuda_sources or request.with_cuda):
        return (
            "load_inline: cuda_sources are not supported on this machine; write C++ in cpp_sources"
        )
    for function, _ in request.functions or ():
        if not re.fullmatch(r"[A-Za-z_][\w:]*", function, re.A):
            return "load_inline: functions must hold names of C++ functions"
    for what, flags, patterns in (
        ("extra_cflags", request.extra_cflags, _HOST_FLAGS),
        ("extra_cuda_cflags", request.extra_cuda_cflags, _CUDA_FLAGS),
        ("extra_ldflags", request.extra_ldflags, _LINK_FLAGS),
    ):
        try:
            bad = _allowed(_split(flags), patterns)
        except ValueError:
            return f"load_inline: unbalanced quotes in {what}"
        if bad:
            return f"load_inline: flag {bad[:80]!r} in {what} is not allowed"
    for path in request.extra_include_paths:
        if cuda_home is None or not Path(os.path.realpath(path)).is_relative_to(
            cuda_home.resolve()
        ):
            return "load_inline: extra_include_paths are not allowed"
    return ""


# ---- what the compiler is given -----------------------------------------------------------------

# Header that the stock headers bring along: names of std:: (or of the C library) in it.
_STD = """
vector: vector
string: string to_string stoi stof stod getline string_view
optional: optional nullopt make_optional nullopt_t
tuple: tuple make_tuple tie get apply forward_as_tuple tuple_size tuple_element
algorithm: min max sort fill fill_n copy copy_n swap_ranges clamp minmax max_element min_element
    transform reverse all_of any_of none_of find find_if nth_element partial_sort stable_sort
    lower_bound upper_bound for_each count count_if generate unique rotate equal shuffle
    remove_if partition heap_sort push_heap pop_heap
numeric: accumulate inner_product iota partial_sum reduce transform_reduce gcd lcm midpoint
limits: numeric_limits
stdexcept: runtime_error invalid_argument logic_error out_of_range domain_error length_error
    overflow_error
memory: unique_ptr shared_ptr make_unique make_shared weak_ptr align
functional: function bind ref cref plus less greater multiplies hash
array: array to_array
atomic: atomic atomic_flag memory_order memory_order_relaxed atomic_thread_fence
thread: thread this_thread
mutex: mutex lock_guard unique_lock once_flag call_once scoped_lock
iostream: cout cerr endl clog cin
sstream: stringstream ostringstream istringstream
map: map multimap
unordered_map: unordered_map
set: set multiset
unordered_set: unordered_set
complex: complex
chrono: chrono
bit: bit_cast popcount countl_zero countr_zero has_single_bit bit_ceil
utility: pair make_pair move forward swap exchange declval integer_sequence index_sequence
    make_index_sequence
cstddef: size_t ptrdiff_t nullptr_t byte
cstdint: int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uintptr_t intptr_t
cstring: memcpy memset memmove strlen memcmp strcmp strncpy
exception: exception exception_ptr current_exception rethrow_exception terminate
type_traits: conditional conditional_t enable_if enable_if_t is_same is_same_v is_integral
    is_floating_point decay_t is_floating_point_v is_integral_v remove_reference_t void_t
    true_type false_type
initializer_list: initializer_list
cstdlib: malloc free aligned_alloc abort exit getenv calloc qsort rand srand
cstdio: printf fprintf snprintf fflush
cassert: assert
queue: queue priority_queue
deque: deque
list: list
random: mt19937 uniform_real_distribution normal_distribution random_device
bitset: bitset
iterator: iterator back_inserter distance advance next prev make_move_iterator
variant: variant visit monostate
any: any any_cast
cmath: nan
"""
_HEADER = {
    name: header
    for header, names in re.findall(r"^(\w+): ((?:.|\n(?=    ))*)$", _STD, re.M)
    for name in names.split()
}
_MATH = re.compile(
    r"\b(?:std::)?(?:a?(?:sin|cos|tan)h?|atan2|exp2?|expm1|log(?:2|10|1p|b)?|pow|sqrt|cbrt|hypot|erfc?|[tl]gamma|ceil"
    r"|floor|l?l?round|trunc|l?l?rint|nearbyint|fmod|remainder|fabs|abs|fmax|fmin|fma|fdim|isnan|isinf|isfinite|signbit"
    r"|copysign|ldexp|frexp|modf|scalbn|nextafter|M_\w+|INFINITY|NAN|HUGE_VALF?)[fl]?\b"
)
_EVERYTHING = sorted(set(_HEADER.values()) | {"math.h", "climits", "cfloat"})


def std_headers(source: str) -> list[str]:
    """Standard headers that the stock headers bring along and `source` counts on, by the names it
    mentions.

    Overloads depend on headers (`exp(float)` without <math.h> is the one for double), so
    mathematics is included when in doubt. A name of std:: that we do not know brings in everything.
    """
    wanted = set(re.findall(r"^[ \t]*#[ \t]*include[ \t]*<(\w+)>", source, re.M)) & set(_EVERYTHING)
    words = set(re.findall(r"\bstd\s*::\s*(\w+)", source))
    if re.search(r"\busing\s+(?:namespace\s+)?std\b", source):
        words |= set(re.findall(r"\b[a-z]\w+\b", source)) & set(_HEADER)
    for word in words:
        if word in _HEADER:
            wanted.add(_HEADER[word])
        elif not _MATH.fullmatch(word):
            return _EVERYTHING
    if _MATH.search(source):
        wanted.add("math.h")  # <cmath>, and its overloads in the global namespace too
    if "optional" in source or "device_of" in source:
        wanted.add("optional")
    if re.search(r"\b(?:INT|UINT|LONG|SHRT|CHAR)_(?:MAX|MIN)\b", source):
        wanted.add("climits")
    if re.search(r"\b(?:FLT|DBL)_\w+\b", source):
        wanted.add("cfloat")
    if "assert" in source:
        wanted.add("cassert")
    return sorted(wanted)


def _bindings(functions: Sequence[tuple[str, str]]) -> str:
    def quoted(text: str) -> str:
        return (
            '"'
            + "".join(
                c if c.isprintable() and c not in '"\\?' and ord(c) < 127 else " " for c in text
            )
            + '"'
        )

    lines = [
        f"m.def({quoted(n)}, torch::wrap_pybind_function({n}), {quoted(d)});" for n, d in functions
    ]
    return (
        '\n#line 1 "bindings"\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {\n'
        + "\n".join(lines)
        + "\n}\n"
    )


def render(request: BuildRequest, part: str, rung: int, dispatch_on_type: bool) -> str:
    """The translation unit of `part` ("cpp" or "cu"). The candidate's lines count from 1 in
    `kernel.<part>`."""
    text = "\n".join(request.cpp_sources if part == "cpp" else request.cuda_sources)
    lines: list[str] = []
    if rung == 0:
        both = "\n".join((*request.cpp_sources, *request.cuda_sources))
        lines += [f"#include <{header}>" for header in std_headers(both)]
        if dispatch_on_type:
            lines.append("#define KV_DISPATCH_ON_TYPE 1")
        if part == "cu" and re.search(r"half|bf16|bfloat16", text, re.I):
            lines += ["#include <cuda_fp16.h>", "#include <cuda_bf16.h>", "#define KV_WITH_HALF 1"]
        if part == "cu":
            lines += ["#include <cuda.h>", "#include <cuda_runtime.h>"]
    if not request.no_implicit_headers:
        if part == "cpp":
            lines += ["#include <torch/extension.h>"]
        else:
            lines += ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>"]
    lines += [f'#line 1 "kernel.{part}"', text]
    rendered = "\n".join(lines) + "\n"
    if part == "cpp":  # where a brace is left open, this is the line that the compiler rejects
        rendered += "namespace kernel_end {}\n"
    if part == "cpp" and request.functions is not None:
        rendered += _bindings(request.functions)
    return rendered


def _commands(request: BuildRequest, tools: Toolchain, rung: int) -> dict[str, list[str]]:
    """Compiler command by part ("cpp", "cu"), in a folder that holds kernel.cpp / kernel.cu; as
    load_inline's."""
    includes = [str(FACADE / "include")] if rung == 0 else tools.torch_includes
    if request.with_cuda and tools.cuda_home:
        includes = [*includes, str(tools.cuda_home / "include")]
    if rung != 0:
        includes = [*includes, tools.python_include]
    common = [f"-DTORCH_EXTENSION_NAME={request.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    common += [f"-I{path}" for path in request.extra_include_paths]
    common += [word for path in includes for word in ("-isystem", path)]
    commands = {}
    if request.functions is not None or any(s.strip() for s in request.cpp_sources):
        flags = [*common, "-fPIC", tools.std, *_split(request.extra_cflags)]
        commands["cpp"] = [
            tools.cxx,
            *flags,
            "-fdiagnostics-color=never",
            "-c",
            "kernel.cpp",
            "-o",
            "cpp.o",
        ]
    if request.cuda_sources:
        chosen = _split(request.extra_cuda_cflags)
        arch = () if any("arch" in flag for flag in chosen) else tools.arch_flags
        flags = [*common, *tools.nvcc_flags, *arch, "--compiler-options", "-fPIC", *chosen]
        if not any(flag.startswith("-std=") for flag in flags):
            flags.append(tools.std)
        commands["cu"] = [tools.nvcc, *flags, "-c", "kernel.cu", "-o", "cu.o"]
    return commands


def _link_command(
    request: BuildRequest, tools: Toolchain, rung: int, objects: Sequence[str]
) -> list[str]:
    command = [tools.cxx, *objects, "-shared", *_split(request.extra_ldflags)]
    if rung != 0:
        command += [f"-L{tools.torch_dir / 'lib'}", "-lc10"]
        command += ["-lc10_cuda"] if request.with_cuda else []
        command += [
            "-ltorch_cpu",
            *(["-ltorch_cuda"] if request.with_cuda else []),
            "-ltorch",
            "-ltorch_python",
        ]
    if request.with_cuda and tools.cuda_home:
        lib = tools.cuda_home / "lib64"
        command += [f"-L{lib if lib.exists() else tools.cuda_home / 'lib'}", "-lcudart"]
    return [*command, "-o", "kernel.so"]


# ---- running a compiler -------------------------------------------------------------------------


_OBJECT_BYTES = 256 << 20  # the largest file that a compiler may write


@dataclass(frozen=True)
class Compiled:
    """One finished compiler process."""

    returncode: int
    text: str  # stdout and stderr, at most 1 MB
    timed_out: bool


def _compile(
    command: Sequence[str],
    folder: Path,
    timeout_s: float,
    memory_bytes: int,
    readable: Sequence[str],
    stop: threading.Event,
) -> Compiled:
    """Runs a compiler in `folder`, until `stop` at most: its own process group, always killed; it
    writes there only and reads only below `readable`. OSError if it cannot start.

    The file-system limits are put on a thread of ours, made for this one compiler, which inherits
    them: nothing has to run between fork and exec.
    """
    done: Future[Compiled] = Future()

    def confined() -> None:
        try:
            confinement._libc.prctl(confinement.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # of this thread
            confinement._landlock([folder, "/dev/null"], [*readable, str(folder)], False)
            done.set_result(_run_compiler(command, folder, timeout_s, memory_bytes, stop))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            done.set_exception(error)

    threading.Thread(target=confined, name="compiler").start()
    return done.result()


def _run_compiler(
    command: Sequence[str],
    folder: Path,
    timeout_s: float,
    memory_bytes: int,
    stop: threading.Event,
) -> Compiled:
    environment = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LC_ALL": "C",
        "TMPDIR": str(folder),
    }
    environment["HOME"] = str(folder)
    limits = f"ulimit -c 0; ulimit -f {_OBJECT_BYTES // 512}; ulimit -v {memory_bytes // 1024}; "
    log = folder / "log"
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            ["/bin/sh", "-c", limits + 'exec "$@"', "sh", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            waiter = threading.Thread(target=_stop_watch, args=(process, stop), daemon=True)
            waiter.start()
            try:
                process.wait(timeout_s)
                timed_out = stop.is_set()
            except subprocess.TimeoutExpired:
                timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with open(log, "rb") as stream:
        text = stream.read(1 << 20).decode("utf-8", "replace")
    log.unlink()
    return Compiled(process.returncode, text, timed_out)


def _stop_watch(process: subprocess.Popen[bytes], stop: threading.Event) -> None:
    """Ends a compiler when `stop` is set."""
    while process.poll() is None:
        if stop.wait(0.2):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            return


# ---- cache --------------------------------------------------------------------------------------


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """`cache_dir`, else $KEVIN_CACHE_DIR, else ~/.cache/kevin_repro."""
    chosen = (
        cache_dir or os.environ.get("KEVIN_CACHE_DIR") or Path.home() / ".cache" / "kevin_repro"
    )
    return Path(chosen)


class Cache:
    """A folder of finished builds, one folder each: `meta.json` and perhaps files.

    An entry appears by one rename, complete or not at all. `lock(key)` makes one process (and
    thread) build it.
    """

    def __init__(self, root: Path, limit_bytes: int = CACHE_BYTES) -> None:
        self.root = root / "build"
        self.limit_bytes = limit_bytes
        (self.root / "locks").mkdir(parents=True, exist_ok=True)
        (self.root / "work").mkdir(exist_ok=True)

    def folder(self, key: str) -> Path:
        return self.root / key[:2] / key

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry's meta.json, marked as just used; None when there is none."""
        folder = self.folder(key)
        try:
            meta = json.loads((folder / "meta.json").read_text())
            os.utime(folder)
        except (OSError, ValueError):
            return None
        if meta.get("ok") and not (folder / "kernel.so").exists():
            return None  # somebody cleans the folder file by file
        return meta

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Exclusive among processes and threads. 4096 lock files in all; two keys may share one."""
        with open(self.root / "locks" / key[:3], "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def work(self) -> Iterator[Path]:
        """A private folder for compilers, removed afterwards."""
        folder = Path(tempfile.mkdtemp(dir=self.root / "work"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def put(self, key: str, meta: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        """Moves `files` (name in the entry -> file) into a new entry. OSError (full disk) leaves
        nothing behind."""
        with self.work() as folder:
            entry = folder / "entry"
            entry.mkdir()
            for name, path in files.items():
                if path.is_symlink() or not path.is_file():
                    raise OSError(f"the compiler left no regular file {name}")
                os.replace(path, entry / name)
            with open(entry / "meta.json", "w") as stream:
                json.dump(dict(meta), stream)
                stream.flush()
                os.fsync(stream.fileno())
            target = self.folder(key)
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                shutil.rmtree(target, ignore_errors=True)
            os.rename(entry, target)

    def trim(self) -> None:
        """Deletes what was used longest ago, until the rest fits; also work folders left by killed
        processes."""
        now = time.time()
        for left in (self.root / "work").iterdir():
            with contextlib.suppress(OSError):
                if now - left.stat().st_mtime > 3600:
                    shutil.rmtree(left, ignore_errors=True)
        entries = []
        for meta in self.root.glob("??/*/meta.json"):
            if (meta.parent / "kv_shim.so").exists():
                continue  # needed by every entry
            with contextlib.suppress(OSError):
                size = sum(f.stat().st_size for f in meta.parent.iterdir())
                entries.append((meta.parent.stat().st_mtime, size, meta.parent))
        total = sum(size for _, size, _ in entries)
        for used, size, folder in sorted(entries):
            if total <= self.limit_bytes or now - used < CACHE_GRACE_S:
                break
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


# ---- the builder --------------------------------------------------------------------------------


class Builder:
    """Builds requests, several at a time. One per process is enough; many processes share the
    cache."""

    def __init__(
        self,
        target: str,
        cache_dir: str | os.PathLike[str] | None = None,
        jobs: int | None = None,
        timeout_s: float = 60.0,
        stock_timeout_s: float = 300.0,
        memory_bytes: int = 4 << 30,
        rungs: Sequence[int] = (0, 2),
    ) -> None:
        """`target`: "cpp" or "cuda". `timeout_s`: wall time of one compiler at rung 0,
        `stock_timeout_s` at rung 2. `memory_bytes`: address space of one compiler process. `rungs`:
        which to try, in order."""
        self.target = target
        self.jobs = jobs or _default_jobs()
        self.timeout_s, self.stock_timeout_s, self.memory_bytes = (
            timeout_s,
            stock_timeout_s,
            memory_bytes,
        )
        self.rungs = tuple(rungs)
        self._root = cache_root(cache_dir)
        self._cache: Cache | None = None
        self._pool = ThreadPoolExecutor(self.jobs, thread_name_prefix="build")
        self._parts = ThreadPoolExecutor(2 * self.jobs, thread_name_prefix="compile")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._prepared = False
        self._built = 0
        self.shim_path: str | None = None  # the shim's shared object, once prepared
        self.shim_error = ""  # why there is none; everything then goes to the stock headers
        self.names: Names | None = None

    @property
    def cache(self) -> Cache:
        if self._cache is None:
            self._cache = Cache(self._root)
        return self._cache

    def prepare(self) -> None:
        """Builds the shim (once per machine; cached). ToolchainError when there is no compiler or
        no torch, OSError when the cache cannot be written."""
        with self._lock:
            if self._prepared:
                return
            tools = toolchain(self.target)
            key = _hash("shim", tools.shim_identity)
            meta = self.cache.get(key)
            if meta is None:
                with self.cache.lock(key):
                    meta = self.cache.get(key) or self._build_shim(key, tools)
            if meta.get("error"):
                self.shim_error = meta["error"]
                logger.warning(
                    "thin build path not available, using the stock headers: %s", self.shim_error
                )
            else:
                folder = self.cache.folder(key)
                self.shim_path = str(folder / "kv_shim.so")
                self.names = _load_names(folder / "names.json", tools)
            self._prepared = True

    def _build_shim(self, key: str, tools: Toolchain) -> dict[str, Any]:
        with self.cache.work() as shim, self.cache.work() as names:
            includes = [
                w
                for path in (*tools.torch_includes, tools.python_include)
                for w in ("-isystem", path)
            ]
            command = [
                tools.cxx,
                "-shared",
                "-fPIC",
                tools.std,
                "-O1",
                "-fopenmp",
                "-fvisibility=hidden",
                *includes,
            ]
            command += [
                str(FACADE / "shim.cpp"),
                "-o",
                "kv_shim.so",
                f"-L{tools.torch_dir / 'lib'}",
            ]
            command += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
            (names / "stock.cpp").write_text("#include <torch/extension.h>\n")
            scan = [
                tools.cxx,
                tools.std,
                "-fopenmp",
                "-E",
                "-dD",
                *includes,
                "stock.cpp",
                "-o",
                "stock.ii",
            ]
            start = time.monotonic()
            scanning = self._parts.submit(self._run, scan, names, self.stock_timeout_s, tools)
            built = self._run(command, shim, self.stock_timeout_s, tools)
            if built.returncode:
                errors = diagnostics(built.text)
                _raise_if_ours(built.text)
                error = (
                    errors[0].text if errors else (built.text[-300:] or "the compiler was killed")
                )
                meta = {"error": f"the shim does not build: {clean(error)}"}
                self.cache.put(key, meta, {})
                return meta
            found: dict[str, list[str]] = {}
            if scanning.result().returncode == 0:
                found = read_stock_names((names / "stock.ii").read_text(errors="replace"))
            (shim / "names.json").write_text(json.dumps(found))
            meta = {"seconds": f"{time.monotonic() - start:.1f}"}
            files = {"kv_shim.so": shim / "kv_shim.so", "names.json": shim / "names.json"}
            self.cache.put(key, meta, files)
            return meta

    def build(self, request: BuildRequest) -> BuildResult:
        """Builds or finds one request. Never raises for anything that a model can write."""
        start = time.monotonic()
        try:
            tools = toolchain(self.target)
            refused = check_request(request, self.target, tools.cuda_home)
            if refused:
                return BuildResult(False, error=refused, seconds=time.monotonic() - start)
            self.prepare()
            result = self._build(request, tools)
        except ToolchainError as error:
            result = BuildResult(False, harness_error=str(error))
        except OSError as error:
            where = f"{self._root}: {error.strerror or error}"
            result = BuildResult(False, harness_error=f"cannot build in the cache folder {where}")
        return dataclasses.replace(result, seconds=time.monotonic() - start)

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        """`build` on the pool."""
        return self._pool.submit(self.build, request)

    def stop(self) -> None:
        """Ends running compilers; their builds, and later ones, come back with a harness_error."""
        self._stop.set()

    def close(self) -> None:
        """Waits for running builds and trims the cache."""
        self._pool.shutdown(cancel_futures=True)
        self._parts.shutdown(cancel_futures=True)
        if self._cache is not None and self._built:
            with contextlib.suppress(OSError):
                self._cache.trim()

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, command: Sequence[str], folder: Path, timeout_s: float, tools: Toolchain
    ) -> Compiled:
        readable = tools.readable
        return _compile(command, folder, timeout_s, self.memory_bytes, readable, self._stop)

    def _build(self, request: BuildRequest, tools: Toolchain) -> BuildResult:
        rungs = ",".join(map(str, self.rungs))
        key = request.key(tools.identity(request.with_cuda), self.target, rungs, self.shim_error)
        meta = self.cache.get(key)
        if meta is not None:
            return self._result(key, meta, cached=True)
        with self.cache.lock(key):
            meta = self.cache.get(key)  # perhaps built while we waited
            if meta is not None:
                return self._result(key, meta, cached=True)
            return self._climb(key, request, tools)

    def _climb(self, key: str, request: BuildRequest, tools: Toolchain) -> BuildResult:
        result = BuildResult(False, harness_error="no rung of the build ladder is available")
        for rung in self.rungs:
            if rung == 0 and self.shim_path is None:
                continue
            with self.cache.work() as folder:
                result, certain = self._rung(request, tools, rung, folder)
                if result.timed_out or result.harness_error:
                    return result
                if result.ok or certain or rung == self.rungs[-1]:
                    meta = {
                        "ok": result.ok,
                        "kind": result.kind,
                        "rung": rung,
                        "error": result.error,
                    }
                    meta["shim"] = self.shim_path
                    self.cache.put(
                        key, meta, {"kernel.so": folder / "kernel.so"} if result.ok else {}
                    )
                    self._built += 1
                    if self._built % 64 == 0:
                        self.cache.trim()
                    return self._result(key, meta, cached=False)
        return result

    def _result(self, key: str, meta: Mapping[str, Any], cached: bool) -> BuildResult:
        path = str(self.cache.folder(key) / "kernel.so") if meta["ok"] else None
        return BuildResult(
            meta["ok"], path, meta["kind"], meta["rung"], cached, error=meta["error"]
        )

    def _rung(
        self, request: BuildRequest, tools: Toolchain, rung: int, folder: Path
    ) -> tuple[BuildResult, bool]:
        """One try. (result, is a failure certainly the candidate's own?)"""
        kind = "facade" if rung == 0 else "pybind"
        timeout_s = self.timeout_s if rung == 0 else self.stock_timeout_s
        sources = {
            "kernel.cpp": "\n".join(request.cpp_sources),
            "kernel.cu": "\n".join(request.cuda_sources),
        }
        jobs = []
        for part, command in _commands(request, tools, rung).items():
            place = (
                folder / part
            )  # its own folder, so that the compilers' temporary files do not meet
            place.mkdir()
            text = render(request, part, rung, tools.dispatch_on_type)
            (place / f"kernel.{part}").write_text(text, encoding="utf-8", errors="replace")
            jobs.append(self._parts.submit(self._run, command, place, timeout_s, tools))
        if not jobs:
            return BuildResult(
                False, kind=kind, rung=rung, error="load_inline: there is no source code"
            ), True
        done = [job.result() for job in jobs]
        stopped = BuildResult(False, kind=kind, rung=rung, harness_error="builds were stopped")
        if self._stop.is_set():
            return stopped, True
        if any(d.timed_out for d in done):
            text = f"compilation took longer than {timeout_s:g} s"
            return BuildResult(False, kind=kind, rung=rung, error=text, timed_out=True), True
        if all(d.returncode == 0 for d in done):
            objects = sorted(str(o.relative_to(folder)) for o in folder.glob("*/*.o"))
            link = _link_command(request, tools, rung, objects)
            done = [self._run(link, folder, timeout_s, tools)]
            if done[0].returncode == 0:
                return BuildResult(True, kind=kind, rung=rung), True
            if self._stop.is_set():
                return stopped, True
        failed = [d for d in done if d.returncode]
        for d in failed:
            _raise_if_ours(d.text)
        if any(_OUT_OF_MEMORY.search(d.text) for d in failed):
            text = f"the compiler ran out of memory ({self.memory_bytes >> 20} MB)"
            return BuildResult(False, kind=kind, rung=rung, error=text), True
        if any(_TOO_LARGE.search(d.text) or d.returncode == -signal.SIGXFSZ for d in failed):
            text = f"the compiled kernel is larger than {_OBJECT_BYTES >> 20} MB"
            return BuildResult(False, kind=kind, rung=rung, error=text), True
        verdicts = [(diagnostics(d.text), d.text) for d in failed]
        certain = next((v for v in verdicts if blame(v[0], sources, self.names)), None)
        errors, text = certain or verdicts[0]
        errors = [e for e in errors if e.file in sources] or errors
        message = report(errors, text, sources)
        return BuildResult(False, kind=kind, rung=rung, error=message), certain is not None


_OUT_OF_MEMORY = re.compile(
    r"out of memory|virtual memory exhausted|[Cc]annot allocate memory|bad_alloc|Killed signal"
)


_TOO_LARGE = re.compile(r"File too large|File size limit exceeded")


def _raise_if_ours(output: str) -> None:
    """OSError when a compiler failed for lack of disk space: no fault of the candidate."""
    if re.search(r"No space left on device|Disk quota exceeded|Read-only file system", output):
        raise OSError("no space left on device (free some, or set KEVIN_CACHE_DIR to another disk)")


def _default_jobs() -> int:
    """As many as there are cores, but each compiler should have 1.5 GB."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        match = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        if match:
            return max(1, min(cores, int(match.group(1)) // (1536 * 1024)))
    return cores


def _load_names(path: Path, tools: Toolchain) -> Names | None:
    found = json.loads(path.read_text())
    if not found:
        return None
    headers: set[str] = set()
    cuda_words: set[str] = set()
    cuda_macros: set[str] = set()
    for include in map(Path, tools.torch_includes):
        for folder, _, files in os.walk(include):
            relative = os.path.relpath(folder, include)
            headers |= {os.path.normpath(f"{relative}/{file}") for file in files}
    for header in [
        h for h in headers if h.startswith(("ATen/cuda/", "c10/cuda/")) and h.count("/") == 2
    ]:
        with contextlib.suppress(OSError):
            text = (tools.torch_dir / "include" / header).read_text(errors="replace")
            cuda_words |= set(re.findall(r"[A-Za-z_]\w*", text))
            cuda_macros |= set(re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M))
    return Names(
        frozenset(found["anywhere"]) | cuda_words,
        frozenset(found["outermost"]),
        frozenset(found["macros"]) | cuda_macros,
        _facade_macros(),
        frozenset(headers),
    )


# ---- in the process that runs the candidate -----------------------------------------------------


def load_shim(path: str) -> Any:
    """Imports the shim (torch must have been imported). A zygote may do this before it forks."""
    if "kv_shim" not in sys.modules:
        sys.modules["kv_shim"] = _import(path, "kv_shim")
    return sys.modules["kv_shim"]


def _import(path: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_built(path: str, kind: str, request: BuildRequest) -> Any:
    """The module of a finished build: attributes are its functions. ImportError if it cannot be
    loaded (for instance a function that is declared and never defined)."""
    import torch

    if not request.is_python_module:
        torch.ops.load_library(path)
        return None
    if kind == "pybind":
        return _import(path, request.name)
    meta = json.loads((Path(path).parent / "meta.json").read_text())
    module = types.ModuleType(request.name)
    module.__dict__.update(load_shim(meta["shim"]).load(path, request.name))
    return module


def install_loader(
    lookup: Callable[[BuildRequest], Mapping[str, Any] | BuildResult | None],
    on_missing: Callable[[BuildRequest], NoReturn],
) -> None:
    """Replaces `load_inline` (and `load`) of torch.utils.cpp_extension by a loader of finished
    builds.

    To be called before the candidate's code is imported, so that names it imports are ours.
    `lookup` gives the finished build of a request (a BuildResult or a dict with its fields) or
    None; then `on_missing` reports the request and ends the process.
    """
    from torch.utils import cpp_extension

    def finish(request: BuildRequest) -> Any:
        found = lookup(request)
        if found is None:
            on_missing(request)
        result = dataclasses.asdict(found) if isinstance(found, BuildResult) else dict(found)
        if not result["ok"]:
            raise RuntimeError(
                f"Error building extension '{request.name}': {result.get('error', '')}"
            )
        return load_built(result["path"], result["kind"], request)

    def load_inline(*args: Any, **kwargs: Any) -> Any:
        return finish(BuildRequest.from_load_inline(*args, **kwargs))

    def load(name: str, sources: str | Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return finish(request_from_files(name, sources, *args, **kwargs))

    cpp_extension.load_inline = load_inline
    cpp_extension.load = load


def request_from_files(
    name: str,
    sources: str | Sequence[str],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Sequence[str] | None = None,
    build_directory: str | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    **rest: Any,
) -> BuildRequest:
    """The request that `torch.utils.cpp_extension.load` makes, for at most one C++ and one CUDA
    file."""
    paths = [sources] if isinstance(sources, str) else list(sources)
    cuda = [Path(p).read_text() for p in paths if str(p).endswith((".cu", ".cuh"))]
    cpp = [Path(p).read_text() for p in paths if not str(p).endswith((".cu", ".cuh"))]
    if len(cuda) > 1 or len(cpp) > 1:
        raise RuntimeError("load: use load_inline, or at most one C++ file and one CUDA file")
    return BuildRequest.from_load_inline(
        name,
        cpp,
        cuda,
        extra_cflags=extra_cflags,
        extra_cuda_cflags=extra_cuda_cflags,
        extra_ldflags=extra_ldflags,
        extra_include_paths=extra_include_paths,
        with_cuda=with_cuda,
        is_python_module=rest.get("is_python_module", True),
        no_implicit_headers=True,
    )
