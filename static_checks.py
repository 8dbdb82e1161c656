"""Static checks of an answer: a cheap first filter that gives a reason, never the only defence.

An answer is a Python file. It is parsed with `ast` and walked by a small abstract interpreter whose
values say what an expression may be: the dotted name of something imported, a tensor, a built
extension or one of its functions, a function or class of the file, or nothing known. Names are
therefore judged by what they mean, not by how they are spelt: `from torch import nn as q`,
`T = torch`, `getattr(torch, "re" + "lu")`, `{"a": torch.relu}["a"]` all lead to the same finding,
while the word try in a comment, a parameter called F, or arithmetic on shapes lead to none.
C++ and CUDA strings are parsed by tree-sitter (native_checks.py).

What PyTorch may still do is a white list, `TORCH_PLUMBING` and `TENSOR_PLUMBING`, one reason for
each group: allocate, look, view, copy, cast, choose a device or stream. It holds in the code that
ModelNew's forward can reach; a constructor may compute (it makes weights). The rules start from
Kevin's (paper, section 3.1 and appendix F: try/except, pass, torch.nn beyond parameters and
containers, no kernel, inheriting the reference).

Values are followed without regard to conditions: a name may be all that was ever assigned to it,
except in straight-line code, where an assignment replaces. Rounds repeat until nothing changes.
"""

from __future__ import annotations

import ast
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from native_checks import ATEN_CALLS, Finding, Native

__all__ = ["RULES", "Finding", "check", "check_native"]

RULES: dict[str, str] = {
    "format": "the answer must be a Python file with a class ModelNew(nn.Module) and its forward",
    "try": "no try/except: a failing kernel must fail, not fall back",
    "inherit": "ModelNew must not inherit or call the reference Model",
    "torch_nn": "of torch.nn only Module, Parameter, Buffer, containers and init",
    "functional": "nothing of torch.nn.functional",
    "torch_compute": "no torch function that computes, in code that forward reaches",
    "tensor_method": "no tensor method that computes, in code that forward reaches",
    "tensor_operator": "no arithmetic or comparison on tensors, in code that forward reaches",
    "compiler": "no torch.compile, torch.jit, torch.ops, torch._C or other code generators",
    "dynamic": "no exec, eval, computed attribute names, frames or other hidden access",
    "import": "only modules that a kernel wrapper needs",
    "file": "no reading or writing of files",
    "tamper": "no change to torch or other modules",
    "tensor_subclass": "no subclass of Tensor, no __torch_function__",
    "no_load_inline": "the kernel must be built with torch.utils.cpp_extension.load_inline",
    "no_kernel": "the source must hold a kernel of its own that the bound functions run",
    "unused_kernel": "ModelNew's forward must call a bound function",
    "pass": "no empty forward or class",
    "native_compute": "no PyTorch computation from C++",
    "native_python": "no calls into Python from C++",
    "native_library": "no vendor library (purity strict)",
    "native_system": "no processes, files, sockets or dynamic loading from C++",
    "native_asm": "no inline assembly outside device code",
    "flags": "no compiler flags that load code or files",
    "native_include": "#include of library headers only",
    "native_interpose": "no redefinition of runtime functions",
}

# torch.X that forward may use. Prefix match on components for entries that end in a dot.
TORCH_PLUMBING: dict[str, frozenset[str]] = {
    "types and constants": frozenset(
        "Tensor dtype device Size layout memory_format float float16 float32 float64 half double"
        " bfloat16 int int8 int16 int32 int64 uint8 uint16 uint32 uint64 long short bool complex64"
        " complex128 strided contiguous_format channels_last channels_last_3d preserve_format inf"
        " nan pi e newaxis float8_e4m3fn float8_e5m2 FloatTensor finfo iinfo Generator".split()
    ),
    "allocation; contents constant": frozenset(
        "empty empty_like empty_strided zeros zeros_like ones ones_like full full_like tensor"
        " as_tensor scalar_tensor arange from_numpy".split()
    ),
    "views and copies": frozenset(
        "as_strided reshape ravel flatten squeeze unsqueeze transpose t permute movedim swapaxes"
        " narrow select split chunk unbind clone broadcast_to view_as_real view_as_complex".split()
    ),
    "queries": frozenset(
        "is_tensor numel is_floating_point is_complex get_default_dtype result_type promote_types"
        " can_cast is_grad_enabled is_inference_mode_enabled get_num_threads get_device_module"
        " broadcast_shapes __version__ version. are_deterministic_algorithms_enabled".split()
    ),
    "devices, streams, graphs of own kernels": frozenset(["cuda.", "Stream", "Event", "cpu."]),
    "settings without effect on own kernels": frozenset(
        "backends. no_grad inference_mode enable_grad set_grad_enabled set_num_threads"
        " set_default_dtype set_float32_matmul_precision manual_seed _assert".split()
    ),
    "autograd wrapper round own kernels": frozenset(["autograd.Function.", "autograd.function."]),
    "building": frozenset(["utils.cpp_extension.", "utils.dlpack."]),
}
_PLUMBING_NAMES = frozenset().union(*TORCH_PLUMBING.values())

# Methods and attributes of tensors that forward may use; "number" groups give no tensor.
TENSOR_PLUMBING: dict[str, frozenset[str]] = {
    "queries (number)": frozenset(
        "shape size stride numel nelement dim ndim ndimension dtype device is_cuda is_cpu layout"
        " element_size itemsize nbytes is_contiguous data_ptr storage_offset storage"
        " untyped_storage get_device is_floating_point is_complex requires_grad is_leaf grad_fn"
        " _version type item tolist __len__ names is_inference is_sparse is_quantized is_meta"
        " is_pinned".split()
    ),
    "views": frozenset(
        "view view_as reshape reshape_as flatten ravel squeeze unsqueeze transpose swapaxes t T"
        " mT H mH permute movedim expand expand_as broadcast_to narrow select as_strided detach"
        " data chunk split unbind unflatten diagonal __getitem__ grad".split()
    ),
    "allocation, copies, casts": frozenset(
        "contiguous clone copy_ zero_ fill_ resize_ new_empty new_zeros new_ones new_full"
        " new_tensor new_empty_strided to cuda cpu type_as float half double bfloat16 int long"
        " short bool requires_grad_ record_stream pin_memory __setitem__ __dlpack__ set_"
        " detach_".split()
    ),
}
_TENSOR_NAMES = frozenset().union(*TENSOR_PLUMBING.values())
_NUMBER_NAMES = TENSOR_PLUMBING["queries (number)"]

NN_ALLOWED = frozenset(
    "Module Parameter ParameterList ParameterDict ModuleList ModuleDict Buffer init parameter"
    " UninitializedParameter".split()
)
MODULES = frozenset(
    "torch torch.nn torch.nn.functional torch.nn.init torch.utils torch.utils.cpp_extension"
    " torch.cuda torch.autograd torch.backends torch.version torch.nn.parameter"
    " torch.nn.modules".split()
)
COMPILERS = (
    "torch.compile torch.jit torch.ops torch._C torch.library torch._dynamo torch._inductor"
    " torch.fx torch.export torch._higher_order_ops torch._ops torch.classes torch.onnx"
).split()
# torch modules whose functions always compute: refused where torch functions are.
COMPUTE_SPACES = tuple(
    "torch.special torch.linalg torch.fft torch.sparse torch._VF torch.func torch.vmap"
    " torch._refs torch._prims".split()
)

