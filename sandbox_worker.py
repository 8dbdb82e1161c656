"""The processes that hold torch: the zygote, the references and the throw-away candidates.

  zygote      imports torch once, touches no GPU, runs nobody's code. Forks the other two on
              request, so that a fresh process costs a fork and not an import.
  reference   trusted. Runs a task's own Model: draws inputs and weights under secret seeds, keeps
              the expected outputs in float64, compares what candidates wrote, is timed against them.
  candidate   untrusted. One answer, one process, confined (confinement.py) before the answer is
              imported. It maps the inputs read-only, copies them, runs ModelNew, copies the outputs
              into shared memory. Nothing it says is believed: the parent holds the clock, the
              expected outputs never enter this process, and a record that is missing or malformed
              is a failure.

Channels: one socket pair a process, messages are length-prefixed JSON, tensors travel through memory
files made (and sealed) by the parent. `python -I sandbox_worker.py FD` starts the zygote.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MAX_MESSAGE = 1 << 20  # bytes of one message
MESSAGE_CHARS = 1200  # of an exception's text
WEIGHTS, OUTPUTS = 0, 1  # indices of memory files; input sets follow
FIRST_INPUTS = 2


class Closed(Exception):
    """The other side is gone, or what it sent is not a message."""


# ------------------------------------------------------------------------------- messages


def send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """One message, with file descriptors beside it."""
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE:
        raise Closed(f"message of {len(data)} bytes")
    frame = struct.pack("<I", len(data)) + data
    try:
        if fds:
            sent = socket.send_fds(sock, [frame], list(fds))
            frame = frame[sent:]
        sock.sendall(frame)
    except OSError as error:
        raise Closed(str(error)) from None


def receive(sock: socket.socket, fds: list[int] | None = None) -> dict[str, Any]:
    """The next message (a JSON object); descriptors that came with it are added to `fds`.
    TimeoutError after the socket's timeout, Closed at its end or for anything malformed."""
    head = _read(sock, 4, fds)
    (length,) = struct.unpack("<I", head)
    if length > MAX_MESSAGE:
        raise Closed(f"message of {length} bytes")
    try:
        message = json.loads(_read(sock, length, None))
    except (ValueError, RecursionError) as error:
        raise Closed(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise Closed("not an object")
    return message


def _read(sock: socket.socket, length: int, fds: list[int] | None) -> bytes:
    parts: list[bytes] = []
    deadline = None if sock.gettimeout() is None else time.monotonic() + (sock.gettimeout() or 0)
    while length:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
        try:
            if fds is not None and not parts:
                data, new, _, _ = socket.recv_fds(sock, length, 64)
                fds += new
            else:
                data = sock.recv(length)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("end of file")
        parts.append(data)
        length -= len(data)
    return b"".join(parts)


# ------------------------------------------------------------------------------- zygote


def zygote(fd: int) -> None:
    """Forks on request until the parent's end of the socket closes."""
    sock = socket.socket(fileno=fd)
    # Asking the driver whether there is a GPU would make CUDA unusable in every fork; NVML may ask.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch
    import torch.utils.cpp_extension  # slow to import, and candidates may not read everything

    import confinement  # noqa: F401 - imported once here, by every fork at no cost
    import kernel_build

    torch.set_num_interop_threads(1)
    if len(sys.argv) > 2 and sys.argv[2]:
        kernel_build.load_shim(sys.argv[2])
    children: dict[int, int | None] = {}  # pid -> wait status once it ended
    send(sock, {"event": "ready", "torch": torch.__version__, "cuda": torch.version.cuda or ""})
    while True:
        select.select([sock], [], [], 1.0 if None in children.values() else None)
        _reap(children)
        if not select.select([sock], [], [], 0)[0]:
            continue
        fds: list[int] = []
        try:
            request = receive(sock, fds)
        except Closed:
            os._exit(0)
        if request["op"] == "fork":
            pid = _fork(sock, request["kind"], fds, os.getpid())
            pidfd = os.pidfd_open(pid)
            children[pid] = None
            send(sock, {"pid": pid}, [pidfd])
            os.close(pidfd)
        else:  # "wait": how a child ended
            deadline = time.monotonic() + 5.0
            while children.get(request["pid"], 0) is None and time.monotonic() < deadline:
                time.sleep(0.001)
                _reap(children)
            send(sock, {"status": children.pop(request["pid"], None)})
        for inherited in fds:
            os.close(inherited)


def _reap(children: dict[int, int | None]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children[pid] = status


def _fork(zygote_socket: socket.socket, kind: str, fds: list[int], parent: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        import confinement

        confinement.die_with_parent(parent)
        os.setsid()
        zygote_socket.close()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sock = socket.socket(fileno=fds.pop(0))
        (reference if kind == "reference" else candidate)(sock, fds)
    except Closed:
        pass
    except BaseException:  # noqa: BLE001 - nothing may return into the zygote's loop
        traceback.print_exc()
    finally:
        os._exit(0)
    return 0


# ------------------------------------------------------------------------------- tensors


def _layout(tensors: Sequence[Any]) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor lies in a memory file: [{dtype, shape, offset}], total bytes."""
    places, offset = [], 0
    for tensor in tensors:
        places.append(
            {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "offset": offset}
        )
        offset += -(-tensor.numel() * tensor.element_size() // 64) * 64
    return places, max(offset, 64)


def _views(buffer: Any, places: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Tensors over a mapped memory file."""
    import torch

    views = []
    for place in places:
        dtype = getattr(torch, place["dtype"])
        count = 1
        for extent in place["shape"]:
            count *= extent
        if count:
            flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=place["offset"])
        else:
            flat = torch.empty(0, dtype=dtype)
        views.append(flat.reshape(place["shape"]))
    return views


def _map(fd: int, *, write: bool) -> mmap.mmap:
    size = os.fstat(fd).st_size
    if write:
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    # Private: a candidate that writes into its inputs writes into pages of its own.
    return mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def _encode(value: Any, tensors: list[Any]) -> Any:
    """An argument as JSON; its tensors are appended to `tensors`."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors.append(value.detach().contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)[6:]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"an argument of type {type(value).__name__} cannot be handed to a candidate")


def _decode(value: Mapping[str, Any], tensors: Sequence[Any]) -> Any:
    import torch

    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in content}
    return getattr(torch, content) if kind == "dtype" else content


def _flatten(output: Any) -> list[Any] | str:
    """The output tensors in order, or what is wrong with the output."""
    import torch

    if type(output) in (torch.Tensor, torch.nn.Parameter):
        return [output]
    if isinstance(output, list | tuple):
        flat: list[Any] = []
        for item in output:
            inner = _flatten(item)
            if isinstance(inner, str):
                return inner
            flat += inner
        return flat
    return f"forward returned {type(output).__name__}, not a tensor or a tuple of tensors"


class _Device:
    """What differs between the targets: where tensors live, how to wait, what to flush."""

    def __init__(self, target: str, index: int) -> None:
        import torch

        self.cuda = target == "cuda"
        self.name = f"cuda:{index}" if self.cuda else "cpu"
        self._scratch: Any = None
        if self.cuda:
            torch.cuda.set_device(index)
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.backends.cudnn.allow_tf32 = False
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self.synchronize = torch.cuda.synchronize  # bound before an answer can replace it

    def flush(self) -> None:
        """Everything before is done and the L2 cache holds nothing of use (GPU only: a CPU's
        caches are left as a caller would find them)."""
        import torch

        if self.cuda:
            if self._scratch is None:
                size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
                self._scratch = torch.empty(max(size, 64 << 20), dtype=torch.uint8, device=self.name)
            self._scratch.zero_()
            self.synchronize()

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, float]:
        """The output, and on a GPU the milliseconds between two events."""
        import torch

        with torch.no_grad():
            if not self.cuda:
                return function(*arguments), 0.0
            self.events[0].record()
            output = function(*arguments)
            self.events[1].record()
            self.synchronize()
            return output, self.events[0].elapsed_time(self.events[1])


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)))


# ------------------------------------------------------------------------------- reference


def reference(sock: socket.socket, _: list[int]) -> None:
    """Serves one task: make (inputs, weights, expected outputs), load and go (to be timed),
    compare. Trusted code; an exception here is the task's or the harness's fault."""
    import torch

    start = receive(sock)
    torch.set_num_threads(_threads())
    try:
        task = _Reference(start)
    except Exception as error:  # noqa: BLE001 - reported to the parent, which names the task
        send(sock, {"event": "error", "text": f"{type(error).__name__}: {error}"[:2000]})
        return
    send(sock, task.description())
    while True:
        fds: list[int] = []
        request = receive(sock, fds)
        try:
            reply = getattr(task, f"do_{request['op']}")(sock, request, fds)
        except Exception as error:  # noqa: BLE001 - as above
            reply = {"event": "error", "text": f"{type(error).__name__}: {error}"[:2000]}
        for fd in fds:
            os.close(fd)
        if reply is not None:
            send(sock, reply)


class _Reference:
    """One task's Model with secret inputs and weights."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        import torch

        self.device = _Device(start["target"], start["device"])
        self.stock = start["rules"] == "kernelbench"
        self.seed = start["seed"]
        namespace: dict[str, Any] = {"__name__": "task"}
        exec(compile(start["source"], "task.py", "exec"), namespace)  # noqa: S102 - trusted
        torch.manual_seed(self.seed)
        self.init = namespace["get_init_inputs"]() if "get_init_inputs" in namespace else []
        torch.manual_seed(self.seed)
        self.model = namespace["Model"](*self.init).eval()
        if not self.stock:
            _randomise(self.model, self.seed + 1)
        state = self.model.state_dict()
        self.weights = [tensor.detach().contiguous() for tensor in state.values()]
        self.weight_names = list(state)
        self.sets: list[list[Any]] = []  # arguments of each input set, on the CPU
        for index in range(start["sets"]):
            torch.manual_seed(self.seed + 100 + index)
            self.sets.append(list(namespace["get_inputs"]()))
        self.model.to(self.device.name)
        self.expected: list[list[tuple[Any, Any]]] = []  # per set, per output: (float64, error32)
        self.dtypes: list[str] = []
        self.shapes: list[list[int]] = []
        self._expect()
        self.arguments: list[Any] = []

    def _expect(self) -> None:
        """Expected outputs in float64, and the size of the float32 reference's own error."""
        import copy

        import torch

        try:
            double = copy.deepcopy(self.model).double()
        except Exception:  # noqa: BLE001 - a model that cannot be copied is compared in its own type
            double = None
        for arguments in self.sets:
            own, _ = self.device.call(self.model, _place(arguments, self.device.name))
            flat = _flatten(own)
            if isinstance(flat, str):
                raise TypeError(flat)
            self.dtypes = [str(tensor.dtype)[6:] for tensor in flat]
            self.shapes = [list(tensor.shape) for tensor in flat]
            exact = flat
            if double is not None:
                try:
                    wide = _flatten(double(*_place(arguments, self.device.name, torch.float64)))
                    exact = wide if not isinstance(wide, str) else flat
                except Exception:  # noqa: BLE001 - no float64 path: judged against its own output
                    exact = flat
            pairs = []
            for one, other in zip(flat, exact, strict=True):
                wide_one = other.detach().double() if one.is_floating_point() else other.detach()
                error = (one.detach().double() - wide_one.double()).abs()
                pairs.append((wide_one, float(error.nan_to_num(0.0, 0.0, 0.0).max()) if error.numel() else 0.0))
            self.expected.append(pairs)

    def description(self) -> dict[str, Any]:
        """What the parent and the candidates need to know; no values."""
        tensors: list[Any] = []
        self.input_codes = []
        self.input_tensors = []
        for arguments in self.sets:
            tensors = []
            self.input_codes.append([_encode(argument, tensors) for argument in arguments])
            self.input_tensors.append(tensors)
        weight_places, weight_bytes = _layout(self.weights)
        places = [_layout(tensors) for tensors in self.input_tensors]
        outputs, output_bytes = _layout([value for value, _ in self.expected[0]])
        for place, dtype in zip(outputs, self.dtypes, strict=True):
            place["dtype"] = dtype
        init_tensors: list[Any] = []
        return {
            "event": "made",
            "init": [_encode(value, init_tensors) for value in self.init],
            "weights": {"names": self.weight_names, "places": weight_places, "bytes": weight_bytes},
            "inputs": [
                {"code": code, "places": place, "bytes": size}
                for code, (place, size) in zip(self.input_codes, places, strict=True)
            ],
            "outputs": outputs,
            "output_bytes": output_bytes,
        }

    def do_fill(self, sock: socket.socket, request: Mapping[str, Any], fds: list[int]) -> Any:
        """Write weights and input sets into the parent's memory files: fds in the order weights,
        set 0, set 1, ..."""
        for fd, tensors in zip(fds, [self.weights, *self.input_tensors], strict=True):
            places, _ = _layout(tensors)
            for view, tensor in zip(_views(_map(fd, write=True), places), tensors, strict=True):
                view.copy_(tensor)
        return {"event": "filled"}

    def do_ping(self, sock: socket.socket, request: Mapping[str, Any], fds: list[int]) -> Any:
        return {"event": "pong"}

    def do_load(self, sock: socket.socket, request: Mapping[str, Any], fds: list[int]) -> Any:
        self.arguments = _place(self.sets[request["set"]], self.device.name)
        self.device.flush()
        return {"event": "loaded"}

    def do_go(self, sock: socket.socket, request: Mapping[str, Any], fds: list[int]) -> Any:
        """One call, as a candidate makes it: the parent's clock stops at "done"; then the copy."""
        output, device_ms = self.device.call(self.model, self.arguments)
        send(sock, {"event": "done", "device_ms": device_ms})
        flat = _flatten(output)
        copies = [tensor.detach().to("cpu", copy=True) for tensor in flat if not isinstance(tensor, str)]
        del copies
        return {"event": "copied"}

    def do_compare(self, sock: socket.socket, request: Mapping[str, Any], fds: list[int]) -> Any:
        """Is what lies in the memory file (fds[0]) right for this set?"""
        places = request["places"]
        with open(os.dup(fds[0]), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        problems = []
        for index, view in enumerate(_views(mapped, places)):
            wide, own_error = self.expected[request["set"]][index]
            found = view.clone().to(self.device.name)
            rule = _stock_difference if self.stock else _difference
            problem = rule(found, wide, own_error)
            if problem:
                label = f"output {index}: " if len(places) > 1 else ""
                problems.append(label + problem)
        return {"event": "compared", "problems": problems}


def _place(arguments: Sequence[Any], device: str, dtype: Any = None) -> list[Any]:
    """The arguments as fresh tensors on the device (floating ones as `dtype` if given)."""
    import torch

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            wide = dtype is not None and value.is_floating_point()
            return value.detach().to(device, dtype if wide else value.dtype, copy=True)
        if isinstance(value, list | tuple):
            return type(value)(fresh(item) for item in value)
        return value

    return [fresh(argument) for argument in arguments]


def _randomise(model: Any, seed: int) -> None:
    """Non-trivial values for every floating parameter and buffer, so that no layer is an identity
    and no weight can be guessed. The scale of what the constructor drew is kept; a variance stays
    positive."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        scale = tensor.detach().float().pow(2).mean().sqrt().clamp(min=0.1)
        drawn = tensor.detach() + 0.3 * scale * noise
        if name.endswith("running_var") or (tensor.detach() > 0).all():
            drawn = drawn.abs().clamp(min=0.05)
        with torch.no_grad():
            tensor.copy_(drawn)


# Tolerance policy (strict rules), for every element i of an output with float64 reference r:
#   |candidate_i - r_i| <= max(OWN * E, RELATIVE[dtype] * (|r_i| + RMS(r)))
# where E is the largest error of the reference's own float32 (or half) run, and for every row (last
# dimension) with values v:  ||candidate - r|| <= max(OWN * E * sqrt(n), ROW[dtype] * ||r||).
# RELATIVE covers float32 sums in any order over a few thousand terms; bf16, fp16 and TF32 rounding
# is 10 to 100 times above it. The row rule keeps small rows from hiding behind large ones.
# NaN and infinities must stand where the reference has them. Integers must be equal.
OWN = 8.0
RELATIVE = {"float32": 3e-5, "float64": 1e-12, "float16": 2e-3, "bfloat16": 1.6e-2}
ROW = {"float32": 6e-5, "float64": 1e-11, "float16": 3e-3, "bfloat16": 2.4e-2}


def _difference(found: Any, wide: Any, own_error: float) -> str:
    """"" if `found` is right, else one deterministic line for the model."""
    import torch

    dtype = str(found.dtype)[6:]
    if dtype not in RELATIVE:
        wrong = found != wide.to(found.dtype)
        return _mismatch(wrong, found, wide) if bool(wrong.any()) else ""
    if found.numel() == 0:
        return ""
    value = found.double()
    finite = torch.isfinite(wide)
    if bool(finite.all()):
        special = ~torch.isfinite(value)
    else:
        same = (torch.isnan(wide) & torch.isnan(value)) | (value == wide)
        special = (~finite & ~same) | (finite & ~torch.isfinite(value))
        value, wide = torch.where(finite, value, 0.0), torch.where(finite, wide, 0.0)
    if bool(special.any()):
        return _mismatch(special, found, wide)
    error = (value - wide).abs_()
    rms = float(wide.square().mean().sqrt())
    bound = (wide.abs() + rms).mul_(RELATIVE[dtype]).clamp_(min=OWN * own_error)
    wrong = error > bound
    if bool(wrong.any()):
        return _mismatch(wrong, found, wide)
    if wide.dim() >= 2 and wide.shape[-1] > 1:
        rows = error.square_().sum(-1).sqrt_()
        most = (ROW[dtype] * wide.square().sum(-1).sqrt_()).clamp_(
            min=OWN * own_error * wide.shape[-1] ** 0.5
        )
        bad = rows > most
        if bool(bad.any()):
            return _mismatch(bad.unsqueeze(-1) & (value != wide), found, wide)
    return ""


def _stock_difference(found: Any, wide: Any, own_error: float) -> str:
    """KernelBench's rule: allclose with one number for both tolerances, by precision."""
    import torch

    tolerance = 1e-4 if found.dtype in (torch.float32, torch.float64) else 1e-2
    close = torch.isclose(found.double(), wide.double(), rtol=tolerance, atol=tolerance)
    return "" if bool(close.all()) else _mismatch(~close, found, wide)


def _mismatch(wrong: Any, found: Any, wide: Any) -> str:
    """How many elements are wrong, the worst, and where the first stands."""
    import torch

    count = int(wrong.sum())
    first = torch.nonzero(wrong.flatten())[0].item()
    index, rest = [], int(first)
    for extent in reversed(wrong.shape):
        index.append(rest % extent)
        rest //= extent
    got, want = float(found.flatten()[first]), float(wide.flatten()[first])
    error = (found.double() - wide.double()).abs()
    worst = float(error.nan_to_num(float("inf"), float("inf"), float("inf")).max())
    place = ", ".join(str(i) for i in reversed(index))
    share = 100.0 * count / max(1, wrong.numel())
    return (
        f"{share:.2g} % of the elements are wrong; largest error {worst:.3g}; "
        f"first at [{place}]: got {got:.6g}, expected {want:.6g}"
    )


# ------------------------------------------------------------------------------- candidate
# UNTRUSTED SIDE: from `import_answer` on, nothing that comes out of this process is believed.


def candidate(sock: socket.socket, fds: list[int]) -> None:
    """Confine, import the answer, build ModelNew, load the weights, then serve load and go."""
    import confinement

    start = receive(sock, fds)
    os.chdir(start["folder"])
    limits = confinement.Limits(**start["limits"])
    controls = confinement.enter(
        limits, writable=[start["folder"]], readable=start["readable"], gpu=start["target"] == "cuda"
    )
    send(sock, {"event": "confined", "controls": list(controls)})
    run = _Candidate(sock, start, fds)
    run.guarded("import", run.import_answer)
    run.guarded("construct", run.construct)
    send(sock, {"event": "ready"})
    while True:
        request = receive(sock)
        if request["op"] == "load":
            run.guarded("load", lambda request=request: run.load(request))
            send(sock, {"event": "loaded"})
        else:
            run.guarded("forward", run.go)


class _Candidate:
    """State of one answer's process."""

    def __init__(self, sock: socket.socket, start: Mapping[str, Any], fds: list[int]) -> None:
        import torch

        self.sock, self.start, self.fds = sock, start, fds
        torch.set_num_threads(_threads())
        self.maps = [_map(fd, write=False) for fd in (fds[WEIGHTS], *fds[FIRST_INPUTS:])]
        self.output_map = _map(fds[OUTPUTS], write=True)
        self.slots = _views(self.output_map, start["outputs"])
        self.model: Any = None
        self.device: Any = None
        self.arguments: list[Any] = []
        self.answer: dict[str, Any] = {"__name__": "answer"}

    def guarded(self, stage: str, action: Callable[[], None]) -> None:
        """Run a part; any exception of the answer's becomes a message, and the process ends."""
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - an answer may raise anything
            if isinstance(error, Closed):
                raise
            send(self.sock, {"event": "error", "stage": stage, "text": describe(error)})
            os._exit(0)

    def fail(self, kind: str, text: str) -> NoReturn:
        send(self.sock, {"event": kind, "text": text[:MESSAGE_CHARS]})
        os._exit(0)

    def import_answer(self) -> None:
        import kernel_build

        built = self.start["builds"]

        def lookup(request: Any) -> Any:
            return built.get(request.key())

        def missing(request: Any) -> NoReturn:
            send(self.sock, {"event": "missing", "request": request.to_dict()})
            os._exit(0)

        kernel_build.install_loader(lookup, missing)
        import linecache

        code = self.start["code"]
        linecache.cache["answer.py"] = (len(code), None, code.splitlines(True), "answer.py")
        exec(compile(code, "answer.py", "exec"), self.answer)  # noqa: S102 - confined

    def construct(self) -> None:
        import torch

        self.device = _Device(self.start["target"], self.start["device"])
        kind = self.answer.get("ModelNew")
        if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
            self.fail("format", "the code defines no class ModelNew(nn.Module)")
        stock = self.start["rules"] == "kernelbench"
        if stock:
            torch.manual_seed(self.start["seed"])
        self.model = kind(*[_decode(value, ()) for value in self.start["init"]])
        self.model.eval()
        if not stock:
            self.load_weights()
        self.model.to(self.device.name)

    def load_weights(self) -> None:
        """By name; where names differ but order and shapes agree, by order."""
        weights = self.start["weights"]
        tensors = [view.clone() for view in _views(self.maps[0], weights["places"])]
        given = dict(zip(weights["names"], tensors, strict=True))
        own = self.model.state_dict()
        if list(own) != list(given) and set(own) != set(given):
            shapes = [list(t.shape) for t in own.values()]
            if shapes != [list(t.shape) for t in tensors]:
                self.fail(
                    "weights",
                    "the weights of Model do not fit ModelNew: Model has "
                    + ", ".join(f"{n} {list(t.shape)}" for n, t in given.items())
                    + "; ModelNew has "
                    + (", ".join(f"{n} {list(t.shape)}" for n, t in own.items()) or "none"),
                )
            given = dict(zip(own, tensors, strict=True))
        for name, tensor in own.items():
            if tensor.shape != given[name].shape:
                self.fail(
                    "weights",
                    f"the weight {name} has shape {list(tensor.shape)} in ModelNew "
                    f"and {list(given[name].shape)} in Model",
                )
        self.model.load_state_dict(given)

    def load(self, request: Mapping[str, Any]) -> None:
        """Fresh contents; in the same memory as before (when asked to), or in new memory."""
        index = request["set"]
        inputs = self.start["inputs"][index]
        tensors = _views(self.maps[1 + index], inputs["places"])
        fresh = _place([_decode(code, tensors) for code in inputs["code"]], self.device.name)
        if request["reuse"] and len(self.arguments) == len(fresh):
            for old, new in zip(self.arguments, fresh, strict=True):
                if hasattr(old, "copy_") and old.shape == new.shape:
                    old.detach().copy_(new)
        else:
            self.arguments = fresh
        poison(self.device, self.slots, on=request["poison"])
        self.device.flush()

    def go(self) -> None:
        output, device_ms = self.device.call(self.model, self.arguments)
        send(self.sock, {"event": "done", "device_ms": device_ms})
        flat = _flatten(output)
        if isinstance(flat, str):
            self.fail("output", flat)
        places = []
        for tensor in flat:
            if str(tensor.device) != self.device.name and tensor.device.type != self.device.name[:4]:
                self.fail("output", f"an output is on {tensor.device.type}, not on the device")
            places.append({"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)})
        expected = [{"dtype": p["dtype"], "shape": p["shape"]} for p in self.start["outputs"]]
        if places == expected:
            for slot, tensor in zip(self.slots, flat, strict=True):
                slot.copy_(tensor.detach())
        send(self.sock, {"event": "copied", "outputs": places[:64]})


def poison(device: _Device, slots: Sequence[Any], *, on: bool) -> None:
    """Freed memory holds garbage, so that an output that was not written shows. On a CPU through
    the C library's allocator, on a GPU through blocks of the outputs' sizes."""
    import ctypes

    import torch

    if device.cuda:
        if on:
            blocks = [torch.full_like(s, float("nan") if s.is_floating_point() else 77,
                                      device=device.name) for s in slots]
            del blocks
        return
    ctypes.CDLL(None).mallopt(-6, 0x81 if on else 0)  # M_PERTURB: new memory is filled with 0x7e


def describe(error: BaseException) -> str:
    """An exception as one deterministic text: no addresses, no paths of this machine."""
    if isinstance(error, SystemExit):
        return f"SystemExit: the code ended the process with {error.code!r}"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "answer.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    text = re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text)
    text = re.sub(r"(/[\w.+-]+){2,}/", "", text)
    text = text.split("\nException raised from")[0]  # torch's C++ stack, full of addresses
    return (text[:MESSAGE_CHARS] + (f" (line {line} of the code)" if line else "")).strip()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    # One copy of the module: forks import it by name.
    sys.modules["sandbox_worker"] = sys.modules["__main__"]
    zygote(int(sys.argv[1]))
