"""The sandbox's command line; `python kernel_sandbox.py COMMAND` ends here.

  check TASK KERNEL     one verdict, explained
  batch PAIRS --out F   many, in parallel; started again after a kill it goes on where it was
  confusion DIR         every labelled kernel below DIR: who is on the wrong side
  audit TASKS...        do lazy answers fail on these tasks, and do faithful ones pass?
  doctor                what this machine can do, and what to do about what it cannot

Exit status: 0, 1 (confusion, audit: something is on the wrong side), 2 (bad arguments, with one
line that says what to do; doctor: the target does not work here), 3 (a harness error).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import confinement
import kernel_build
from kernel_sandbox import KernelResult, Sandbox, Status, Task, UserError, load_task

HERE = Path(__file__).resolve().parent


def default_target() -> str:
    """cuda where there are a GPU and nvcc, else cpp."""
    gpu = os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg")
    if gpu:
        with contextlib.suppress(kernel_build.ToolchainError):
            kernel_build.toolchain("cuda")
            return "cuda"
    return "cpp"


def read_kernel(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read the kernel {path}: {error.strerror}") from None


# ------------------------------------------------------------------------------- check


def explain(result: KernelResult) -> str:
    """A verdict as a few lines for a person."""
    lines = [result.status.value]
    if result.correct:
        low, high = result.speedup_ci
        lines[0] += f"  speedup {result.speedup:.3g} ({low:.3g} to {high:.3g}), "
        lines[0] += f"score {result.score:.3g}"
        if result.timer:
            lines.append(
                f"  {result.runtime_ms:.4g} ms, reference {result.reference_ms:.4g} ms "
                f"(medians, {result.timer} clock)"
            )
    if result.reason:
        lines.append("  " + result.reason.replace("\n", "\n  "))
    lines += [f"  evidence: {line}" for line in result.evidence if line]
    if result.rung >= 0:
        how = "from the cache" if result.cached else f"in {result.build_s:.1f} s"
        lines.append(f"  built on rung {result.rung} {how}")
    if result.stages:
        stages = ", ".join(f"{name} {seconds:.3f}" for name, seconds in result.stages.items())
        lines.append(f"  {result.total_s:.2f} s: {stages}")
    if result.controls:
        lines.append("  confined by: " + ", ".join(result.controls))
    return "\n".join(lines)


MEANING = {
    Status.FORMAT_ERROR: "There is no code that could be judged.",
    Status.HACK: "The code breaks a rule; it was refused before anything of it ran.",
    Status.COMPILE_ERROR: "The compiler refused the source; lines are the source string's own.",
    Status.RUNTIME_ERROR: "The process of the answer failed before all calls were answered.",
    Status.TIMEOUT: "The process of the answer was stopped.",
    Status.INCORRECT: "An output differs from the float64 reference by more than rounding explains "
    "(the tolerances stand in sandbox_worker.py, above OWN).",
    Status.CORRECT: "All outputs were right, also those of timed calls chosen at random.",
    Status.HARNESS_ERROR: "Something of ours failed, twice; this is no verdict on the answer.",
}


def explain_more(result: KernelResult, options: argparse.Namespace) -> str:
    """What the status means, which rule decided, and how to see it again."""
    lines = [f"  meaning: {MEANING[result.status]}"]
    if result.status is Status.HACK:
        rule, *where = result.evidence or ("unknown",)
        lines.append(f"  rule: {rule} (static_checks.py, native_checks.py)")
        lines += [f"  where: {line}" for line in where if line]
    command = f"python kernel_sandbox.py check {options.task} {options.kernel}"
    lines.append(f"  again: {command} --target {options.target} --rules {options.rules}")
    lines.append("  with the messages of its processes: KEVIN_SANDBOX_DEBUG=1 before that")
    return "\n".join(lines)


def check(options: argparse.Namespace) -> int:
    task = load_task(options.task, options.target)
    code = read_kernel(options.kernel)
    with Sandbox(options.target, rules=options.rules, jobs=options.jobs) as box:
        result = box.evaluate(task, code)
    print(json.dumps(result.to_json()) if options.json else explain(result))
    if options.explain and not options.json:
        print(explain_more(result, options))
    return 3 if result.status is Status.HARNESS_ERROR else 0


# ------------------------------------------------------------------------------- batch


def _read_pairs(path: str) -> list[tuple[str, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            pair = json.loads(line)
            pairs.append((str(pair["task"]), str(pair["kernel"])))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{path}, line {number}: a line must be {{"task": path, "kernel": path}}'
            ) from None
    return pairs


def _read_done(path: Path) -> Counter[tuple[str, str]]:
    """Pairs that have their line already. A line torn by a kill is cut off the file."""
    done: Counter[tuple[str, str]] = Counter()
    if not path.exists():
        return done
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    for line in whole.splitlines():
        try:
            record = json.loads(line)
            done[(record["task"], record["kernel"])] += 1
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is not a result file of `batch`; give another --out") from None
    return done


def batch(options: argparse.Namespace) -> int:
    pairs = _read_pairs(options.pairs)
    out = Path(options.out)
    if not out.parent.is_dir():
        raise UserError(f"the folder of --out, {out.parent}, does not exist; make it first")
    done = _read_done(out)
    todo = []
    for pair in pairs:
        if done[pair] > 0:
            done[pair] -= 1
        else:
            todo.append(pair)
    tasks = {path: load_task(path, options.target) for path in {task for task, _ in todo}}
    codes = [read_kernel(kernel) for _, kernel in todo]
    broken = 0
    bar = tqdm(total=len(pairs), initial=len(pairs) - len(todo), unit="kernel", disable=None)
    with (
        bar,
        open(out, "a", encoding="utf-8") as file,
        Sandbox(options.target, rules=options.rules, jobs=options.jobs) as box,
    ):
        futures = {
            box.submit(tasks[task], code): (task, kernel)
            for (task, kernel), code in zip(todo, codes, strict=True)
        }
        for future in as_completed(futures):
            task, kernel = futures[future]
            result = future.result()
            broken += result.status is Status.HARNESS_ERROR
            line = {"task": task, "kernel": kernel, **result.to_json()}
            file.write(json.dumps(line) + "\n")
            file.flush()
            bar.update()
    return 3 if broken else 0


# ------------------------------------------------------------------------------- confusion


@dataclass(frozen=True)
class Labelled:
    """A kernel file that says what it is."""

    path: Path
    honest: bool
    task: str  # name of a task file
    target: str  # "" if it is for both
    expect: str  # the status that an attack must get; "" if any but CORRECT will do
    mechanism: str


def read_label(path: Path) -> Labelled | None:
    """The label of a kernel file; None if it has none."""
    fields = {}
    for line in read_kernel(path).splitlines():
        found = re.match(r"#\s*(\w+):\s*(.*?)\s*$", line)
        if not found:
            break
        fields[found[1]] = found[2]
    if fields.get("label") not in ("honest", "attack"):
        return None
    if "task" not in fields:
        raise UserError(f"{path} has a label but no `# task: NAME` line")
    return Labelled(
        path, fields["label"] == "honest", fields["task"], fields.get("target", ""),
        fields.get("expect", ""), fields.get("mechanism", ""),
    )  # fmt: skip


def _wrong(label: Labelled, result: KernelResult) -> bool:
    if label.honest:
        return not result.correct
    return result.correct or result.score != 0 or result.status is Status.HARNESS_ERROR


def confusion(options: argparse.Namespace) -> int:
    root = Path(options.dir)
    if not root.is_dir():
        raise UserError(f"{root} is not a folder")
    labels = [label for path in sorted(root.rglob("*.py")) if (label := read_label(path))]
    here = [label for label in labels if label.target in ("", options.target)]
    if not here:
        raise UserError(f"no kernel labelled for {options.target} below {root}")
    folder = Path(options.tasks)
    names = {label.task for label in here}
    tasks = {name: load_task(folder / f"{name}.py", options.target) for name in names}
    results: dict[Labelled, KernelResult] = {}
    with Sandbox(options.target, rules=options.rules, jobs=options.jobs) as box:
        futures = {
            box.submit(tasks[label.task], read_kernel(label.path)): label for label in here
        }
        for future in tqdm(as_completed(futures), total=len(futures), unit="kernel", disable=None):
            results[futures[future]] = future.result()
    return report_confusion(here, results, len(labels) - len(here), as_json=options.json)


def report_confusion(
    labels: Sequence[Labelled],
    results: Mapping[Labelled, KernelResult],
    left_out: int,
    *,
    as_json: bool = False,
) -> int:
    """Print the matrix and whoever is on the wrong side; exit status."""
    matrix = Counter((label.honest, results[label].correct) for label in labels)
    wrong = [label for label in labels if _wrong(label, results[label])]
    statuses = Counter((label.honest, results[label].status.value) for label in labels)
    if as_json:
        print(json.dumps({
            "honest_accepted": matrix[True, True], "honest_refused": matrix[True, False],
            "attack_accepted": matrix[False, True], "attack_refused": matrix[False, False],
            "wrong": [{"file": str(label.path), **results[label].to_json()} for label in wrong],
        }))  # fmt: skip
        return 1 if wrong else 0
    print(f"{'':10}{'accepted':>10}{'refused':>10}")
    for honest, name in ((True, "honest"), (False, "attack")):
        print(f"{name:10}{matrix[honest, True]:>10}{matrix[honest, False]:>10}")
    for (honest, status), count in sorted(statuses.items(), reverse=True):
        print(f"  {'honest' if honest else 'attack'} {status}: {count}")
    if left_out:
        print(f"left out, for another target: {left_out}")
    for label in wrong:
        side = "honest, refused" if label.honest else "attack, accepted"
        result = results[label]
        if result.status is Status.HARNESS_ERROR:
            side = "not judged"
        print(f"WRONG {label.path} ({side}): {result.status.value} {result.reason}")
    for label in labels:
        status = results[label].status.value
        if label.expect and label not in wrong and status != label.expect:
            print(f"note {label.path}: {status}, its label expects {label.expect}")
    return 1 if wrong else 0


# ------------------------------------------------------------------------------- audit


def _task_files(arguments: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            for file in sorted(path.rglob("*.py")):
                text = read_kernel(file)
                if re.search(r"^class Model\b", text, re.M) and "\ndef get_inputs" in text:
                    files.append(file)
        else:
            files.append(path)
    return files


def audit(options: argparse.Namespace) -> int:
    files = _task_files(options.tasks)
    if not files:
        raise UserError("no task files found")
    loaded: list[tuple[Path, Task]] = [(path, load_task(path, options.target)) for path in files]
    faults = 0
    with Sandbox(options.target, jobs=options.jobs) as box:
        for path, task in tqdm(loaded, unit="task", disable=None):
            findings = box.audit(task)
            faults += bool(findings)
            if options.json:
                print(json.dumps({"task": str(path), "findings": findings}), flush=True)
            else:
                tqdm.write(f"{'fault' if findings else 'sound':6} {path}")
                for finding in findings:
                    tqdm.write(f"       {finding}")
    return 1 if faults else 0


# ------------------------------------------------------------------------------- doctor


@dataclass(frozen=True)
class Symptom:
    """One line of `doctor`."""

    name: str
    good: bool
    text: str  # what is there, or what to do


def _package(name: str, needed_for: str) -> Symptom:
    try:
        return Symptom(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Symptom(name, False, f"missing, needed for {needed_for}: pip install {name}")


def _torch_cuda() -> Symptom:
    """The CUDA that torch was built for, read without importing it."""
    spec = importlib.util.find_spec("torch")
    text = ""
    if spec is not None and spec.origin:
        text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.M)
    if found:
        return Symptom("torch for a GPU", True, f"CUDA {found[1]}")
    advice = "install torch's build for CUDA"
    return Symptom("torch for a GPU", False, f"torch without CUDA, only --target cpp; {advice}")


def _gpus() -> Symptom:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Symptom("GPU", False, "no nvidia-smi: no NVIDIA driver here, only --target cpp")
    fields = "name,driver_version,compute_cap,memory.total"
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Symptom("GPU", False, f"nvidia-smi does not answer: {error}")
    if done.returncode or not done.stdout.strip():
        return Symptom("GPU", False, f"nvidia-smi fails: {(done.stdout + done.stderr)[:200]}")
    return Symptom("GPU", True, "; ".join(done.stdout.strip().splitlines()))


def _compiler(target: str) -> Symptom:
    name = f"compiler, target {target}"
    try:
        tools = kernel_build.toolchain(target)
    except kernel_build.ToolchainError as error:
        return Symptom(name, False, str(error))
    first = (tools.nvcc_version if target == "cuda" else tools.cxx_version).strip().splitlines()
    text = first[-1 if target == "cuda" else 0] if first else ""
    if target == "cuda":
        text += f"; {tools.nvcc}; {' '.join(tools.arch_flags) or 'no GPU to compile for'}"
    return Symptom(name, True, text)


def _memory() -> Symptom:
    text = Path("/proc/meminfo").read_text()
    available = int(re.findall(r"MemAvailable:\s+(\d+)", text)[0]) / 2**20
    cores = len(os.sched_getaffinity(0))
    advice = "" if available >= 6 else "; the smoke run wants 6 GB"
    return Symptom("machine", available >= 6, f"{cores} cores, {available:.1f} GB free{advice}")


def _folders() -> list[Symptom]:
    found = []
    root = kernel_build.cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free / 2**30
        good = os.access(root, os.W_OK) and free > 3
        advice = "" if good else "; make room, or set KEVIN_CACHE_DIR to another folder"
        found.append(Symptom("build cache", good, f"{root}, {free:.0f} GB free{advice}"))
    except OSError as error:
        advice = "set KEVIN_CACHE_DIR to a folder that can be written"
        found.append(Symptom("build cache", False, f"{root}: {error.strerror}; {advice}"))
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free / 2**30
        good = free > 1
        advice = "" if good else "; in a container, start it with --shm-size=8g"
        found.append(Symptom("shared memory", good, f"/dev/shm, {free:.1f} GB free{advice}"))
    return found


def _confinement() -> Symptom:
    controls = confinement.available()
    bad = [name for name in controls if name.startswith(("no-landlock", "no-seccomp", "no-conf"))]
    advice = "; run on Linux 5.13 or later on x86-64, or in a container of its own" if bad else ""
    return Symptom("confinement", not bad, ", ".join(controls) + advice)


def symptoms() -> list[Symptom]:
    """What this machine has, and what to do about what it has not."""
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    found = [Symptom("Python", good, version if good else f"{version}; 3.11 or later is needed")]
    found += [
        _package("torch", "everything"), _package("numpy", "everything"),
        _package("transformers", "training"), _package("accelerate", "training"),
        _package("tree-sitter", "static checks"), _package("tree-sitter-cpp", "static checks"),
        _package("tree-sitter-cuda", "static checks"), _package("ninja", "stock builds"),
    ]  # fmt: skip
    found += [_compiler("cpp"), _compiler("cuda"), _torch_cuda(), _gpus(), _memory(), *_folders()]
    found.append(_confinement())
    cupti = importlib.util.find_spec("cupti") is not None
    profiler = "cupti-python" if cupti else "no cupti-python; CUDA events are used"
    found.append(Symptom("profiler", True, profiler))
    return found


def usable(found: Sequence[Symptom]) -> dict[str, bool]:
    """Which targets work here."""
    good = {symptom.name: symptom.good for symptom in found}
    base = all(good[name] for name in ("Python", "torch", "numpy", "tree-sitter", "build cache"))
    cpp = base and good["compiler, target cpp"] and good["tree-sitter-cpp"]
    needs = ("compiler, target cuda", "torch for a GPU", "GPU", "tree-sitter-cuda")
    return {"cpp": cpp, "cuda": base and all(good[name] for name in needs)}


def doctor(options: argparse.Namespace) -> int:
    found = symptoms()
    targets = usable(found)
    if options.json:
        lines = [{"name": one.name, "ok": one.good, "text": one.text} for one in found]
        print(json.dumps({"targets": targets, "lines": lines}))
    else:
        for one in found:
            print(f"{'ok' if one.good else 'LACKS':6} {one.name}: {one.text}")
        names = [name for name, works in targets.items() if works]
        print("targets that work here: " + (", ".join(names) or "none"))
        if not targets[options.target]:
            print(f"target {options.target} does not work here; see the lines marked LACKS")
    return 0 if targets[options.target] else 2


# ------------------------------------------------------------------------------- arguments


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="kernel_sandbox.py", description="Judge kernels.")
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, function: Any, text: str, *, judges: bool = True) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        sub.add_argument("--json", action="store_true", help="for programs")
        sub.add_argument(
            "--target", choices=("cuda", "cpp"), help="default: cuda where there is a GPU"
        )
        if judges:
            sub.add_argument("--rules", choices=("strict", "kernelbench"), default="strict")
            sub.add_argument("--jobs", type=int, help="builds at a time")
        return sub

    sub = command("check", check, "one verdict, explained")
    sub.add_argument("task", help="task file in KernelBench's format")
    sub.add_argument("kernel", help="answer: a Python file with ModelNew")
    sub.add_argument("--explain", action="store_true", help="rule, meaning, how to see it again")
    sub = command("batch", batch, "judge many answers; started again it goes on where it was")
    sub.add_argument("pairs", help='JSON lines: {"task": path, "kernel": path}')
    sub.add_argument("--out", required=True, help="JSON lines, one a verdict")
    sub = command("confusion", confusion, "judge labelled kernels, list those on the wrong side")
    sub.add_argument("dir", help="folder of kernels with `# label:` lines")
    sub.add_argument("--tasks", default=str(HERE / "tasks"), help="folder of their tasks")
    sub = command("audit", audit, "do lazy answers fail on these tasks?")
    sub.add_argument("tasks", nargs="+", help="task files or folders of them")
    command("doctor", doctor, "what this machine can do", judges=False)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if getattr(options, "jobs", None) is not None and options.jobs < 1:
        print("error: --jobs must be at least 1", file=sys.stderr)
        return 2
    try:
        if getattr(options, "target", "") is None:
            options.target = default_target()
        return options.function(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a full disk, a folder that cannot be written
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