# Modules that an answer may import.
IMPORTS = frozenset(
    "torch math cmath typing typing_extensions os sys textwrap functools itertools operator"
    " collections dataclasses enum abc re string numbers types warnings contextlib copy random"
    " time hashlib logging platform shutil numpy __future__ struct statistics pathlib"
    " tempfile".split()
)
DANGEROUS: dict[str, str] = {
    "builtins.exec": "dynamic", "builtins.eval": "dynamic", "builtins.compile": "dynamic",
    "builtins.__import__": "dynamic", "builtins.globals": "dynamic", "builtins.locals": "dynamic",
    "builtins.vars": "dynamic", "builtins.breakpoint": "dynamic", "builtins.open": "file",
    "builtins.delattr": "tamper", "builtins.input": "file", "builtins.__builtins__": "dynamic",
    "builtins.__loader__": "dynamic", "builtins.__spec__": "dynamic", "builtins.dir": "dynamic",
    "sys.modules": "dynamic", "sys._getframe": "dynamic", "sys.settrace": "dynamic",
    "sys.setprofile": "dynamic", "sys.path": "import", "sys.meta_path": "dynamic",
    "sys.exit": "dynamic", "builtins.exit": "dynamic", "builtins.quit": "dynamic",
    "contextlib.suppress": "try", "contextlib.ExitStack": "try", "operator.attrgetter": "dynamic",
    "operator.methodcaller": "dynamic", "torch.load": "file", "torch.save": "file",
    "torch.hub": "file", "torch.from_file": "file", "torch.overrides": "tensor_subclass",
    "torch.utils._python_dispatch": "tensor_subclass", "torch.multiprocessing": "import",
    "torch.distributed": "import", "torch.utils.data": "import", "torch.profiler": "import",
    "torch.testing": "tamper", "numpy.load": "file", "numpy.save": "file", "numpy.fromfile": "file",
    "numpy.memmap": "file", "numpy.ctypeslib": "dynamic", "types.FunctionType": "dynamic",
    "types.CodeType": "dynamic", "pathlib.Path.read_text": "file", "shutil.rmtree": "file",
}  # fmt: skip
SLY_ATTRIBUTES = frozenset(
    "__globals__ __builtins__ __subclasses__ __dict__ __code__ __bases__ __base__ __mro__ mro"
    " __getattribute__ __closure__ __wrapped__ __self__ __func__ f_back f_globals f_locals"
    " f_builtins gi_frame cr_frame tb_frame _getframe __loader__ __reduce__ __reduce_ex__".split()
)
BAD_FLAGS = re.compile(
    r"-fplugin|-?-specs|-B|-wrapper|-include|-imacros|@|-x|-o|-L|-Wl,|-Wa,|-Wp,|-Xlinker|-T"
    r"|-iquote|-isystem|-idirafter|--?sysroot|-ccbin|--compiler-bindir|-fuse-ld|/|\.\.|-I"
)
FINE_DUNDERS = frozenset("__version__ __init__ __name__ __call__ __setattr__ __class__".split())
HOOKS = frozenset(
    "register_forward_hook register_forward_pre_hook register_full_backward_hook"
    " register_module_forward_hook register_module_forward_pre_hook _call_impl _wrapped_call_impl"
    " _slow_forward".split()
)
FILE_METHODS = frozenset("read_text write_text read_bytes write_bytes open tofile".split())

# Modules that other modules expose as attributes: torch.cuda.os.system is os.system.
PIVOTS = frozenset(
    "torch builtins sys os subprocess importlib ctypes inspect socket threading io shutil pickle"
    " multiprocessing signal gc types".split()
)
# All that is left of some modules; the rest counts as hidden access.
PARTS = {
    "os": frozenset("environ path getenv cpu_count sep makedirs getcwd name".split()),
    "sys": frozenset("version version_info platform maxsize stderr stdout byteorder".split()),
    "shutil": frozenset(["which"]),
    "tempfile": frozenset("mkdtemp gettempdir TemporaryDirectory".split()),
    "types": frozenset("SimpleNamespace NoneType MappingProxyType".split()),
    "torch.utils.cpp_extension": frozenset("load_inline load CUDA_HOME include_paths".split()),
}

Value = frozenset[str]
NONE: Value = frozenset()
TENSOR: Value = frozenset(["<tensor>"])
TENSORS: Value = frozenset(["<tensors>"])
NUMBER: Value = frozenset(["<number>"])
EXTENSION: Value = frozenset(["<ext>"])
HOLE = "<hole>"  # key of a string table: what an f-string's unknown parts are read as
LOADERS = ("torch.utils.cpp_extension.load_inline", "torch.utils.cpp_extension.load")
_PARSE_LOCK = threading.Lock()  # catch_warnings is not safe between threads
MAX_BYTES, MAX_DEPTH = 400_000, 200


@dataclass
class Scope:
    """Names of a module, class or function body and what they may be."""

    parent: Scope | None
    names: dict[str, Value] = field(default_factory=dict)
    is_class: bool = False
    globals: set[str] = field(default_factory=set)  # names declared `global` here


@dataclass
class Function:
    """A function, method or lambda of the file."""

    key: str  # "<func:NAME:LINE:COLUMN>"
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope  # where it is defined
    owner: str = ""  # class it is a method of, "" for none
    given: dict[str, Value] = field(default_factory=dict)  # parameter -> what callers pass
    returns: Value = NONE
    is_property: bool = False


def check(code: str, target: str, purity: str = "strict") -> list[Finding]:
    """Everything to object to in an answer, most basic first; an empty list for an honest one.

    `target` is "cuda" or "cpp". `purity` "strict" wants all work in the candidate's own kernels,
    "library" lets them call cuBLAS, cuDNN and their like. Never raises for anything in `code`.
    """
    tree = _parse(code)
    if isinstance(tree, Finding):
        return [tree]
    return _Checker(code, tree, target, purity).run()


def check_native(
    sources: Sequence[str], functions: Sequence[str], target: str, purity: str = "strict"
) -> list[Finding]:
    """The C++ and CUDA rules alone, for sources that an answer put together while it ran.

    `functions` are the names bound by load_inline (none: those of a PYBIND11_MODULE in the text).
    """
    if sum(map(len, sources)) > MAX_BYTES:
        return [
            Finding("format", f"the sources are longer than {MAX_BYTES} characters", 0, "", True)
        ]
    native = Native(sources, target, purity)
    findings = [Finding(rule, message, 0, line, True) for rule, message, line in native.findings]
    bound = list(functions) or list(native.bound.values())
    if missing := native.own_kernel(bound):
        findings.append(Finding("no_kernel", missing, 0, "", True))
    return findings


