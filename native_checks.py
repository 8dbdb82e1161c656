"""Static checks of the C++ and CUDA text of an answer; `static_checks.check` is the entrance.

A tree-sitter parse, walked once in source order with block scopes. What is followed: names
(namespace aliases, using, typedef), which variables are torch tensors (declared as such, or `auto`
from a tensor expression), which functions are defined, what each calls and launches.
That is enough to tell `at::matmul(a, b)`, `q::matmul(a, b)` after `namespace q = at`, plain
`matmul(a, b)` found by argument-dependent lookup, `a.matmul(b)` and `a + b` on tensors from
`expf(v)`, `box.sum()` and `i + 1` on everything else. Comments and string literals are never looked
at; macro bodies are parsed as if they stood in a function.

PyTorch's C++ side is a white list: `PLUMBING` and `METHODS` name what only allocates or looks, each
group with its reason. All else in `at::`, `torch::`, `c10::` counts as PyTorch doing the work.

This is a filter with reasons, not the defence: what the process does is watched where it runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import tree_sitter
import tree_sitter_cpp
import tree_sitter_cuda
from tree_sitter import Node


@dataclass(frozen=True)
class Finding:
    """One thing a static check objects to."""

    rule: str  # key of static_checks.RULES
    message: str  # one line for the model: what is wrong, what to do; same text for the same answer
    line: int  # line of the Python answer, from 1; 0 if there is none
    evidence: str  # that source line, stripped
    fatal: bool  # whether the answer is refused


# What of at::, torch::, c10:: an own kernel needs. Full path, or last component with any prefix.
PLUMBING: dict[str, frozenset[str]] = {
    "types, nothing happens": frozenset(
        "Tensor TensorOptions TensorList ArrayRef IntArrayRef ScalarType Scalar Dtype Device"
        " DeviceType DeviceIndex Layout MemoryFormat optional nullopt nullopt_t Half BFloat16"
        " complex OptionalArrayRef CppTypeToScalarType opmath_type acc_type acc_type_device"
        " OptionalTensorRef StringType PackedTensorAccessor32 PackedTensorAccessor64"
        " GenericPackedTensorAccessor TensorAccessor RestrictPtrTraits DefaultPtrTraits"
        " SmallVector string_view Float Double Int Long Bool Byte Char Short CPU CUDA Contiguous"
        " ChannelsLast Strided IValue MaybeOwned Stream Type".split()
    ),
    "allocation; contents constant": frozenset(
        "empty empty_like empty_strided zeros zeros_like ones ones_like full full_like new_empty"
        " from_blob tensor scalar_tensor".split()
    ),
    "options and queries": frozenset(
        "dtype device options layout requires_grad memory_format toString elementSize"
        " typeMetaToScalarType is_available device_count current_device get_num_threads"
        " get_thread_num in_parallel_region divup GetDefaultDtype can_cast promoteTypes"
        " isFloatingType isIntegralType".split()
    ),
    "streams, devices, launch checks": frozenset(
        "getCurrentCUDAStream getDefaultCUDAStream getStreamFromPool getStreamFromExternal"
        " setCurrentCUDAStream CUDAStream CUDAStreamGuard CUDAGuard OptionalCUDAGuard CUDAEvent"
        " DeviceGuard OptionalDeviceGuard getCurrentDeviceProperties getDeviceProperties warp_size"
        " CUDAMultiStreamGuard ATenCeilDiv OptionalCUDAStreamGuard kCUDABlockReduceMaxThreads"
        " CUDAGraph getCurrentStream".split()
    ),
    "grad mode": frozenset(
        "NoGradGuard InferenceMode AutoGradMode AutoDispatchBelowAutograd".split()
    ),
    "own loops run in parallel, no arithmetic of its own": frozenset(["parallel_for"]),
    "errors": frozenset("Error ValueError NotImplementedError check str".split()),
    "indexing helpers, views": frozenset("Slice indexing None Ellipsis".split()),
}
PLUMBING_NAMES = frozenset().union(*PLUMBING.values())
# Namespaces that are fine as a whole: SIMD registers and index arithmetic for own loops.
PLUMBING_SPACES = ("at::vec", "c10::guts", "c10::literals", "c10::irange", "torch::headeronly")

# Tensor methods that only look, allocate, view, copy or cast.
METHODS: dict[str, frozenset[str]] = {
    "queries": frozenset(
        "size sizes sym_size stride strides numel dim ndimension options device dtype scalar_type"
        " type is_cuda is_cpu is_contiguous is_non_overlapping_and_dense defined get_device"
        " element_size itemsize nbytes layout is_sparse is_floating_point is_complex is_same"
        " is_alias_of has_storage storage_offset requires_grad use_count key_set is_quantized"
        " suggest_memory_format is_floating_point is_signed item toString name".split()
    ),
    "raw memory": frozenset(
        "data_ptr mutable_data_ptr const_data_ptr accessor packed_accessor packed_accessor32"
        " packed_accessor64 data storage unsafeGetTensorImpl".split()
    ),
    "views": frozenset(
        "view view_as reshape reshape_as flatten squeeze unsqueeze transpose t permute expand"
        " expand_as slice narrow select unbind chunk split movedim swapaxes as_strided detach"
        " alias unflatten mT diagonal".split()
    ),
    "allocation, copies, casts": frozenset(
        "contiguous clone copy_ zero_ fill_ resize_ resize_as_ to cpu cuda toType new_empty"
        " new_zeros new_ones new_full new_empty_strided set_requires_grad requires_grad_ reset"
        " pin_memory record_stream".split()
    ),
}
METHOD_NAMES = frozenset().union(*METHODS.values())
MAX_DEPTH = 400  # of the syntax tree; refused beyond, since the checks cost its square
NOT_TENSOR_METHODS = METHODS["queries"] | METHODS["raw memory"] - {"data"}

# Names of ATen functions that argument-dependent lookup may find; those of <cmath> and <algorithm>
# count only when an argument is known to be a tensor.
ATEN_CALLS = frozenset(
    "matmul mm bmm addmm addmv addbmm baddbmm einsum linear conv1d conv2d conv3d convolution"
    " conv_transpose1d conv_transpose2d conv_transpose3d softmax log_softmax layer_norm group_norm"
    " batch_norm instance_norm rms_norm relu relu_ leaky_relu gelu silu sigmoid mish hardswish"
    " hardtanh cumsum cumprod logsumexp max_pool2d avg_pool2d adaptive_avg_pool2d matrix_exp"
    " tensordot bilinear scaled_dot_product_attention cross_entropy_loss mse_loss embedding"
    " native_layer_norm".split()
)

SYSTEM = frozenset(
    "system popen dlopen dlsym dlmopen fork vfork execl execle execlp execv execve execvp"
    " posix_spawn ptrace socket connect bind listen accept sendto recvfrom process_vm_readv"
    " process_vm_writev kill syscall prctl setenv putenv unsetenv fopen freopen open openat creat"
    " ifstream ofstream fstream filesystem mprotect mmap shm_open memfd_create pthread_create"
    " daemon atexit on_exit raise signal sigaction setjmp longjmp unlink rename clone3 _exit"
    " quick_exit abort _Exit".split()
)
PYTHON_CALLS = re.compile(
    r"Py(Run|Import|Object|Eval|Module|Dict|Sys|GILState|Frame|Thread|Interpreter|Callable)_\w+"
)
PYBIND_FINE = frozenset(
    "arg module module_ gil_scoped_release gil_scoped_acquire return_value_policy none init"
    " class_ kw_only literals".split()
)
LIBRARY = re.compile(
    r"(cublas|cudnn|cusparse|cufft|cusolver|cutensor|nvrtc|nvjitlink|mkl_|cblas_|LAPACKE_|dnnl)\w+$"
    r"|(s|d|c|z)gemm_$"
)
HOOKABLE = re.compile(
    r"(cuda|cu)[A-Z]\w+$|clock_gettime$|gettimeofday$|time$|mem(cpy|cmp|set|move)$|(m|c|re)alloc$"
    r"|free$|write$|read$|send$|recv$"
)
STD_LOOPS = frozenset(
    "transform for_each accumulate reduce transform_reduce inclusive_scan exclusive_scan"
    " partial_sum inner_product generate parallel_for".split()
)


@dataclass
class Function:
    """A function (or macro) defined in the text."""

    name: str
    kernel: bool = False  # __global__
    device: bool = False  # __device__ or __global__: inline PTX is at home there
    loops: bool = False
    empty: bool = True
    uses: set[str] = field(default_factory=set)  # every identifier in the body
    launches: set[str] = field(default_factory=set)  # kernels started here


@dataclass
class Scope:
    """Names declared in a block, each "tensor", "tensors" (a container) or ""."""

    parent: Scope | None
    names: dict[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


@functools.cache
def _parser(target: str) -> tree_sitter.Parser:
    grammar = tree_sitter_cuda if target == "cuda" else tree_sitter_cpp
    return tree_sitter.Parser(tree_sitter.Language(grammar.language()))


def _text(node: Node | None) -> str:
    return node.text.decode("utf-8", "replace") if node is not None and node.text else ""


def _splice(source: str) -> str:
    """Join lines that end in a backslash inside a word, as the compiler's second phase does."""
    return re.sub(r"(?<=\w)\\\r?\n(?=\w)", "", source)


