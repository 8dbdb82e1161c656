"""The processes that hold torch: the zygote, the references and the throw-away candidates.

  zygote      imports torch once, touches no GPU, runs nobody's code. Forks the other two on
              request, so that a fresh process costs a fork and not an import.
  reference   trusted. Runs a task's own Model: draws inputs and weights under secret seeds, keeps
              the expected outputs in float64, compares what candidates wrote; it is the other side
              of their timing.
  candidate   untrusted. One answer, one process, confined (confinement.py) before the answer is
              imported. For each call it is handed one memory file of inputs, not sooner; it copies
              them, runs ModelNew, says "done", and copies the outputs into shared memory when it is
              told to. Nothing it says is believed: the parent holds the clock, the expected outputs
              never enter this process, and a record that is missing or malformed is a failure.

Channels: one socket pair a process, messages are length-prefixed JSON, tensors travel through
sealed memory files. `python -B sandbox_worker.py FD SHIM SCRATCH` starts the
zygote; when its parent goes, even by SIGKILL, it ends its forks and removes the folder SCRATCH.
"""

from __future__ import annotations

import fcntl
import functools
import json
import mmap
import os
import re
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MAX_MESSAGE = 4 << 20  # bytes of one message
KEPT_BLOCK = 32 << 20  # bytes; the most that the C library takes for M_MMAP_THRESHOLD
TOUCHED = 8  # times what one call moves: memory that each side of a timing has ready
TOUCHED_MOST = 256 << 20  # bytes
MESSAGE_CHARS = 1200  # of an exception's text
WEIGHTS, OUTPUTS = 0, 1  # indices of the memory files that a candidate starts with


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
    _first_calls()
    _keep_freed_memory()
    if len(sys.argv) > 2 and sys.argv[2]:
        kernel_build.load_shim(sys.argv[2])
    children: set[int] = set()  # not reaped until asked for, so that no pid is used twice
    send(sock, {"event": "ready", "torch": torch.__version__, "cuda": torch.version.cuda or ""})
    while True:
        fds: list[int] = []
        try:
            request = receive(sock, fds)
            if request["op"] == "fork":
                pid = _fork(sock, request["kind"], fds, os.getpid())
                children.add(pid)
                pidfd = os.pidfd_open(pid)
                send(sock, {"pid": pid}, [pidfd])
                os.close(pidfd)
            else:  # "wait": how a child ended, which the parent has just killed
                send(sock, {"status": _wait(request["pid"])})
                children.discard(request["pid"])
        except Closed:
            _clean_up(children)
        for inherited in fds:
            os.close(inherited)


def _first_calls() -> None:
    """Vector mathematics sets itself up at its first call. The first torch.tanh of a fresh fork, by
    two threads, was off by up to 1e-4 in 2 of 957 forks: presumably the threads race. Made here,
    by one thread, every fork inherits it (0 of 3072)."""
    import torch

    torch.set_num_threads(1)  # no pool of threads either, which would not survive a fork
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(64, 64, dtype=dtype) + 1
        for name in "tanh exp log sin cos erf sqrt sigmoid log1p expm1".split():
            getattr(torch, name)(x)
        x @ x