def _parse(code: str) -> ast.Module | Finding:
    """The syntax tree, or the finding that there is none."""

    def bad(message: str, line: int = 0, evidence: str = "") -> Finding:
        return Finding("format", message, line, evidence, True)

    if len(code) > MAX_BYTES:
        return bad(f"the answer is longer than {MAX_BYTES} characters")
    try:
        with _PARSE_LOCK, warnings.catch_warnings():  # an odd escape sequence is no news to users
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except SyntaxError as error:
        line = error.lineno or 0
        text = code.splitlines()[line - 1].strip() if 0 < line <= len(code.splitlines()) else ""
        return bad(f"Python syntax error: {error.msg} (line {line}: {text[:120]})", line, text)
    except (ValueError, RecursionError, MemoryError):
        return bad("Python cannot parse the answer: null bytes or too deeply nested")
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    return bad("the Python code is too deeply nested")


class _Checker:
    """One run of the abstract interpreter over a file."""

    def __init__(self, code: str, tree: ast.Module, target: str, purity: str) -> None:
        self.code, self.tree, self.target, self.purity = code, tree, target, purity
        self.lines = code.splitlines()
        self.module = Scope(None)
        self.functions: dict[str, Function] = {}
        self.by_node: dict[int, Function] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.bases: dict[str, Value] = {}
        self.methods: dict[str, dict[str, str]] = {}  # class -> method name -> function key
        self.attributes: dict[str, Value] = {}  # attribute name -> what was ever stored there
        self.stored: Value = NONE  # what was assigned to an attribute forward or __call__
        self.wrappers: dict[str, Value] = {}  # function key or class name -> its decorators
        self.reached: set[str] = set()  # keys of functions that forward can reach
        self.calls_extension = False
        self.loads: dict[int, ast.Call] = {}  # load_inline calls
        self.checking = False  # last round: report
        self.reaching = False  # inside code that forward reaches
        self.current: Function | None = None
        self.found: dict[tuple[str, int, str], Finding] = {}

    # ------------------------------------------------------------------------------------ rounds

    def run(self) -> list[Finding]:
        """Interpret until the values settle, then once more to report."""
        for _ in range(4):
            before = self._state()
            self._round()
            if self._state() == before:
                break
        self.checking = True
        self._round()
        self._whole_file()
        model = self._model_class()
        if model is not None:
            self._native(model)
        ranked = sorted(
            self.found.values(), key=lambda f: (f.rule != "format", not f.fatal, f.line, f.rule)
        )
        return ranked

    def _state(self) -> tuple[object, ...]:
        functions = tuple(
            (f.key, tuple(sorted(f.given.items(), key=repr)), f.returns)
            for f in self.functions.values()
        )
        values = tuple(sorted((k, tuple(sorted(v))) for k, v in self.attributes.items()))
        names = tuple(sorted((k, tuple(sorted(v))) for k, v in self.module.names.items()))
        return functions, values, names, len(self.reached)

    def _round(self) -> None:
        """Module level, then every function with what its callers give it."""
        self.reaching, self.current = False, None
        self._block(self.tree.body, self.module, strong=False)
        self._reach_model()
        for key in list(self.functions):
            self._run_function(self.functions[key])

    def _run_function(self, function: Function) -> None:
        self.reaching, self.current = function.key in self.reached, function
        scope = Scope(function.scope, dict(self._parameters(function)))
        if isinstance(function.node, ast.Lambda):
            function.returns |= self._eval(function.node.body, scope)
        else:
            self._block(function.node.body, scope, strong=True)
        self.reaching, self.current = False, None

    def _parameters(self, function: Function) -> Iterator[tuple[str, Value]]:
        """What each parameter may be: from callers, annotation, default, and forward's contract."""
        arguments = function.node.args
        plain = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        defaults: dict[str, ast.expr] = {}
        positional = [*arguments.posonlyargs, *arguments.args]
        for arg, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
            defaults[arg.arg] = default
        for arg, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if given is not None:
                defaults[arg.arg] = given
        entry = self._is_entry(function)
        for place, arg in enumerate(plain):
            if function.owner and place == 0 and not self._is_static(function):
                yield arg.arg, frozenset([f"<obj:{function.owner}>"])
                continue
            note = _annotation(arg.annotation)
            value = function.given.get(arg.arg, NONE)
            if note is not None:
                value |= note
            elif entry and arg.arg not in defaults:
                value |= TENSOR
            if arg.arg in defaults:
                value |= self._eval(defaults[arg.arg], function.scope)
            yield arg.arg, value
        if arguments.vararg is not None:
            rest = TENSORS if entry else function.given.get("*", NONE)
            yield arguments.vararg.arg, rest
        if arguments.kwarg is not None:
            yield arguments.kwarg.arg, TENSORS if entry else NONE

    def _is_entry(self, function: Function) -> bool:
        name = getattr(function.node, "name", "")
        return function.owner == self._model_name() and name in ("forward", "__call__")

    @staticmethod
    def _is_static(function: Function) -> bool:
        decorators = getattr(function.node, "decorator_list", [])
        return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in decorators)

    def _model_name(self) -> str:
        """The class behind the name ModelNew."""
        if "ModelNew" in self.classes:
            return "ModelNew"
        for value in self.module.names.get("ModelNew", NONE):
            if value.startswith("<class:"):
                return value[7:-1]
        return ""

    def _reach(self, origin: str) -> None:
        """Code that forward reaches uses this value: a function, or an object with operators."""
        if origin.startswith("<func:"):
            self.reached.add(origin)
        elif origin.startswith(("<class:", "<obj:")):
            name = origin.split(":")[1][:-1]
            for method, key in self.methods.get(name, {}).items():
                if method.startswith("__") and method not in ("__init__", "__repr__"):
                    self.reached.add(key)

    def _reach_model(self) -> None:
        """Everything that runs when ModelNew is called: forward, __call__, lookups, base classes,
        whatever is stored under those names, and the decorators of all these."""
        names = self.module.names.get("ModelNew", NONE) | {f"<class:{self._model_name()}>"}
        names |= self._all_bases(self._model_name())
        for origin in names:
            if origin.startswith("<class:"):
                self._reach(origin)
                key = self.methods.get(origin[7:-1], {}).get("forward")
                self.reached |= {key} if key else set()
        for origin in names | self.stored | self.wrappers.get(self._model_name(), NONE):
            if origin in self.functions:
                self.reached |= {origin} | self._functions(self.functions[origin].returns)
        for key in list(self.reached):
            for wrapper in self._functions(self.wrappers.get(key, NONE)):
                self.reached |= {wrapper} | self._functions(self.functions[wrapper].returns)

    @staticmethod
    def _functions(value: Value) -> set[str]:
        return {origin for origin in value if origin.startswith("<func:")}

    # -------------------------------------------------------------------------------- statements

    def _block(self, body: Sequence[ast.stmt], scope: Scope, strong: bool) -> None:
        """Statements in order. `strong`: an assignment replaces what a name was."""
        for statement in body:
            self._statement(statement, scope, strong)

    def _statement(self, node: ast.stmt, scope: Scope, strong: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._define(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._define_class(node, scope)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, scope)
        elif isinstance(node, ast.Assign):
            self._assign_all(node, scope, strong)
        elif isinstance(node, ast.AnnAssign):
            note = _annotation(node.annotation) or NONE
            value = self._eval(node.value, scope) if node.value is not None else NONE
            self._bind(node.target, value | note, scope, strong)
        elif isinstance(node, ast.AugAssign):
            value = self._operator(node, [node.target, node.value], scope)
            self._bind(node.target, value, scope, strong=False)
        elif isinstance(node, ast.Return):
            value = self._eval(node.value, scope) if node.value is not None else NONE
            if self.current is not None:
                self.current.returns |= value
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.globals.update(node.names)
        else:
            self._compound(node, scope)

    def _compound(self, node: ast.stmt, scope: Scope) -> None:
        """Statements that hold other statements, and the rest."""
        if isinstance(node, ast.For | ast.AsyncFor):
            value = self._elements(self._eval(node.iter, scope))
            self._bind(node.target, value, scope, strong=False)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                value = self._eval(item.context_expr, scope)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, value, scope, strong=False)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._statement(child, scope, strong=False)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                self._block(child.body, scope, strong=False)
            elif isinstance(child, ast.expr) and not isinstance(node, ast.For | ast.AsyncFor):
                self._eval(child, scope)

    def _assign_all(self, node: ast.Assign, scope: Scope, strong: bool) -> None:
        for target, value in _pairs(node):
            self._bind(target, self._eval(value, scope), scope, strong)

    def _bind(self, target: ast.expr, value: Value, scope: Scope, strong: bool) -> None:
        """Store a value under a name, attribute or pattern."""
        if isinstance(target, ast.Name):
            holder = self._module_of(scope) if target.id in scope.globals else scope
            old = NONE if strong and holder is scope else holder.names.get(target.id, NONE)
            holder.names[target.id] = old | value
        elif isinstance(target, ast.Attribute):
            self._check_store(target, self._eval(target.value, scope, inner=True))
            self.attributes[target.attr] = self.attributes.get(target.attr, NONE) | value
            if target.attr in ("forward", "__call__"):
                self.stored |= value
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._bind(one, self._elements(value), scope, strong)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, value, scope, strong)
        elif isinstance(target, ast.Subscript):
            base = self._eval(target.value, scope, inner=True)
            self._eval(target.slice, scope)
            if isinstance(target.value, ast.Name) and "<tensor>" not in base:
                found = self._holder(target.value.id, scope)
                if found is not None:
                    found.names[target.value.id] |= value

    def _module_of(self, scope: Scope) -> Scope:
        return scope if scope.parent is None else self._module_of(scope.parent)

    def _holder(self, name: str, scope: Scope | None) -> Scope | None:
        """The scope in which a name is looked up from `scope` (class bodies are skipped)."""
        first = True
        while scope is not None:
            if name in scope.names and (first or not scope.is_class):
                return scope
            scope, first = scope.parent, False
        return None

    def _define(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, owner: str = ""
    ) -> None:
        function = self.by_node.get(id(node))
        if function is None:
            key = f"<func:{node.name}:{node.lineno}:{node.col_offset}>"
            function = self.by_node[id(node)] = Function(key, node, scope, owner)
            self.functions[key] = function
        function.scope = scope
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Name) and decorator.id == "property":
                function.is_property = True
            value = self._eval(decorator, scope, called=True)
            self.wrappers[function.key] = self.wrappers.get(function.key, NONE) | value
        value = frozenset([function.key])
        if owner:
            self.methods.setdefault(owner, {})[node.name] = function.key
            self.attributes[node.name] = self.attributes.get(node.name, NONE) | value
        scope.names[node.name] = scope.names.get(node.name, NONE) | value

    def _define_class(self, node: ast.ClassDef, scope: Scope) -> None:
        self.classes[node.name] = node
        bases = NONE
        for base in [*node.bases, *(keyword.value for keyword in node.keywords)]:
            bases |= self._eval(base, scope)
        self.bases[node.name] = bases
        for decorator in node.decorator_list:
            self.wrappers[node.name] = self.wrappers.get(node.name, NONE) | self._eval(
                decorator, scope, called=True
            )
        if bases & {"torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter"}:
            self._report(
                "tensor_subclass", "a subclass of Tensor can hide work; return a plain tensor", node
            )
        inner = Scope(scope, is_class=True)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self._define(statement, inner, node.name)
            else:
                self._statement(statement, inner, strong=False)
        for name, value in inner.names.items():
            self.attributes[name] = self.attributes.get(name, NONE) | value
        known = frozenset([f"<class:{node.name}>"])
        scope.names[node.name] = scope.names.get(node.name, NONE) | known

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level or base.split(".")[0] not in IMPORTS:
                self._report("import", f"import of {'.' * node.level}{base} is not allowed", node)
            for alias in node.names:
                if alias.name == "*":
                    self._report("import", "import names one by one, not with *", node)
                name = f"{base}.{alias.name}"
                self._check_origin(_canonical(name), node, called=True)
                scope.names[alias.asname or alias.name] = frozenset([_canonical(name)])
            return
        for alias in node.names:
            if alias.name.split(".")[0] not in IMPORTS:
                self._report("import", f"import of {alias.name} is not allowed", node)
            top = alias.name if alias.asname else alias.name.split(".")[0]
            self._check_origin(_canonical(alias.name), node, called=True)
            name = alias.asname or top
            scope.names[name] = scope.names.get(name, NONE) | {_canonical(top)}

    # ------------------------------------------------------------------------------- expressions

    def _eval(
        self, node: ast.expr, scope: Scope, inner: bool = False, called: bool = False
    ) -> Value:
        """What an expression may be. `inner`: part of a dotted name; `called`: it gets called."""
        if isinstance(node, ast.Name):
            value = self._lookup(node.id, scope)
        elif isinstance(node, ast.Attribute):
            value = self._attribute(node, scope)
        elif isinstance(node, ast.Call):
            value = self._call(node, scope)
        elif isinstance(node, ast.Subscript):
            value = self._subscript(node, scope)
        elif isinstance(node, ast.BinOp):
            value = self._operator(node, [node.left, node.right], scope)
        elif isinstance(node, ast.UnaryOp):
            value = self._operator(node, [node.operand], scope)
        elif isinstance(node, ast.Compare):
            value = self._operator(node, [node.left, *node.comparators], scope)
        else:
            return self._other(node, scope)
        for origin in value:
            if self.reaching:
                self._reach(origin)
            if not inner:
                self._check_origin(origin, node, called)
        return value

    def _other(self, node: ast.expr, scope: Scope) -> Value:
        """Literals, containers, conditionals, comprehensions, lambdas."""
        if isinstance(node, ast.Constant):
            return NUMBER if isinstance(node.value, int | float | complex) else NONE
        if isinstance(node, ast.Lambda):
            return self._lambda(node, scope)
        if isinstance(node, ast.NamedExpr):
            value = self._eval(node.value, scope)
            self._bind(node.target, value, scope, strong=False)
            return value
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = Scope(scope)
            for generator in node.generators:
                value = self._elements(self._eval(generator.iter, inner))
                self._bind(generator.target, value, inner, strong=False)
                for condition in generator.ifs:
                    self._eval(condition, inner)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            return _gathered([self._eval(part, inner) for part in parts])
        if isinstance(node, ast.IfExp):
            self._eval(node.test, scope)
            return self._eval(node.body, scope) | self._eval(node.orelse, scope)
        values = [self._eval(child, scope) for child in _expressions(node)]
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            return _gathered(values)
        if isinstance(node, ast.BoolOp | ast.Starred | ast.Await):
            return frozenset(itertools.chain.from_iterable(values))
        return NONE

    def _lambda(self, node: ast.Lambda, scope: Scope) -> Value:
        function = self.by_node.get(id(node))
        if function is None:
            key = f"<func:lambda:{node.lineno}:{node.col_offset}>"
            function = self.by_node[id(node)] = Function(key, node, scope)
            self.functions[key] = function
        function.scope = scope
        if self.reaching:
            self.reached.add(function.key)
        return frozenset([function.key])

    def _lookup(self, name: str, scope: Scope) -> Value:
        holder = self._holder(name, scope)
        return frozenset([f"builtins.{name}"]) if holder is None else holder.names[name]

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Value:
        if node.attr in SLY_ATTRIBUTES:
            self._report("dynamic", f"access to {node.attr} is not allowed", node)
        if node.attr in HOOKS:
            self._report("dynamic", f"{node.attr} runs code that is not in forward", node)
        if node.attr in FILE_METHODS:
            self._report("file", f"{node.attr} is not allowed", node)
        base = self._eval(node.value, scope, inner=True)
        found: set[str] = set()
        for origin in base or frozenset(["<unknown>"]):
            found |= self._attribute_of(origin, node.attr)
        if not base and not found and self.reaching and node.attr in ATEN_CALLS:
            if node.attr not in self._bound_names():
                return frozenset([f"<tensor>.{node.attr}"])
        return frozenset(found)

    def _attribute_of(self, origin: str, attr: str) -> Value:
        """What `origin.attr` may be."""
        if (
            origin == "<tensor>"
            or origin.startswith("<tensor>.")
            and self._is_tensor(frozenset([origin]))
        ):
            return frozenset([f"<tensor>.{attr}"])
        if origin == "<ext>":
            return frozenset(["<extfn>"])
        if origin.startswith(("<obj:", "<class:", "<super", "<unknown>")):
            if origin.startswith("<super"):
                return frozenset([f"<super>.{attr}"])
            if attr == "apply" and origin.startswith("<class:"):
                return frozenset([f"<apply:{origin[7:-1]}>"])
            found = self.attributes.get(attr, NONE)
            for key in found:
                if key.startswith("<func:") and self.functions[key].is_property:
                    if self.reaching:
                        self.reached.add(key)
                    found = found | self.functions[key].returns
            return found
        if origin.startswith("<"):
            return frozenset([f"{origin}.{attr}"]) if origin in ("<tensors>", "<extfn>") else NONE
        return frozenset([_canonical(f"{origin}.{attr}")])

    def _subscript(self, node: ast.Subscript, scope: Scope) -> Value:
        base = self._eval(node.value, scope, inner=False)
        self._eval(node.slice, scope)
        return self._elements(base)

    @staticmethod
    def _elements(value: Value) -> Value:
        """What indexing or iterating over a value gives."""
        found = set[str]()
        for origin in value:
            if origin == "<tensors>":
                found.add("<tensor>")
            elif origin.startswith("<tensor>."):
                found |= NUMBER if origin[9:] in _NUMBER_NAMES else TENSOR
            elif origin.startswith(("<", "torch.")):
                found.add(origin)
        return frozenset(found)

    def _operator(self, node: ast.AST, operands: Sequence[ast.expr], scope: Scope) -> Value:
        """Arithmetic or comparison: flagged on tensors in code that forward reaches."""
        values = [self._eval(operand, scope) for operand in operands]
        identity = isinstance(node, ast.Compare) and all(
            isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops
        )
        logical = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        if identity or logical:
            return NONE
        if not any(self._is_tensor(value) for value in values):
            if any("<tensors>" in value for value in values):
                return TENSORS
            return NUMBER if all(value == NUMBER for value in values) else NONE
        if self.reaching:
            self._report(
                "tensor_operator",
                "arithmetic on tensors is done by PyTorch; do it inside your own kernel",
                node,
            )
        return TENSOR

    @staticmethod
    def _is_tensor(value: Value) -> bool:
        """Whether a value may be a tensor: named so, or a view attribute such as x.T."""
        return any(
            origin == "<tensor>"
            or origin.startswith("<tensor>.")
            and origin[9:] in ("T", "mT", "H", "mH", "data", "grad")
            for origin in value
        )

    # ------------------------------------------------------------------------------------- calls

    def _call(self, node: ast.Call, scope: Scope) -> Value:
        callees = self._eval(node.func, scope, called=True)
        arguments = [self._eval(argument, scope) for argument in node.args]
        keywords = {k.arg or "**": self._eval(k.value, scope) for k in node.keywords}
        if isinstance(node.func, ast.Attribute):
            self._register(node)
        result = set[str]()
        for origin in callees:
            result |= self._result(origin, node, arguments, keywords)
        return frozenset(result)

    def _result(
        self,
        origin: str,
        node: ast.Call,
        arguments: list[Value],
        keywords: dict[str, Value],
    ) -> Value:
        """What calling `origin` gives."""
        if origin == "<extfn>":
            self.calls_extension |= self.reaching
            return TENSOR
        if origin in LOADERS:
            self.loads[id(node)] = node
            return EXTENSION
        if origin.startswith("<func:"):
            return self._pass(self.functions[origin], arguments, keywords)
        if origin.startswith("<apply:"):  # torch.autograd.Function: forward gets a context first
            return self._call_object(f"<obj:{origin[7:-1]}>", [NONE, *arguments], keywords)
        if origin.startswith(("<class:", "<obj:")):
            return self._call_object(origin, arguments, keywords)
        if origin.startswith("<tensor>."):
            return self._method_result(origin[9:])
        if origin.startswith("builtins."):
            return self._builtin(origin[9:], node, arguments)
        if origin in ("functools.partial", "functools.wraps", "copy.copy", "copy.deepcopy"):
            return arguments[0] if arguments else NONE
        if origin == "importlib.import_module":
            return self._constant_name(node, 0)
        if origin.startswith(("torch.nn.ParameterList", "torch.nn.ParameterDict")):
            return TENSORS
        if origin.startswith(("torch.nn.ModuleList", "torch.nn.ModuleDict")):
            return frozenset(itertools.chain.from_iterable(arguments))
        return self._library(origin, node, arguments)

    def _register(self, node: ast.Call) -> None:
        """self.register_buffer("name", ...) and register_parameter make a tensor attribute."""
        if node.func.attr in ("register_buffer", "register_parameter") and node.args:  # type: ignore[attr-defined]
            for name in fold(node.args[0], self._strings()):
                self.attributes[name] = self.attributes.get(name, NONE) | TENSOR

    def _library(self, origin: str, node: ast.Call, arguments: list[Value]) -> Value:
        """A call of something imported."""
        if origin.startswith(("operator.", "math.", "numpy.")):
            if any(self._is_tensor(value) for value in arguments):
                if self.reaching:
                    self._report(
                        "torch_compute", f"{origin} on tensors: do it inside your own kernel", node
                    )
                return TENSOR
            return NUMBER
        if origin.startswith("torch.Tensor."):
            return self._method_result(origin.split(".")[2])
        if not origin.startswith("torch."):
            return NONE
        queries = TORCH_PLUMBING["queries"] | {"device", "finfo", "iinfo", "Size"}
        last = origin.split(".")[1]
        if last in queries or last in ("cuda", "backends", "version", "utils", "no_grad"):
            return NONE
        return TENSORS if last in ("split", "chunk", "unbind") else TENSOR

    @staticmethod
    def _method_result(name: str) -> Value:
        if name in ("unbind", "chunk", "split"):
            return TENSORS
        return NUMBER if name in _NUMBER_NAMES else TENSOR

    def _pass(
        self, function: Function, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """Hand arguments to a function of the file; what it returns."""
        names = [a.arg for a in [*function.node.args.posonlyargs, *function.node.args.args]]
        if function.owner and names and not self._is_static(function):
            names = names[1:]
        for name, value in itertools.zip_longest(names[: len(arguments)], arguments, fillvalue="*"):
            if isinstance(value, frozenset):
                function.given[name] = function.given.get(str(name), NONE) | value  # type: ignore[index]
        for name, value in keywords.items():
            function.given[name] = function.given.get(name, NONE) | value
        if self.reaching:
            self.reached.add(function.key)
        return function.returns

    def _call_object(
        self, origin: str, arguments: list[Value], keywords: dict[str, Value]
    ) -> Value:
        """Making an object of a class of the file, or calling one."""
        name = origin.split(":")[1][:-1]
        methods = self.methods.get(name, {})
        if origin.startswith("<class:"):
            if "__init__" in methods:
                self._pass(self.functions[methods["__init__"]], arguments, keywords)
            return frozenset([f"<obj:{name}>"])
        result = NONE
        for method in ("forward", "__call__"):
            if method in methods:
                result |= self._pass(self.functions[methods[method]], arguments, keywords)
        return result

    def _builtin(self, name: str, node: ast.Call, arguments: list[Value]) -> Value:
        if name in ("getattr", "setattr", "hasattr"):
            return self._getattr(name, node, arguments)
        if name == "__import__":
            return self._constant_name(node, 0)
        if name == "super":
            return frozenset(["<super>"])
        if name == "type" and any(self._is_tensor(v) for v in arguments):
            return frozenset(["torch.Tensor"])
        touched = any(self._is_tensor(v) or "<tensors>" in v for v in arguments)
        if name in ("sum", "max", "min", "abs", "pow", "round", "divmod") and touched:
            if self.reaching:
                self._report(
                    "torch_compute", f"{name}() of tensors: do it inside your own kernel", node
                )
            return TENSOR
        if name in (
            "int",
            "float",
            "len",
            "range",
            "min",
            "max",
            "abs",
            "sum",
            "round",
            "bool",
            "pow",
        ):
            return NUMBER
        if name in (
            "tuple",
            "list",
            "sorted",
            "reversed",
            "zip",
            "enumerate",
            "iter",
            "set",
            "dict",
        ):
            return _gathered(arguments)
        if name in ("next", "map", "filter"):
            return frozenset(itertools.chain.from_iterable(map(self._elements, arguments)))
        return NONE

    def _constant_name(self, node: ast.Call, place: int) -> Value:
        """The module that a constant string names."""
        names = fold(node.args[place], {}) if len(node.args) > place else []
        return frozenset(_canonical(name) for name in names)

    def _getattr(self, name: str, node: ast.Call, arguments: list[Value]) -> Value:
        """getattr and setattr: as the attribute itself when its name is constant."""
        if len(node.args) < 2 or name == "hasattr":
            return NONE
        own = bool(arguments[0]) and all(o.startswith(("<obj:", "<ext>")) for o in arguments[0])
        names = fold(node.args[1], self._strings())
        if name == "setattr":
            if not own:
                self._report("tamper", "setattr on something that is not self", node)
            for attr in names:
                value = arguments[2] if len(arguments) > 2 else NONE
                self.attributes[attr] = self.attributes.get(attr, NONE) | value
            return NONE
        for attr in set(names) & SLY_ATTRIBUTES:
            self._report("dynamic", f"access to {attr} is not allowed", node)
        if names:
            pairs = itertools.product(arguments[0], names)
            found = [self._attribute_of(origin, attr) for origin, attr in pairs]
            return frozenset(itertools.chain.from_iterable(found))
        if not own:
            self._report(
                "dynamic", "getattr with a computed name on something else than self", node
            )
        extension = "<ext>" in arguments[0]
        return frozenset(["<extfn>"] if extension else ["<tensor>"])

    # ------------------------------------------------------------------------------------- rules

    def _report(self, rule: str, message: str, node: ast.AST | int, fatal: bool = True) -> None:
        if not self.checking or len(self.found) > 200:
            return
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        text = self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""
        self.found.setdefault((rule, line, message), Finding(rule, message, line, text, fatal))

    def _check_store(self, target: ast.Attribute, base: Value) -> None:
        for origin in base:
            if origin.startswith("torch.backends") or origin.startswith("<"):
                continue
            if origin.startswith("builtins.") and origin != "builtins.__builtins__":
                if origin[9:] not in ("int", "float", "print", "len", "super", "isinstance"):
                    continue
            self._report("tamper", f"assignment to {origin}.{target.attr} changes a module", target)

    def _check_origin(self, origin: str, node: ast.AST, called: bool) -> None:
        """Judge one thing that an expression may be."""
        if not self.checking or origin in MODULES:
            return
        if origin.startswith("<"):
            self._check_value(origin, node, called)
            return
        for name, rule in DANGEROUS.items():
            if origin == name or origin.startswith(name + "."):
                self._report(rule, f"{origin.removeprefix('builtins.')} is not allowed", node)
                return
        for module, parts in PARTS.items():
            rest = origin.removeprefix(module + ".")
            if rest != origin and rest.split(".")[0] not in parts:
                self._report("dynamic", f"{origin} is not allowed", node)
                return
        top = origin.split(".")[0]
        if top in PIVOTS and top not in IMPORTS and top != "builtins":
            self._report("import", f"{origin} is not allowed", node)
        if origin == "builtins.Model":
            self._report(
                "inherit", "the reference Model is not there; write ModelNew on its own", node
            )
        if origin.startswith("torch."):
            self._check_torch(origin, node, called)

    def _check_value(self, origin: str, node: ast.AST, called: bool) -> None:
        if origin.startswith("<tensor>.") and self.reaching and origin[9:] not in _TENSOR_NAMES:
            name = origin[9:]
            self._report(
                "tensor_method",
                f"the tensor method {name} is computed by PyTorch; do it inside your own kernel",
                node,
            )
        elif origin in ("<super>.forward", "<super>.__call__"):
            self._report("inherit", "super().forward is the reference's work; write your own", node)

    def _check_torch(self, origin: str, node: ast.AST, called: bool) -> None:
        parts = origin.split(".")
        if any(p.startswith("__") and p not in FINE_DUNDERS for p in parts):
            self._report("dynamic", f"{origin} is not allowed", node)
        elif origin.startswith("torch.nn.functional."):
            self._report(
                "functional", f"{origin} is computed by PyTorch; write it in your own kernel", node
            )
        elif origin.startswith("torch.nn."):
            if parts[2] not in NN_ALLOWED and origin != "torch.nn.modules.module.Module":
                self._report(
                    "torch_nn", f"{origin} is not allowed; write it in your own kernel", node
                )
        elif origin.startswith(COMPUTE_SPACES):
            if self.reaching or not called:
                self._compute(origin, node)
        elif any(origin == name or origin.startswith(name + ".") for name in COMPILERS):
            self._report("compiler", f"{origin} is not allowed; write the kernel yourself", node)
        elif origin.startswith("torch.Tensor."):
            if parts[2] not in _TENSOR_NAMES and (self.reaching or not called):
                self._compute(origin, node)
        elif not _torch_plumbing(origin) and (self.reaching or not called):
            self._compute(origin, node)

    def _compute(self, origin: str, node: ast.AST) -> None:
        self._report(
            "torch_compute", f"{origin} is computed by PyTorch; do it inside your own kernel", node
        )

    # -------------------------------------------------------------------------------- whole file

    def _whole_file(self) -> None:
        """Rules about syntax alone."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Try | ast.TryStar):
                self._report("try", "try/except is not allowed: a failing kernel must fail", node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name in ("__torch_function__", "__torch_dispatch__"):
                    self._report("tensor_subclass", f"{node.name} hides work", node)
                elif node.name in ("__exit__", "__aexit__"):
                    self._report("try", "__exit__ can swallow errors", node)
            elif isinstance(node, ast.ClassDef) and _empty(node.body):
                self._report("pass", f"class {node.name} is empty", node)

    def _model_class(self) -> str | None:
        """Rules about ModelNew itself; its class, or None when there is nothing more to check."""
        name = self._model_name()
        if not name:
            self._report("format", "there is no class ModelNew", 0)
            return None
        node, bases = self.classes[name], self._all_bases(name)
        if "<class:Model>" in bases or "builtins.Model" in bases:
            self._report("inherit", "ModelNew must not inherit from Model; write its forward", node)
            return None
        if not bases & {"torch.nn.Module", "torch.nn.modules.module.Module"}:
            self._report("format", "ModelNew must be a subclass of torch.nn.Module", node)
            return None
        forwards = [
            self.functions[self.methods[c[7:-1]]["forward"]]
            for c in (f"<class:{name}>", *bases)
            if "forward" in self.methods.get(c[7:-1], {})
        ]
        if not forwards:
            if not _empty(node.body):
                self._report("format", "ModelNew has no forward", node)
        elif _empty(getattr(forwards[0].node, "body", [])):
            self._report("pass", "ModelNew's forward is empty", forwards[0].node)
        return name

    def _all_bases(self, name: str) -> Value:
        found, todo = set[str](), [name]
        while todo:
            for base in self.bases.get(todo.pop(), NONE):
                if base not in found:
                    found.add(base)
                    if base.startswith("<class:"):
                        todo.append(base[7:-1])
        return frozenset(found)

    # ------------------------------------------------------------------------------------ native

    def _strings(self) -> dict[str, list[str]]:
        if not hasattr(self, "_string_table"):
            self._string_table = string_table(self.tree)
        return self._string_table

    def _native(self, model: str) -> None:
        """The C++ and CUDA sources of every load_inline call, and whether forward uses them."""
        node = self.classes[model]
        if not self.loads:
            self._report(
                "no_load_inline",
                "no kernel is built; use torch.utils.cpp_extension.load_inline",
                node,
            )
        elif not self.calls_extension and not self._names_bound():
            self._report("unused_kernel", "ModelNew's forward never calls a bound function", node)
        table = {**self._strings(), HOLE: ["1"]}
        missing: list[str] = []
        for call in self.loads.values():
            sources, functions, known = _request(call, table)
            if not known:
                loose = [text for _, text in loose_sources(self.tree)]
                sources = list(dict.fromkeys([*sources, *loose]))
            if sum(map(len, sources)) > MAX_BYTES:
                self._report("format", f"the sources are longer than {MAX_BYTES} characters", call)
                continue
            native = Native(sources, self.target, self.purity)
            for rule, message, line in native.findings:
                self._report_native(rule, message, line, call)
            bound = functions or [f for f in native.bound.values() if f in native.functions]
            if not bound and native.bound:
                bound = ["PYBIND11_MODULE"]
            missing.append(native.own_kernel(bound) if known else "")
            self._flags(call, table)
        if missing and all(missing):
            self._report("no_kernel", missing[0], next(iter(self.loads.values())))

    def _flags(self, call: ast.Call, table: dict[str, list[str]]) -> None:
        """Compiler flags that load code or files (the builder has the list of allowed ones)."""
        for keyword in call.keywords:
            if keyword.arg and keyword.arg.startswith("extra_"):
                for text in _texts(keyword.value, table)[0]:
                    for flag in text.split():
                        if BAD_FLAGS.match(flag):
                            self._report("flags", f"the compiler flag {flag} is not allowed", call)

    def _report_native(self, rule: str, message: str, evidence: str, call: ast.Call) -> None:
        """A finding in a source string, at the line of the file that holds it."""
        places = (n for n, line in enumerate(self.lines, 1) if evidence and evidence in line)
        line = next(places, call.lineno)
        key = (rule, line, message)
        self.found.setdefault(key, Finding(rule, message, line, evidence[:200], True))

    def _bound_names(self) -> set[str]:
        """The functions that all load_inline calls bind, as far as they are constants."""
        table = self._strings()
        return {name for call in self.loads.values() for name in _request(call, table)[1]}

    def _names_bound(self) -> bool:
        """Whether code that forward reaches calls a bound name (if values were not followed)."""
        bound = self._bound_names()
        for key in self.reached:
            for node in ast.walk(self.functions[key].node):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    if node.func.attr in bound:
                        return True
        return False


# ----------------------------------------------------------------------------------- helpers


def _canonical(name: str) -> str:
    """One name for things torch offers under several."""
    for long, short in (
        ("torch.functional.", "torch."),
        ("torch._tensor.Tensor", "torch.Tensor"),
        ("torch.nn.modules.module.Module", "torch.nn.Module"),
        ("torch.nn.parameter.", "torch.nn."),
        ("torch.autograd.function.Function", "torch.autograd.Function"),
        ("posix.", "os."),
    ):
        if name.startswith(long):
            name = short + name[len(long) :]
    parts = name.split(".")  # os.sys, torch.cuda.torch: a module reached through another one
    for place in range(len(parts) - 1, 0, -1):
        if parts[place].lstrip("_") in PIVOTS:
            return ".".join([parts[place].lstrip("_"), *parts[place + 1 :]])
    return name


def _torch_plumbing(origin: str) -> bool:
    rest = origin[len("torch.") :]
    parts = rest.split(".")
    if parts[0] in _PLUMBING_NAMES:
        return True
    return any(entry.endswith(".") and (rest + ".").startswith(entry) for entry in _PLUMBING_NAMES)


def _annotation(node: ast.expr | None) -> Value | None:
    """The value that an annotation promises; None where it says nothing."""
    if node is None:
        return None
    text = ast.unparse(node)
    if "Tensor" in text:
        return TENSORS if re.search(r"[Ll]ist|[Tt]uple|Sequence|Iterable", text) else TENSOR
    return NUMBER if re.fullmatch(r"'?(int|float|bool)'?( \| None)?", text) else None


def _gathered(values: Sequence[Value]) -> Value:
    """A container of values: tensors in it are no longer arithmetic by themselves."""
    found = set(itertools.chain.from_iterable(values))
    if "<tensor>" in found:
        found = (found - {"<tensor>"}) | {"<tensors>"}
    return frozenset(found)


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions directly below a node, through f-string and slice nodes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword):
            yield child.value


def _empty(body: Sequence[ast.stmt]) -> bool:
    """Whether a body is only pass, ... or a docstring."""
    return all(
        isinstance(s, ast.Pass) or isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)
        for s in body
    )


def string_table(tree: ast.Module) -> dict[str, list[str]]:
    """Every name that is assigned constant text anywhere, with the texts it may be."""
    table: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in _pairs(node):
                values = fold(value, table)
                if isinstance(target, ast.Name) and values:
                    table[target.id] = (table.get(target.id, []) + values)[:8]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            more = fold(node.value, table)
            pairs = itertools.product(table.get(node.target.id, []), more)
            longer = [a + b for a, b in itertools.islice(pairs, 8) if len(a + b) <= MAX_BYTES]
            table[node.target.id] = longer
    return table


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, tuples of the same length taken apart."""
    for target in node.targets:
        both = (target, node.value)
        if all(isinstance(side, ast.Tuple | ast.List) for side in both):
            left, right = (side.elts for side in both)  # type: ignore[attr-defined]
            if len(left) == len(right):
                yield from zip(left, right, strict=True)
                continue
        yield target, node.value


def fold(node: ast.expr, table: dict[str, list[str]]) -> list[str]:
    """The texts that a constant expression may be; [] when it is not constant, or huge."""
    return [text for text in _fold(node, table) if len(text) <= MAX_BYTES]


def _fold(node: ast.expr, table: dict[str, list[str]]) -> list[str]:
    if isinstance(node, ast.Constant):
        return [str(node.value)] if isinstance(node.value, str | int | float) else []
    if isinstance(node, ast.Name):
        return table.get(node.id, [])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        pairs = itertools.product(fold(node.left, table), fold(node.right, table))
        return [a + b for a, b in itertools.islice(pairs, 8)]
    if isinstance(node, ast.JoinedStr):
        return _fold_parts([v for v in node.values], table)
    if isinstance(node, ast.FormattedValue):
        return fold(node.value, table)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["-" + text for text in fold(node.operand, table)]
    if isinstance(node, ast.IfExp):
        return fold(node.body, table) + fold(node.orelse, table)
    if isinstance(node, ast.Call):
        return _fold_call(node, table)
    return []


def _fold_parts(parts: Sequence[ast.expr], table: dict[str, list[str]]) -> list[str]:
    choices = [
        fold(part, table) or (table.get(HOLE, []) if isinstance(part, ast.FormattedValue) else [])
        for part in parts
    ]
    return ["".join(choice) for choice in itertools.islice(itertools.product(*choices), 8)]


def _fold_call(node: ast.Call, table: dict[str, list[str]]) -> list[str]:
    """Calls that only reshape text: dedent, strip, replace, join, str, format with constants."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("dedent", "str") and len(node.args) == 1:
        return fold(node.args[0], table)
    if not isinstance(node.func, ast.Attribute):
        return []
    base = fold(node.func.value, table)
    if name in ("strip", "lstrip", "rstrip", "lower", "upper") and not node.args:
        change: Callable[[str], str] = getattr(str, name)
        return [change(text) for text in base]
    arguments = [fold(argument, table) for argument in node.args]
    if name == "replace" and len(arguments) == 2 and all(arguments):
        return [text.replace(arguments[0][0], arguments[1][0]) for text in base]
    if name == "join" and len(node.args) == 1 and isinstance(node.args[0], ast.List | ast.Tuple):
        parts = [fold(element, table) for element in node.args[0].elts]
        return [text.join(p[0] for p in parts) for text in base] if all(parts) else []
    return []


def _request(call: ast.Call, table: dict[str, list[str]]) -> tuple[list[str], list[str], bool]:
    """(sources, bound functions, whether every source is known) of a load_inline call."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    for place, key in ((1, "cpp_sources"), (2, "cuda_sources"), (3, "functions")):
        if len(call.args) > place:
            given[key] = call.args[place]
    known = "sources" not in given and None not in given and len(call.args) < 5
    sources: list[str] = []
    for key in ("cpp_sources", "cuda_sources"):
        texts, complete = _texts(given.get(key), table)
        sources += texts
        known &= complete
    functions = given.get("functions")
    if isinstance(functions, ast.Dict):
        names = [text for key in functions.keys if key for text in fold(key, table)]
    else:
        names = _texts(functions, table)[0]
    return sources, names, known


def _texts(node: ast.expr | None, table: dict[str, list[str]]) -> tuple[list[str], bool]:
    """The texts of an argument that is a string or a list of strings, and whether all are known."""
    if node is None:
        return [], True
    if isinstance(node, ast.Constant) and node.value in ("", None):
        return [], True
    if isinstance(node, ast.List | ast.Tuple):
        parts = [fold(element, table) for element in node.elts]
        return list(itertools.chain.from_iterable(parts)), all(parts)
    texts = fold(node, table)
    return texts, bool(texts)


def loose_sources(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, text) of every string constant that looks like C++."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.search(r"#include|__global__|[;{]\s*\n|\)\s*\{", node.value):
                found.append((node.lineno, node.value))
    return found