class Native:
    """The findings, functions and bindings of one or more sources that are compiled together.

    `findings` holds (rule, message, evidence line); `functions` what is defined; `bound` the
    functions that a hand-written PYBIND11_MODULE binds.
    """

    def __init__(self, sources: Sequence[str], target: str, purity: str = "strict") -> None:
        self.target, self.purity = target, purity
        self.findings: list[tuple[str, str, str]] = []
        self.functions: dict[str, Function] = {}
        self.bound: dict[str, str] = {}  # name in Python -> C++ function
        self.spaces: dict[str, str] = {}  # namespace alias -> namespace
        self.opened: set[str] = set()  # using namespace ...
        self.tensor_types = {"Tensor"}
        self.tensor_fields: dict[str, str] = {}  # struct members -> kind
        self.returned: dict[str, str] = {}  # function defined or declared here -> kind it returns
        self.macros: dict[str, Function] = {}
        self._open_calls: list[tuple[str, Node]] = []  # unqualified calls of ATen names
        self._lines: list[str] = []
        self._sources = [_splice(source) for source in sources]
        self._sources = [expand(text) if "##" in text else text for text in self._sources]
        for source in self._sources:
            self._lines = source.splitlines()
            self._walk(_parser(target).parse(source.encode()).root_node)
        self._settle_open_calls()

    # ---------------------------------------------------------------------------------- the walk

    def _walk(self, root: Node) -> None:
        """Depth first, in source order; an explicit stack, so that no nesting can exhaust ours."""
        self._visit(root, Scope(None), None)

    def _visit(self, root: Node, scope: Scope, function: Function | None) -> None:
        stack: list[tuple[Node, Scope, Function | None, int]] = [(root, scope, function, 0)]
        while stack:
            node, scope, function, depth = stack.pop()
            if depth > MAX_DEPTH:
                self._flag("format", "the C++ source is too deeply nested", root)
                continue
            handler = getattr(self, "_on_" + node.type, None)
            inner: tuple[Sequence[Node], Scope, Function | None] | None
            inner = handler(node, scope, function) if handler else (node.children, scope, function)
            if inner is not None:
                children, scope, function = inner
                stack.extend((child, scope, function, depth + 1) for child in reversed(children))

    def _flag(self, rule: str, message: str, node: Node) -> None:
        row = node.start_point[0]
        line = self._lines[row].strip() if row < len(self._lines) else _text(node)
        if len(self.findings) > 200:
            return
        if (entry := (rule, message, line)) not in self.findings:
            self.findings.append(entry)

    def _on_comment(self, node: Node, scope: Scope, function: Function | None) -> None:
        return None

    def _on_string_literal(self, node: Node, scope: Scope, function: Function | None) -> None:
        return None

    _on_raw_string_literal = _on_char_literal = _on_concatenated_string = _on_string_literal

    def _on_preproc_include(self, node: Node, scope: Scope, function: Function | None) -> None:
        path = node.child_by_field_name("path")
        bare = _text(path).strip('<>"').strip()
        if path is None or path.type not in ("system_lib_string", "string_literal"):
            self._flag("native_include", "#include needs a literal header name", node)
        elif bare.startswith(("/", "~")) or ".." in bare.split("/"):
            self._flag(
                "native_include", f"#include of {bare}: only library headers may be included", node
            )
        return None

    def _on_preproc_call(self, node: Node, scope: Scope, function: Function | None) -> None:
        directive = _text(node.child_by_field_name("directive"))
        if directive in ("#embed", "#import", "#include_next"):
            self._flag("native_include", f"{directive} is not allowed", node)
        return None

    def _on_preproc_def(self, node: Node, scope: Scope, function: Function | None) -> None:
        """A macro: its body is walked as if it were the body of a function of that name."""
        name = _text(node.child_by_field_name("name"))
        body = _text(node.child_by_field_name("value")).replace("\\\n", "\n")
        macro = self.macros.setdefault(name, Function(name))
        tree = _parser(self.target).parse(f"void m() {{ {body} ;}}".encode())
        definition = tree.root_node.named_children[0] if tree.root_node.named_children else None
        block = definition.child_by_field_name("body") if definition is not None else None
        if block is None:
            return None
        outer, self._lines = self._lines, [_text(node).splitlines()[0]] * (body.count("\n") + 1)
        self._visit(block, Scope(scope), macro)
        self._lines = outer
        return None

    _on_preproc_function_def = _on_preproc_def

    # ------------------------------------------------------------------------------------- names

    def _on_namespace_alias_definition(
        self, node: Node, scope: Scope, function: Function | None
    ) -> None:
        names = [_text(child) for child in node.named_children]
        if len(names) >= 2:
            self.spaces[names[0]] = self._canonical("::".join(names[1:]))
        return None

    def _on_using_declaration(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        target = self._canonical(_text(node.named_children[-1])) if node.named_children else ""
        if any(child.type == "namespace" for child in node.children):
            self.opened.add(target)
            return [], scope, function
        if target.split("::")[-1] == "Tensor":
            self.tensor_types.add("Tensor")
        return node.children, scope, function

    def _on_alias_declaration(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        kind = self._type_kind(_text(node.child_by_field_name("type")))
        if kind == "tensor":
            self.tensor_types.add(_text(node.child_by_field_name("name")))
        return node.children, scope, function

    def _on_type_definition(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        if self._type_kind(_text(node.child_by_field_name("type"))) == "tensor":
            self.tensor_types.add(_text(node.child_by_field_name("declarator")))
        return node.children, scope, function

    def _canonical(self, name: str) -> str:
        """A qualified name without spaces, template arguments and namespace aliases."""
        name = re.sub(r"\s+", "", name)
        while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
            name = shorter
        parts = name.removeprefix("::").split("::")
        for _ in range(8):
            if parts[0] not in self.spaces:
                break
            parts = self.spaces[parts[0]].split("::") + parts[1:]
        return "::".join(part for part in parts if part)

    def _type_kind(self, text: str) -> str:
        """ "tensor", "tensors" (a container of them) or "" for the text of a type."""
        if "Accessor" in text or "Options" in text:
            return ""
        names = set(re.findall(r"\w+", text))
        if not names & self.tensor_types and "TensorList" not in names:
            return ""
        return "tensors" if "<" in text or "TensorList" in names else "tensor"

    def _on_qualified_identifier(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        name = self._canonical(_text(node))
        self._check_name(name, node)
        if function is not None:
            function.uses.add(name.split("::")[-1])
        return list(_template_arguments(node)), scope, function

    def _check_name(self, name: str, node: Node) -> None:
        """A qualified name: PyTorch's work, Python, the operating system or a vendor library?"""
        parts = name.split("::")
        last = parts[-1]
        if parts[0] in ("at", "torch", "c10", "caffe2", "aten"):
            if not _is_plumbing(name):
                self._flag(
                    "native_compute",
                    f"{name} lets PyTorch do the work; write it inside your own kernel",
                    node,
                )
        elif parts[0] in ("py", "pybind11"):
            if last not in PYBIND_FINE:
                self._flag("native_python", f"{name} calls into Python from C++", node)
        elif parts[0] in ("cub", "cutlass", "thrust") and self.purity == "strict":
            if (
                parts[0] == "thrust"
                and len(parts) > 1
                or "device" in parts
                or any(part.startswith("Device") for part in parts)
            ):
                self._flag("native_library", f"{name}: write the algorithm yourself", node)
        elif parts[0] == "std":
            if set(parts) & SYSTEM:
                self._flag("native_system", f"{name} is not allowed in a kernel", node)
        else:
            self._check_plain(last, node)

    def _check_plain(self, name: str, node: Node) -> None:
        """An unqualified name that is not declared in the text."""
        if name in SYSTEM:
            self._flag("native_system", f"{name} is not allowed in a kernel", node)
        elif PYTHON_CALLS.fullmatch(name):
            self._flag("native_python", f"{name} calls into Python from C++", node)
        elif self.purity == "strict" and LIBRARY.match(name):
            self._flag(
                "native_library", f"{name} is a vendor library; write the kernel yourself", node
            )

    def _on_identifier(self, node: Node, scope: Scope, function: Function | None) -> None:
        name = _text(node)
        if function is not None:
            function.uses.add(name)
        if scope.get(name) is None and name not in self.functions:
            self._check_plain(name, node)
        return None

    # ---------------------------------------------------------------------- declarations, scopes

    def _on_function_definition(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        declarator = _function_declarator(node)
        name = _text(declarator.child_by_field_name("declarator")) if declarator is not None else ""
        body = node.child_by_field_name("body")
        text = node.text or b""
        cut = body.start_byte - node.start_byte if body is not None else 0
        head = text[:cut].decode("utf-8", "replace")
        if name == "PYBIND11_MODULE" and body is not None:
            return [body], Scope(scope), self.functions.setdefault(name, Function(name))
        plain = name.split("::")[-1].strip()
        if HOOKABLE.match(plain) and "::" not in name and "__device__" not in head:
            self._flag("native_interpose", f"{plain} must not be redefined", node)
        made = self.functions.setdefault(plain, Function(plain))
        self.returned[plain] = self._type_kind(_text(node.child_by_field_name("type")))
        made.kernel |= "__global__" in head
        made.device |= made.kernel or "__device__" in head
        if body is not None and any(child.type != "comment" for child in body.named_children):
            made.empty = False
        scope.names.setdefault(plain, "")
        inner = Scope(scope)
        return [child for child in node.children if child.type != "identifier"], inner, made

    def _on_compound_statement(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        return node.children, Scope(scope), function

    _on_lambda_expression = _on_compound_statement

    def _on_for_statement(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        if function is not None:
            function.loops = True
        return node.children, Scope(scope), function

    _on_while_statement = _on_do_statement = _on_for_statement

    def _on_for_range_loop(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        inner = Scope(scope)
        kind = self._type_kind(_text(node.child_by_field_name("type")))
        source = node.child_by_field_name("right")
        if source is not None and self._kind(source, scope) == "tensors":
            kind = "tensor"
        inner.names[_declared(node.child_by_field_name("declarator"))] = kind
        return self._on_for_statement(node, inner, function)

    def _on_parameter_declaration(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        declarator = node.child_by_field_name("declarator")
        kind_node = node.child_by_field_name("type")
        if declarator is not None:
            scope.names[_declared(declarator)] = self._type_kind(_text(kind_node))
        return [child for child in node.children if child != declarator], scope, function

    _on_optional_parameter_declaration = _on_parameter_declaration

    def _on_declaration(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        type_node = node.child_by_field_name("type")
        declared_kind = self._type_kind(_text(type_node))
        automatic = type_node is not None and type_node.type == "placeholder_type_specifier"
        values: list[Node] = [] if type_node is None else [type_node]
        for declarator in node.children_by_field_name("declarator"):
            value = declarator.child_by_field_name("value")
            kind = declared_kind
            if automatic and value is not None:
                kind = self._kind(value, scope)
            name = _declared(declarator)
            scope.names[name] = kind
            if function is not None:
                function.uses.add(name)
            if value is not None:
                values.append(value)
            elif declarator.type == "function_declarator":
                scope.names[name] = ""
                self.returned[name] = declared_kind
            elif declarator.type == "array_declarator":
                values.extend(declarator.named_children[1:])
        return values, scope, function

    def _on_field_declaration(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        kind = self._type_kind(_text(node.child_by_field_name("type")))
        for declarator in node.children_by_field_name("declarator"):
            if kind and declarator.type != "function_declarator":
                self.tensor_fields[_declared(declarator)] = kind
        return node.children, scope, function

    # ------------------------------------------------------------------------------- expressions

    def _kind(self, node: Node, scope: Scope, depth: int = 0) -> str:
        """ "tensor", "tensors" or "" for an expression."""
        if depth > 40:
            return ""
        if node.type == "identifier":
            return scope.get(_text(node)) or ""
        if node.type == "call_expression":
            return self._call_kind(node, scope, depth)
        if node.type == "field_expression":
            return self.tensor_fields.get(_text(node.child_by_field_name("field")), "")
        if node.type == "subscript_expression":
            inner = node.child_by_field_name("argument")
            return "tensor" if inner is not None and self._kind(inner, scope, depth + 1) else ""
        if node.type == "conditional_expression":
            branch = node.child_by_field_name("consequence")
            return self._kind(branch, scope, depth + 1) if branch is not None else ""
        if node.type in (
            "parenthesized_expression",
            "pointer_expression",
            "unary_expression",
            "binary_expression",
            "assignment_expression",
            "initializer_list",
            "cast_expression",
        ):
            kinds = {self._kind(child, scope, depth + 1) for child in node.named_children}
            return "tensor" if "tensor" in kinds else "tensors" if "tensors" in kinds else ""
        return ""

    def _call_kind(self, node: Node, scope: Scope, depth: int) -> str:
        callee = node.child_by_field_name("function")
        if callee is None:
            return ""
        if callee.type == "field_expression":
            receiver = callee.child_by_field_name("argument")
            method = self._canonical(_text(callee.child_by_field_name("field")))
            held = self._kind(receiver, scope, depth + 1) if receiver is not None else ""
            if held == "tensors":
                return "tensor" if method in ("at", "front", "back") else ""
            if method in ("unbind", "chunk", "split"):
                return "tensors" if held else ""
            return "" if method in NOT_TENSOR_METHODS else held
        name = self._canonical(_text(callee))
        parts = name.split("::")
        if parts[-1] == "move" or parts[-1] in ("empty", "empty_like", "zeros", "zeros_like"):
            if parts[0] in ("at", "torch", "c10"):
                return "tensor"
        if parts in (["std", "move"], ["std", "get"], ["std", "forward"]):
            arguments = node.child_by_field_name("arguments")
            given = arguments.named_children if arguments is not None else []
            kinds = {self._kind(argument, scope, depth + 1) for argument in given}
            return "tensor" if kinds & {"tensor", "tensors"} else ""
        if len(parts) == 1 and name in self.returned:
            return self.returned[name]
        made = parts[-1] in PLUMBING["allocation; contents constant"] or not _is_plumbing(name)
        return "tensor" if parts[0] in ("at", "torch") and made else ""

    def _on_call_expression(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        callee = node.child_by_field_name("function")
        if callee is None:
            return node.children, scope, function
        plain = self._canonical(_text(callee)) if callee.type != "field_expression" else ""
        last = plain.split("::")[-1]
        if function is not None:
            if any(child.type == "kernel_call_syntax" for child in node.children):
                function.launches.add(last)
            if last.startswith(("cudaLaunch", "cuLaunch")):
                arguments = node.child_by_field_name("arguments")
                function.launches.update(re.findall(r"\w+", _text(arguments)))
            if last in STD_LOOPS:
                function.loops = True
        if callee.type == "field_expression":
            self._check_method(node, callee, scope)
        elif callee.type in ("identifier", "template_function"):
            arguments = node.child_by_field_name("arguments")
            given = arguments.named_children if arguments is not None else []
            on_tensor = any(self._kind(argument, scope) == "tensor" for argument in given)
            if last in ATEN_CALLS or on_tensor:
                self._open_calls.append((last, node))
        return node.children, scope, function

    def _check_method(self, node: Node, callee: Node, scope: Scope) -> None:
        method = self._canonical(_text(callee.child_by_field_name("field")))
        receiver = callee.child_by_field_name("argument")
        if receiver is None:
            return
        if method == "def" and _text(receiver) == "m":
            arguments = node.child_by_field_name("arguments")
            values = arguments.named_children if arguments is not None else []
            if len(values) >= 2 and values[0].type == "string_literal":
                names = re.findall(r"\w+", _text(values[1]))
                self.bound[_text(values[0]).strip('"')] = names[-1] if names else ""
        elif self._kind(receiver, scope) == "tensor":
            if method not in METHOD_NAMES:
                self._flag(
                    "native_compute",
                    f"the tensor method {method} lets PyTorch do the work;"
                    " write it inside your own kernel",
                    node,
                )
        elif method in ATEN_CALLS:
            self._open_calls.append((method, node))
        elif method == "detach":
            self._flag("native_system", "a detached thread would outlive the call", node)
        elif method == "attr":
            self._flag("native_python", "attr() calls into Python from C++", node)

    def _settle_open_calls(self) -> None:
        """Unqualified calls that may mean an ATen function, now that all definitions are known."""
        known = self.functions.keys() | self.macros.keys()
        for name, node in self._open_calls:
            if name in known or name in METHOD_NAMES or _is_plumbing("at::" + name):
                continue
            if LIBRARY.match(name) or re.match(r"(cuda|cu)[A-Z]", name):
                continue
            if name.isupper() or name.startswith(("TORCH_", "AT_", "C10_", "CHECK", "CUDA_")):
                continue
            if name in ("static_cast", "move", "forward", "swap", "make_tuple", "make_pair", "tie"):
                continue
            line = _text(node).splitlines()[0].strip()
            entry = (
                "native_compute",
                f"{name} on tensors is at::{name}: write it inside your own kernel",
                line,
            )
            if name in ATEN_CALLS or self._torch_visible(name):
                self.findings.append(entry)

    def _torch_visible(self, name: str) -> bool:
        """Whether an undefined function called on a tensor can only be ATen's (lambdas aside)."""
        pattern = re.compile(rf"\b(auto|function<[^;]*>)\s+{re.escape(name)}\b")
        return not any(pattern.search(source) for source in self._sources)

    def _on_operator(
        self, node: Node, scope: Scope, function: Function | None
    ) -> tuple[Sequence[Node], Scope, Function | None]:
        operator = _text(node.child_by_field_name("operator"))
        operands = [node.child_by_field_name(side) for side in ("left", "right", "argument")]
        touched = any(o is not None and self._kind(o, scope) == "tensor" for o in operands)
        if touched and operator not in ("=", "&", "<<", ""):
            self._flag(
                "native_compute",
                f"the operator {operator} on tensors lets PyTorch do the work;"
                " write it inside your own kernel",
                node,
            )
        return node.children, scope, function

    _on_binary_expression = _on_assignment_expression = _on_unary_expression = _on_operator

    def _on_gnu_asm_expression(self, node: Node, scope: Scope, function: Function | None) -> None:
        if function is None or not function.device:
            self._flag("native_asm", "inline assembly is allowed in device code only", node)
        return None

    # -------------------------------------------------------------------------------- own kernel

    def reachable(self, names: Sequence[str]) -> list[Function]:
        """The functions and macros that can run when those named are called."""
        known = {**self.macros, **self.functions}
        found: dict[str, Function] = {}
        todo = [name for name in names if name in known]
        while todo:
            name = todo.pop()
            if name in found:
                continue
            found[name] = known[name]
            todo += [other for other in known[name].uses | known[name].launches if other in known]
        return list(found.values())

    def own_kernel(self, names: Sequence[str]) -> str:
        """ "" if the bound functions run a kernel written here, else what is missing."""
        functions = (
            self.reachable(names) if names else [*self.functions.values(), *self.macros.values()]
        )
        if self.target == "cuda":
            kernels = {f.name for f in self.functions.values() if f.kernel}
            if not kernels:
                return "no __global__ function is defined; write a CUDA kernel"
            launched = {name for f in functions for name in f.launches}
            if not launched & kernels and not self._token_launch(kernels):
                return "no __global__ function is launched by the bound functions"
            if all(self.functions[name].empty for name in launched & kernels):
                return "the launched kernel is empty"
            return ""
        if not functions:
            return "the bound functions are not defined in the C++ source"
        if not any(f.loops for f in functions):
            return "no loop in the bound functions; compute the result in C++"
        return ""

    def _token_launch(self, kernels: set[str]) -> bool:
        """A launch seen by tokens alone: for text that the parser could not make sense of."""
        for source in self._sources:
            bare = re.sub(r'//[^\n]*|/\*.*?\*/|"(\\.|[^"\\\n])*"', " ", source, flags=re.S)
            if "<<<" in bare and _parser(self.target).parse(source.encode()).root_node.has_error:
                started = re.findall(r"(\w+)\s*(?:<[^;{}]*?>)?\s*<<<", bare)
                if set(started) & kernels:
                    return True
        return False


def _is_plumbing(name: str) -> bool:
    """Whether a canonical at::/torch::/c10:: name is in the table."""
    last = name.split("::")[-1]
    if name.startswith(PLUMBING_SPACES) or name in ("at", "torch", "c10", "at::cuda", "c10::cuda"):
        return True
    if "::nn::" in name or "::native" in name or "::_ops" in name or "::functional" in name:
        return False
    return last in PLUMBING_NAMES or bool(re.fullmatch(r"k[A-Z]\w*", last))


_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|##|[A-Za-z_]\w*'
    r"|[0-9][\w.]*|\s+|.",
    re.S,
)


def expand(source: str) -> str:
    """The text with its own macros expanded, as far as the parser needs to see pasted names.

    Lines keep their numbers. Conditional compilation is not followed: every #define counts, the
    last one wins. At most 200 000 characters come out.
    """
    macros: dict[str, tuple[list[str] | None, list[str]]] = {}
    kept = []
    for line in source.replace("\\\n", "\x00").split("\n"):
        match = re.match(r"\s*#\s*define\s+(\w+)(\(([^)]*)\))?(.*)", line, re.S)
        if match:
            parameters = match[3].split(",") if match[2] else None
            names = [name.strip() for name in parameters] if parameters is not None else None
            macros[match[1]] = (names, _tokens(match[4].replace("\x00", " ")))
        kept.append("\n" * line.count("\x00") if match else line.replace("\x00", "\\\n"))
    return "".join(_expand(_tokens("\n".join(kept)), macros, 0))[:200_000]


def _tokens(text: str) -> list[str]:
    return [match.group() for match in _TOKEN.finditer(text)]


def _expand(
    tokens: list[str], macros: dict[str, tuple[list[str] | None, list[str]]], depth: int
) -> list[str]:
    """Rescan and replace, at most 16 levels deep and 50 000 tokens long."""
    out: list[str] = []
    at = unclosed = 0
    while at < len(tokens) and len(out) < 50_000:
        parameters, body = macros.get(tokens[at], (None, []))
        at += 1
        if depth > 16 or tokens[at - 1] not in macros:
            out.append(tokens[at - 1])
            continue
        values: dict[str, list[str]] = {}
        if parameters is not None:
            arguments, end = _arguments(tokens, at) if unclosed < 20 else ([], at)
            if end == at:
                unclosed += 1
                out.append(tokens[at - 1])
                continue
            values, at = dict(zip(parameters, arguments, strict=False)), end
        replaced: list[str] = []
        for token in body:
            replaced += values.get(token, [token])
        out += _expand(_paste(replaced), macros, depth + 1)
    return out


def _arguments(tokens: list[str], at: int) -> tuple[list[list[str]], int]:
    """The arguments of a macro call whose bracket should open at `at`; (they, where it ends)."""
    start = at
    while at < len(tokens) and tokens[at].isspace():
        at += 1
    if at >= len(tokens) or tokens[at] != "(":
        return [], start
    depth, found = 0, [list[str]()]
    for place in range(at, min(len(tokens), at + 5000)):
        token = tokens[place]
        depth += (token in "([{") - (token in ")]}")
        if depth == 0:
            return [_trim(argument) for argument in found], place + 1
        if token == "," and depth == 1:
            found.append([])
        elif place > at:
            found[-1].append(token)
    return [], start


def _trim(tokens: list[str]) -> list[str]:
    while tokens and tokens[0].isspace():
        tokens = tokens[1:]
    while tokens and tokens[-1].isspace():
        tokens = tokens[:-1]
    return tokens


def _paste(tokens: list[str]) -> list[str]:
    """Apply ##: the tokens on its two sides become one."""
    out: list[str] = []
    place = 0
    while place < len(tokens):
        if tokens[place] != "##":
            out.append(tokens[place])
            place += 1
            continue
        out = _trim(out)
        place += 1
        while place < len(tokens) and tokens[place].isspace():
            place += 1
        right = tokens[place] if place < len(tokens) else ""
        out = [*out[:-1], out[-1] + right] if out else [right]
        place += 1
    return _tokens("".join(out))


def _template_arguments(node: Node) -> Iterator[Node]:
    """The template argument lists inside a qualified name."""
    stack = [node]
    while stack:
        item = stack.pop()
        for child in item.children:
            if child.type == "template_argument_list":
                yield child
            else:
                stack.append(child)


def _function_declarator(node: Node) -> Node | None:
    """The function_declarator of a definition, below pointers and references."""
    declarator = node.child_by_field_name("declarator")
    while declarator is not None and declarator.type != "function_declarator":
        inner = declarator.child_by_field_name("declarator")
        if inner is None and declarator.named_children:
            inner = declarator.named_children[-1]
        declarator = inner
    return declarator


def _declared(node: Node | None) -> str:
    """The name that a declarator declares."""
    while node is not None and node.type not in ("identifier", "field_identifier"):
        inner = node.child_by_field_name("declarator")
        if inner is None:
            inner = node.named_children[-1] if node.named_children else None
        node = inner
    return _text(node)