def _keep_freed_memory() -> None:
    """The C library's allocator keeps what is freed, up to blocks of 32 MB, instead of adapting to
    what a process has freed so far: otherwise one side of a timing pays for page faults (as long as
    a whole kernel) that the other does not. Inherited by every fork."""
    import ctypes

    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, KEPT_BLOCK)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def _touch_memory(size: int) -> None:
    """Let this process own `size` bytes of free memory that has been written to, so that a first
    output does not land on untouched pages."""
    import torch

    blocks = []
    while size > 0:
        blocks.append(torch.zeros(min(size, KEPT_BLOCK // 2), dtype=torch.uint8).fill_(1))
        size -= KEPT_BLOCK // 2
    del blocks


def _wait(pid: int) -> int | None:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended:
            return status
        time.sleep(0.0005)
    return None


def _clean_up(children: set[int]) -> NoReturn:
    """The parent is gone, perhaps killed: nothing of its sandbox stays."""
    for pid in children:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
    if len(sys.argv) > 3 and sys.argv[3]:
        shutil.rmtree(sys.argv[3], ignore_errors=True)
    os._exit(0)


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
    # Private: a candidate that writes into its inputs writes into pages of its own.
    how = mmap.MAP_SHARED if write else mmap.MAP_PRIVATE
    return mmap.mmap(fd, size, how, mmap.PROT_READ | mmap.PROT_WRITE)


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
                size = max(size, 64 << 20)
                self._scratch = torch.empty(size, dtype=torch.uint8, device=self.name)
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
    """Serves one task: draw inputs, load and go (to be timed), copy, compare. Trusted code; an
    exception here is the task's or the harness's fault."""
    import torch

    start = receive(sock)
    torch.set_num_threads(_threads())
    try:
        task = _Reference(start)
        about, fds = task.description()
    except Exception as error:  # noqa: BLE001 - reported to the parent, which names the task
        send(sock, {"event": "error", "text": f"{type(error).__name__}: {error}"[:2000]})
        return
    send(sock, about, fds)
    while True:
        fds = []
        request = receive(sock, fds)
        new: list[int] = []
        try:
            reply = getattr(task, f"do_{request['op']}")(request, fds, new)
        except Exception as error:  # noqa: BLE001 - as above
            reply = {"event": "error", "text": f"{type(error).__name__}: {error}"[:2000]}
        send(sock, reply, new)
        for fd in fds + new:
            os.close(fd)


def _write_file(tensors: Sequence[Any]) -> tuple[int, list[dict[str, Any]]]:
    """Tensors in a new memory file that nobody can change any more; where they lie."""
    import torch

    places, size = _layout(tensors)
    fd = os.memfd_create("inputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    for tensor, place in zip(tensors, places, strict=True):
        if not tensor.numel():
            continue
        data = memoryview(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done : done + (1 << 30)], place["offset"] + done)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd, places


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
        self.get_inputs = namespace["get_inputs"]
        state = self.model.state_dict()
        self.weights = [tensor.detach().contiguous() for tensor in state.values()]
        self.weight_names = list(state)
        self.model.to(self.device.name)
        self.double = self._double()
        # Input sets: memory file, arguments as JSON, where their tensors lie.
        self.sets: dict[int, tuple[int, list[Any], list[dict[str, Any]]]] = {}
        self.expected: dict[int, list[tuple[Any, float]]] = {}  # per output: float64, own error
        self.outputs: list[Any] = []  # of the set 0: dtype and shape of every output
        self.keeps_inputs = True  # forward leaves its arguments as they were
        self.arguments: list[Any] = []
        self.output: Any = None
        self.slots: list[Any] = []

    def _double(self) -> Any:
        import copy

        try:
            return copy.deepcopy(self.model).double()
        except Exception:  # noqa: BLE001 - a model that cannot be copied is judged by its own output
            return None

    def _draw(self, index: int) -> list[Any]:
        """The task's inputs under the secret seed of this set; drawn on the GPU where it can be."""
        import torch

        torch.manual_seed(self.seed + 100 + index)
        if self.device.cuda and not self.stock:
            try:
                with torch.device(self.device.name):
                    return list(self.get_inputs())
            except Exception:  # noqa: BLE001 - a task may insist on the CPU
                torch.manual_seed(self.seed + 100 + index)
        return list(self.get_inputs())

    def _expect(self, arguments: Sequence[Any]) -> list[tuple[Any, float]]:
        """Per output: its values in float64, and the size of the float32 reference's own error."""
        import torch

        placed = _place(arguments, self.device.name)
        output, _ = self.device.call(self.model, placed)
        flat = _flatten(output)
        if isinstance(flat, str):
            raise TypeError(flat)
        self.keeps_inputs &= _same(placed, _place(arguments, self.device.name))
        self.outputs = self.outputs or [torch.empty_like(t, device="meta") for t in flat]
        exact = flat
        if self.double is not None:
            try:
                with torch.no_grad():
                    wide = _flatten(
                        self.double(*_place(arguments, self.device.name, torch.float64))
                    )
                exact = flat if isinstance(wide, str) else wide
            except Exception:  # noqa: BLE001 - no float64 path: judged against its own output
                exact = flat
        pairs = []
        for own, other in zip(flat, exact, strict=True):
            other = other.detach()
            wide_one = other.double() if own.is_floating_point() else other
            error = (own.detach().double() - wide_one.double()).abs().nan_to_num(0.0, 0.0, 0.0)
            pairs.append((wide_one, float(error.max()) if error.numel() else 0.0))
        return pairs

    def description(self) -> tuple[dict[str, Any], list[int]]:
        """What the parent and the candidates need to know, and the memory file of the weights."""
        self.expected[0] = self._expect(self._draw(0))
        init_tensors: list[Any] = []
        init = [_encode(value, init_tensors) for value in self.init]
        fd, places = _write_file([*self.weights, *init_tensors])
        outputs, output_bytes = _layout(self.outputs)
        about = {
            "event": "made",
            "init": init,
            "weights": {"names": self.weight_names, "places": places},
            "outputs": outputs,
            "output_bytes": output_bytes,
            "keeps_inputs": self.keeps_inputs,
        }
        return about, [fd]

    def do_outputs(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        """fds[0]: where its own outputs go, as a candidate's do."""
        self.slots = _views(_map(fds[0], write=True), _layout(self.outputs)[0])
        return {"event": "ok"}

    def do_draw(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        """Make an input set; its memory file goes back. With "verify" its outputs are kept."""
        index = request["set"]
        tensors: list[Any] = []
        drawn = self._draw(index)
        code = [_encode(argument, tensors) for argument in drawn]
        if request["verify"] and index not in self.expected:
            self.expected[index] = self._expect(drawn)
        fd, places = _write_file(tensors)
        self.sets[index] = (os.dup(fd), code, places)
        new.append(fd)
        size = os.fstat(fd).st_size
        return {"event": "drawn", "code": code, "places": places, "bytes": size}

    def _inputs(self, index: int) -> list[Any]:
        """The arguments of this set, on the CPU; not to be written to."""
        fd, code, places = self.sets[index]
        views = _views(_map(fd, write=False), places)
        return [_decode(value, views) for value in code]

    def do_ping(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        return {"event": "pong"}

    def do_load(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        self.output = None
        given = self._inputs(request["set"])  # mapped anew each time, as candidates do
        if not self.arguments:
            _prepare_memory(self.device, self.slots, given)
        self.arguments = []  # freed first, so that the allocator's blocks join up again
        self.arguments = _place(given, self.device.name)
        self.device.flush()
        return {"event": "loaded"}

    def do_go(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        """One call, as a candidate makes it: the parent's clock stops at "done"."""
        self.output, device_ms = self.device.call(self.model, self.arguments)
        return {"event": "done", "device_ms": device_ms}

    def do_copy(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        """What a candidate does with its outputs, for the sake of the time it takes."""
        flat = _flatten(self.output)
        if not isinstance(flat, str):
            for slot, tensor in zip(self.slots, flat, strict=True):
                slot.copy_(tensor.detach())
        return {"event": "copied"}

    def do_compare(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        """Is what lies in the memory file (fds[0]) right for this set?"""
        places, _ = _layout(self.outputs)
        problems = []
        for index, view in enumerate(_views(_map(fds[0], write=True), places)):
            wide, own_error = self.expected[request["set"]][index]
            found = view.clone().to(self.device.name)
            rule = _stock_difference if self.stock else _difference
            problem = rule(found, wide, own_error)
            if problem:
                label = f"output {index}: " if len(places) > 1 else ""
                problems.append(label + problem)
        return {"event": "compared", "problems": problems}


    def do_audit(self, request: Mapping[str, Any], fds: list[int], new: list[int]) -> Any:
        """Which lazy answers pass on every set, and which faithful ones fail on one."""
        sets = range(request["sets"])
        lazy: dict[str, bool] = {}
        faithful: dict[str, str] = {}
        for index in sets:
            right = [wide for wide, _ in self.expected[index]]
            for name, answer in self._lazy(index, right):
                lazy[name] = lazy.get(name, True) and not self._problems(index, answer)
            for name, answer in self._faithful(index):
                problem = self._problems(index, answer)
                if problem:
                    faithful[name] = problem
        findings = [f"accepted: {name}" for name, passed in lazy.items() if passed]
        findings += [f"refused: {name}: {problem}" for name, problem in faithful.items()]
        return {"event": "audited", "findings": findings}

    def _problems(self, index: int, answer: Sequence[Any]) -> str:
        pairs = zip(answer, self.expected[index], self.outputs, strict=True)
        return "; ".join(
            problem
            for found, (wide, own), like in pairs
            if (problem := _difference(found.to(like.dtype), wide, own))
        )

    def _run(self, arguments: Sequence[Any]) -> list[Any]:
        output, _ = self.device.call(self.model, _place(arguments, self.device.name))
        flat = _flatten(output)
        return [] if isinstance(flat, str) else [tensor.detach() for tensor in flat]

    def _lazy(self, index: int, right: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
        """Answers that have not done the work: (name, outputs)."""
        import torch

        wide = [tensor.double() for tensor in right]
        yield "zeros", [torch.zeros_like(tensor) for tensor in wide]
        yield "the best constant", [t.mean().expand_as(t) for t in wide]
        if any(t.dim() > 1 for t in wide):
            yield (
                "the mean of every row",
                [t.mean(-1, keepdim=True).expand_as(t) if t.dim() > 1 else t for t in wide],
            )
        if any(t.is_floating_point() for t in self.outputs):
            yield "rounded to bfloat16", [
                t.bfloat16() if like.is_floating_point() else t
                for t, like in zip(right, self.outputs, strict=True)
            ]
        halves = []
        for tensor in wide:
            half = tensor.clone()
            half.reshape(-1)[half.numel() // 2 :] = 0
            halves.append(half)
        yield "half of the work", halves
        other = (index + 1) % len(self.expected)
        yield "the outputs of other inputs", [value for value, _ in self.expected[other]]
        for place, given in enumerate(self._inputs(index)):
            if not isinstance(given, torch.Tensor):
                continue
            if all(given.shape == tensor.shape for tensor in wide):
                yield f"a copy of input {place}", [given.to(self.device.name)] * len(wide)
            arguments = self._inputs(index)
            arguments[place] = self._inputs(other)[place]
            yield f"input {place} of other inputs", self._run(arguments)

    def _faithful(self, index: int) -> Iterator[tuple[str, list[Any]]]:
        """Answers that must pass: the reference, also with its sums in another order."""
        import torch

        yield "the reference itself", self._run(self._inputs(index))
        if not self.device.cuda:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            with torch.backends.mkldnn.flags(enabled=False):
                yield "the reference on one thread", self._run(self._inputs(index))
            torch.set_num_threads(threads)


def _prepare_memory(device: _Device, outputs: Sequence[Any], arguments: Sequence[Any]) -> None:
    if device.cuda:
        return
    import torch

    tensors = [t for t in [*outputs, *arguments] if isinstance(t, torch.Tensor)]
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    _touch_memory(min(TOUCHED * moved, TOUCHED_MOST))


def _same(one: Any, other: Any) -> bool:
    """Bit for bit, so that NaN equals itself."""
    import torch

    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.equal(
            one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8)
        )
    if isinstance(one, list | tuple):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return True


def _place(arguments: Sequence[Any], device: str, dtype: Any = None) -> list[Any]:
    """The arguments as fresh tensors on the device (floating ones as `dtype` if given)."""
    import torch

    def fresh(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            wide = dtype is not None and value.is_floating_point()
            kind = dtype if wide else value.dtype
            return value.detach().to(device, kind, copy=True, memory_format=torch.contiguous_format)
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
        f"{share:.3g} % of the elements are wrong; largest error {worst:.3g}; "
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
    gpu = start["target"] == "cuda"
    controls = confinement.enter(
        limits, writable=[start["folder"]], readable=start["readable"], gpu=gpu
    )
    send(sock, {"event": "confined", "controls": list(controls)})
    run = _Candidate(sock, start, fds)
    run.guarded("import", run.import_answer)
    run.guarded("construct", run.construct)
    send(sock, {"event": "ready"})
    while True:
        new: list[int] = []
        request = receive(sock, new)
        if request["op"] == "load":
            run.guarded("load", functools.partial(run.load, request, new[0]))
            send(sock, {"event": "loaded"})
        elif request["op"] == "go":
            run.guarded("forward", run.go)
        else:
            run.guarded("copy", functools.partial(run.copy, request))


class _Candidate:
    """State of one answer's process."""

    def __init__(self, sock: socket.socket, start: Mapping[str, Any], fds: list[int]) -> None:
        import torch

        self.sock, self.start, self.fds = sock, start, fds
        torch.set_num_threads(_threads())
        self.weights = _views(_map(fds[WEIGHTS], write=False), start["weights"]["places"])
        self.slots = _views(_map(fds[OUTPUTS], write=True), start["outputs"])
        self.given: list[Any] = []  # the inputs as they came
        self.output: Any = None
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
        init_tensors = [view.clone() for view in self.weights[len(self.start["weights"]["names"]):]]
        self.model = kind(*[_decode(value, init_tensors) for value in self.start["init"]])
        self.model.eval()
        if not stock:
            self.load_weights()
        self.model.to(self.device.name)

    def load_weights(self) -> None:
        """By name; where names differ but order and shapes agree, by order."""
        names = self.start["weights"]["names"]
        tensors = [view.clone() for view in self.weights[: len(names)]]
        given = dict(zip(names, tensors, strict=True))
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

    def load(self, request: Mapping[str, Any], fd: int) -> None:
        """Fresh contents; in the same memory as before (when asked to), or in new memory."""
        self.output = None
        views = _views(_map(fd, write=False), request["places"])
        os.close(fd)
        self.given = [_decode(value, views) for value in request["code"]]
        if not self.arguments:
            _prepare_memory(self.device, self.slots, self.given)
        if not (request["reuse"] and self.arguments and _refill(self.arguments, self.given)):
            self.arguments = []  # freed first, so that the allocator's blocks join up again
            self.arguments = _place(self.given, self.device.name)
        poison(self.device, self.slots, on=request["poison"])
        self.device.flush()

    def go(self) -> None:
        self.output, device_ms = self.device.call(self.model, self.arguments)
        send(self.sock, {"event": "done", "device_ms": device_ms})

    def copy(self, request: Mapping[str, Any]) -> None:
        """The outputs into shared memory. Their values are judged outside; what is said here about
        types and arguments is a help for honest answers and no defence."""
        flat = _flatten(self.output)
        if isinstance(flat, str):
            self.fail("output", flat)
        places = []
        for tensor in flat:
            if tensor.device.type != self.device.name.partition(":")[0]:
                self.fail("output", f"an output is on {tensor.device.type}, not on the device")
            places.append({"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)})
        expected = [{"dtype": p["dtype"], "shape": p["shape"]} for p in self.start["outputs"]]
        if places == expected:
            for slot, tensor in zip(self.slots, flat, strict=True):
                slot.copy_(tensor.detach())
        watch = request["inputs"] and self.start["keeps_inputs"]
        changed = watch and not _same(self.arguments, _place(self.given, self.device.name))
        send(self.sock, {"event": "copied", "outputs": places[:64], "changed": changed})


def _refill(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """New contents into the memory of old arguments, if they are alike."""
    import torch

    if len(old) != len(new):
        return False
    for one, other in zip(old, new, strict=True):
        if not isinstance(one, torch.Tensor):
            return False
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
    for one, other in zip(old, new, strict=True):
        one.detach().copy_(other)
    return True


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
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "bad_alloc" in text:
        text = "out of memory: " + text
    text = re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text)
    text = re.sub(r"(/[\w.+-]+){2,}/", "", text)
    text = re.sub(r"candidate-\w+", "candidate", text)  # the folder it runs in
    text = text.split("\nException raised from")[0]  # torch's C++ stack, full of addresses
    return (text[:MESSAGE_CHARS] + (f" (line {line} of the code)" if line else "")).strip()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    # One copy of the module: forks import it by name.
    sys.modules["sandbox_worker"] = sys.modules["__main__"]
    zygote(int(sys.argv[1]))
