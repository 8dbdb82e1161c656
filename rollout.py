"""Tasks, prompts, parsing and the multi-turn conversation that produces training samples.

One turn of one trajectory is one sample. A turn goes

    prompt --policy--> response --parse--> code --sandbox--> verdict --> feedback --> next prompt

The prompt of a turn is built anew each time (Kevin, Sec. 4.1 and App. D): the base prompt with the
task, then for each earlier turn, oldest first, its kernel, the model's own summary of it and the
feedback it got. Thoughts are dropped, since they would fill the context within a few turns. Oldest
turns go first when the token budget is full. The whole text is one user message. Wording lives in
`prompts/*.txt` (named `$fields`, no logic); this file only decides which template is used when.

Whatever a model writes becomes a verdict: `parse_response` never raises, an answer it cannot read
goes to the sandbox as a format error and comes back as a result like any other.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from kernel_sandbox import (
    KernelResult,
    Sandbox,
    Status,
    Task,
    UserError,
    load_task,
    resolve_sizes,
)

HERE = Path(__file__).resolve().parent
PROMPTS = HERE / "prompts"

# DEVIATION D01: the prompt names the GPU that runs and times the kernels; the paper's prompt says
# H100 although its timing GPU is an H200 (App. A.2).
GPU = "H200"

# ASSUMPTION A01: error messages are cut at 800 characters (the paper does not say; KernelBench's
# harness of that time cut run-time errors at 200).
MESSAGE_CHARS = 800

# ASSUMPTION A02: a summary is cut at 600 characters in later prompts. The prompt asks for one to
# three sentences, but nothing else keeps a model from writing a thousand lines after its code.
SUMMARY_CHARS = 600


# ------------------------------------------------------------------------------- types


@dataclass(frozen=True)
class Parsed:
    """A response taken apart."""

    thought: str  # the reasoning, without its tags
    code: str | None  # the one code block, or None if `error` says why there is none
    summary: str  # the text after the code block; empty if there is none
    error: str  # why no code could be read, worded for the model; empty if `code` is there


@dataclass(frozen=True)
class Turn:
    """One training sample: one response, what was asked and what came of it."""

    prompt: str  # the user message, before the chat template
    response: str  # decoded response, end-of-sequence token left out
    thought: str  # see Parsed
    code: str | None  # see Parsed
    summary: str  # see Parsed
    result: KernelResult  # the sandbox's verdict
    feedback: str  # what the next prompt says about this turn
    prompt_ids: tuple[int, ...]  # [P] the very ids given to the policy
    token_ids: tuple[int, ...]  # [T] the very ids sampled, end-of-sequence token included
    logprobs: tuple[float, ...]  # [T] nats, at the sampling temperature
    truncated: bool  # the response ran into the length limit


@dataclass(frozen=True)
class Episode:
    """One trajectory on one task."""

    task: Task
    turns: tuple[Turn, ...]  # in order; the first saw the task only
    trajectory: int  # 0 .. trajectories-1 within the task


class Attempt(Protocol):
    """What a later prompt needs of an earlier turn; a `Turn` is one."""

    @property
    def code(self) -> str | None: ...
    @property
    def summary(self) -> str: ...
    @property
    def feedback(self) -> str: ...


# ----------------------------------------------------------------------------- prompts


@functools.cache
def _template(name: str) -> Template:
    return Template((PROMPTS / name).read_text(encoding="utf-8").rstrip("\n"))


def _fill(name: str, **fields: str) -> str:
    return _template(name).substitute(fields)


def _cut(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, whole lines where that loses less than half."""
    text = text.strip()
    if len(text) <= limit:
        return text
    text = text[:limit]
    line_end = text.rfind("\n")
    return (text[:line_end] if line_end > limit // 2 else text).rstrip() + "\n..."


_FEEDBACK = {
    Status.FORMAT_ERROR: "feedback_format.txt",
    # A rule violation is the paper's first case too ("format violated"), in words of its own.
    Status.HACK: "feedback_hack.txt",
    Status.COMPILE_ERROR: "feedback_compile.txt",
    Status.RUNTIME_ERROR: "feedback_runtime.txt",
    Status.TIMEOUT: "feedback_runtime.txt",
    Status.INCORRECT: "feedback_incorrect.txt",
    Status.CORRECT: "feedback_correct.txt",
    # ASSUMPTION A03: a failure of the evaluation itself is told as such, with no hint at the code,
    # and the trajectory goes on; the trainer drops the sample.
    Status.HARNESS_ERROR: "feedback_harness.txt",
}


def feedback_text(result: KernelResult) -> str:
    """Feedback on one turn for the next prompt (App. D): five cases, by precedence of `Status`.

    Not parsed or against the rules; failed to compile; failed at run time (or took too long);
    incorrect; correct, with the measured speedup over eager PyTorch.
    """
    if result.status is Status.CORRECT:
        return _fill(_FEEDBACK[Status.CORRECT], speedup=f"{result.speedup:.2f}x")
    return _fill(
        _FEEDBACK[result.status], message=_cut(_clean(result.reason), MESSAGE_CHARS)
    ).rstrip()


def _attempt_text(number: int, attempt: Attempt) -> str:
    # ASSUMPTION A04: a turn without readable code stays in the history, with one line that says
    # so in place of the kernel; a missing summary reads "(none)" (the paper is silent on both).
    if attempt.code is None:
        kernel = _fill("no_kernel.txt")
    else:
        kernel = _fill("kernel.txt", code=attempt.code.rstrip("\n"))
    summary = _cut(attempt.summary, SUMMARY_CHARS) or _fill("no_summary.txt")
    return _fill(
        "attempt.txt",
        number=str(number),
        kernel=kernel,
        summary=summary,
        feedback=attempt.feedback,
    )


def _base_prompt(task: Task, first_turn: bool, gpu: str) -> str:
    # DEVIATION D02: the prompt says that weights are handed over by state dict. The paper's tasks
    # get theirs from the same seed and the same order of random draws, which fails honest kernels.
    # DEVIATION D03: the prompt forbids try, except and pass outright. The paper gives such answers
    # zero but does not say that its prompt mentions it.
    # DEVIATION D04: target "cpp" asks for C++ and OpenMP; the paper knows CUDA only.
    base = _fill(f"base_{task.target}.txt", task=task.source.strip("\n"), gpu=gpu)
    if not first_turn:
        return base
    example = (PROMPTS / f"example_{task.target}.py").read_text(encoding="utf-8")
    return base + "\n\n" + _fill("example.txt", example=example.rstrip("\n"))


def build_prompt(
    task: Task,
    history: Sequence[Attempt],
    count_tokens: Callable[[str], int],
    budget: int,
    *,
    gpu: str = GPU,
) -> str:
    """The user message of the turn that follows `history` (App. D).

    First turn: base prompt and the one-shot example. Later turns: base prompt, a header, each
    earlier turn oldest first (kernel, summary, feedback), the closing instruction. While
    `count_tokens(text)` exceeds `budget` tokens the oldest turn is left out; those that stay keep
    their numbers.

    Raises UserError if the base prompt alone is longer than the budget.
    """
    if not history:
        text = _base_prompt(task, True, gpu)
        _require_fit(task, count_tokens(text), budget)
        return text
    base = _base_prompt(task, False, gpu)
    closing = _fill("closing.txt")
    attempts = [_attempt_text(number, turn) for number, turn in enumerate(history, start=1)]
    for dropped in range(len(attempts)):
        parts = [base, _fill("history.txt"), *attempts[dropped:], closing]
        text = "\n\n".join(parts)
        if count_tokens(text) <= budget:
            return text
    # ASSUMPTION A05: if not even the latest turn fits, the model starts over from the base prompt
    # (still without the example) and the closing instruction.
    text = base + "\n\n" + closing
    _require_fit(task, count_tokens(text), budget)
    return text


def _require_fit(task: Task, tokens: int, budget: int) -> None:
    if tokens > budget:
        raise UserError(
            f"task {task.name}: its base prompt has {tokens} tokens and the prompt budget is "
            f"{budget}; raise prompt_budget or leave the task out"
        )


# ----------------------------------------------------------------------------- parsing


def parse_response(text: str, truncated: bool = False) -> Parsed:
    """Take a response apart: thought, one python code block, summary. Never raises.

    The thought ends at the first `</think>`; its opening tag is optional, since chat templates of
    reasoning models write it into the prompt. Without `</think>` the thought is what stands before
    the code block. Fences inside the thought do not count. `truncated` marks a response that ran
    into the length limit: it fails whatever it holds (blog, LayerNorm example, turn 4).
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    thought, closed, answer = text.partition("</think>")
    if not closed:
        answer = text
    block = _code_block(answer)
    if not closed:
        thought = block.before
    thought = _clean(thought.strip().removeprefix("<think>"))
    if truncated:
        return Parsed(thought, None, "", "The answer was cut off at the length limit.")
    if not text.strip():
        return Parsed("", None, "", "The answer is empty.")
    if block.error:
        return Parsed(thought, None, "", block.error)
    return Parsed(thought, block.code, _clean(block.after), "")


@dataclass(frozen=True)
class _Block:
    before: str  # text before the first fence; all of it if there is none
    code: str  # the code, ending in a newline
    after: str  # text after the closing fence
    error: str  # empty, or why `code` must not be used


def _fence(line: str) -> tuple[int, str] | None:
    """(length of the run of backticks, language) if `line` is a fence."""
    line = line.strip(" \t")
    run = len(line) - len(line.lstrip("`"))
    info = line[run:].strip()
    return (run, info.lower()) if run >= 3 and "`" not in info else None


# ASSUMPTION A06: an answer holds exactly one code block, marked python, py or nothing; none, a
# second one or one in another language fail (the paper: "one complete program in a code block").
_LANGUAGES = ("python", "py", "python3", "")


def _code_block(text: str) -> _Block:
    """The only fenced block of `text`; one pass over the lines, so junk costs linear time."""
    lines = text.split("\n")
    spans: list[tuple[int, int, str]] = []  # (opening line, closing line, language)
    opened: tuple[int, int, str] | None = None  # (line, run of backticks, language)
    for number, line in enumerate(lines):
        fence = _fence(line)
        if fence is None:
            continue
        run, language = fence
        if opened is None:
            opened = (number, run, language)
        elif run >= opened[1] and not language:
            spans.append((opened[0], number, opened[2]))
            opened = None
    first = spans[0][0] if spans else opened[0] if opened else len(lines)
    before = "\n".join(lines[:first])
    error = ""
    if opened is not None:
        error = "The code block is not closed."
    elif not spans:
        error = "There is no python code block after the reasoning."
    elif len(spans) > 1:
        error = "There is more than one code block after the reasoning; give exactly one."
    elif spans[0][2] not in _LANGUAGES:
        error = "The code block is not marked as python."
    if error:
        return _Block(before, "", "", error)
    start, end, _ = spans[0]
    code = "\n".join(lines[start + 1 : end]) + "\n"
    if not code.strip():
        error = "The code block is empty."
    elif "\0" in code or _clean(code) != code.strip():
        error = "The code block holds characters that no source file can hold."
    return _Block(before, code, "\n".join(lines[end + 1 :]), error)


def _clean(text: str) -> str:
    """`text` stripped, with what UTF-8 or a C string cannot hold replaced by U+FFFD."""
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").strip()


# ------------------------------------------------------------------------------- tasks

Split = Literal["train", "heldout", "all"]

# ASSUMPTION A07: Kevin trains on 180 of the 200 tasks of KernelBench's levels 1 and 2 and holds 10
# of each level out, but publishes no ids. These are ours, picked by hand over the kinds of task;
# none is of level 1's convolutions (50 and 54-87 are one family, so its members would be trained
# on), none is 33 or 39 of level 2 (one pipeline at two sizes).
KERNELBENCH_HELDOUT = {
    1: (5, 11, 24, 29, 36, 46, 48, 91, 97, 98),
    2: (4, 14, 17, 28, 37, 52, 63, 71, 86, 99),
}
KERNELBENCH_LEVELS = (1, 2, 3)


def load_tasks(spec: str, target: str, split: Split = "train") -> list[Task]:
    """Tasks in a fixed order, with the sizes of `target` ("cuda" or "cpp") filled in.

    `spec` is a folder with `splits.toml` (or without one: then every file is a training task), one
    task file, `kernelbench:DIR` (a checkout of KernelBench) or `kernelbench:hf` (its dataset on
    the Hugging Face hub); the last two take a suffix such as `:1,2` that names the levels.

    Raises UserError for what is not there, names a task that is not there, or does not parse.
    """
    if split not in ("train", "heldout", "all"):
        raise UserError(f"unknown split {split!r}: take train, heldout or all")
    if spec.startswith("kernelbench:"):
        tasks = _kernelbench_tasks(spec.removeprefix("kernelbench:"), target, split)
    else:
        path = Path(spec)
        if not path.exists() and (HERE / spec).exists():
            path = HERE / spec  # so that "tasks" works from any working directory
        if path.is_dir():
            tasks = _folder_tasks(path, target, split)
        elif path.is_file():
            tasks = [load_task(path, target)]
        else:
            raise UserError(
                f"no tasks at {spec}: give a folder, a task file, kernelbench:DIR or kernelbench:hf"
            )
    if not tasks:
        raise UserError(f"no {split} tasks in {spec}")
    return tasks


def _folder_tasks(folder: Path, target: str, split: Split) -> list[Task]:
    table = folder / "splits.toml"
    if not table.exists():
        if split == "heldout":
            raise UserError(f"{folder} has no splits.toml, so it has no held-out tasks")
        paths = sorted(folder.glob("*.py"), key=_problem_order)
        return [load_task(path, target) for path in paths]
    try:
        splits = tomllib.loads(table.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {table}: {error}") from None
    names: list[str] = []
    for key in ("train", "heldout", "extra") if split == "all" else (split,):
        listed = splits.get(key, [])
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise UserError(f"{table}: {key} must be a list of task names")
        names += listed
    for name in names:
        if not (folder / f"{name}.py").is_file():
            raise UserError(f"{table} names {name}, but there is no {folder / name}.py")
    return [load_task(folder / f"{name}.py", target) for name in names]


def _problem_order(path: Path) -> tuple[int, str]:
    """KernelBench's files begin with a problem number, which should not sort as text."""
    number = re.match(r"\d+", path.name)
    return (int(number.group()) if number else 0, path.name)


def _kernelbench_tasks(where: str, target: str, split: Split) -> list[Task]:
    levels: Sequence[int] = KERNELBENCH_LEVELS if split == "all" else tuple(KERNELBENCH_HELDOUT)
    place, colon, suffix = where.rpartition(":")
    if colon and re.fullmatch(r"\d+(,\d+)*", suffix):
        where, levels = place, [int(level) for level in suffix.split(",")]
    tasks = []
    for level in levels:
        found = (
            _hub_level(level, target) if where == "hf" else _checkout_level(where, level, target)
        )
        heldout = KERNELBENCH_HELDOUT.get(level, ())
        for problem, task in found:
            if split == "all" or (problem in heldout) == (split == "heldout"):
                tasks.append(task)
    return tasks


def _checkout_level(where: str, level: int, target: str) -> list[tuple[int, Task]]:
    root = Path(where).expanduser()
    folders = [root / "KernelBench" / f"level{level}", root / f"level{level}"]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise UserError(
            f"no KernelBench level {level} below {root}: clone "
            "https://github.com/ScalingIntelligence/KernelBench and give that folder"
        )
    paths = sorted(folder.glob("[0-9]*.py"), key=_problem_order)
    return [
        (_problem_order(p)[0], load_task(p, target, f"level{level}_{p.stem}", level)) for p in paths
    ]


def _hub_level(level: int, target: str) -> list[tuple[int, Task]]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "kernelbench:hf needs the datasets package (pip install datasets); "
            "or clone KernelBench and use kernelbench:DIR"
        ) from None
    try:
        rows = datasets.load_dataset("ScalingIntelligence/KernelBench", split=f"level_{level}")
    except Exception as error:  # noqa: BLE001 - the library raises dozens of types here
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"cannot get KernelBench level {level} from the Hugging Face hub ({reason}); "
            "check the network, or clone KernelBench and use kernelbench:DIR"
        ) from None
    found = []
    for row in sorted(rows, key=lambda row: int(row["problem_id"])):
        name = f"level{level}_{Path(row['name']).stem}"
        try:
            source = resolve_sizes(row["code"], target)
            ast.parse(source)
        except (SyntaxError, ValueError) as error:
            raise UserError(f"task {name} of the Hugging Face dataset: {error}") from None
        task = Task(name, level, source, target)
        found.append((int(row["problem_id"]), task))
    return found


# ------------------------------------------------------------------------------ policy


@dataclass(frozen=True)
class Generation:
    """One sampled response."""

    token_ids: tuple[int, ...]  # [T] as sampled, end-of-sequence token included
    logprobs: tuple[float, ...]  # [T] nats, of the distribution sampled from (temperature applied)
    text: str  # decoded, without the end-of-sequence token
    finish_reason: Literal["stop", "length"]


class Policy(Protocol):
    """What generates text: five methods, the same for every engine."""

    context: int  # tokens, prompt and response together

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float = 0.9,
        on_finish: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]: ...
    def sync(self, params: Iterable[tuple[str, Tensor]]) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


CPU_BATCH_TOKENS = 256  # tokens of one forward pass, see TransformersPolicy
GPU_BATCH_TOKENS = 2048
ROWS = "paged|rows"  # name of the attention below; "paged|" is what the engine looks for


def _rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **batch: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed batch, one request after the other; query [1, H, Q, D].

    The engine concatenates the requests of a batch. Its stock attention for machines without
    flash attention multiplies all queries with all keys and masks what does not belong together,
    which is quadratic in the number of requests; on a CPU that is most of the time.
    """
    keys, values = batch["cache"].update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=batch["read_index"],
        write_index=batch["write_index"],
    )
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]  # [1, H_kv, K, D]
    q_ends, k_ends = batch["cu_seq_lens_q"].tolist(), batch["cu_seq_lens_k"].tolist()
    out = torch.empty_like(query)
    for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        new, total = q1 - q0, k1 - k0
        mask = None
        if 1 < new < total:  # a later chunk of a prompt: causal, aligned to its end
            mask = torch.ones(new, total, dtype=torch.bool, device=query.device).tril(total - new)
        out[:, :, q0:q1] = F.scaled_dot_product_attention(
            query[:, :, q0:q1],
            keys[:, :, k0:k1],
            values[:, :, k0:k1],
            attn_mask=mask,
            is_causal=new == total,
            scale=scaling,
            enable_gqa=True,
        )
    return out.transpose(1, 2).contiguous(), None


class TransformersPolicy:
    """Continuous batching of transformers, on the trainer's own module (no copy) or one of its own.

    Every call opens the engine behind `model.generate_batch` anew, adds all requests before it
    starts and closes it at the end. That makes a call a pure function of weights, prompts and
    seed: no cache outlives a change of weights, the composition of every batch is fixed (requests
    added while the engine runs would join whichever batch is next), and so is the order in which
    its one random stream is used. While it runs, nothing else in the process may draw from torch's
    global generator. Opening it takes milliseconds, as all sizes are given.

    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        kv_bytes: int | None = None,
        batch_tokens: int | None = None,
        block_tokens: int = 16,
        threads: int | None = None,
    ) -> None:
        """`kv_bytes`: limit of the KV cache; by default 1.5 GiB on CPU, half the free memory of a
        GPU. `batch_tokens`: tokens of one forward pass; small blocks and batches let requests with
        the same beginning share its prefill. `threads`: of one forward pass on a CPU, by default
        half of torch's, which leaves the other half to the builds that start meanwhile (two
        OpenMP programs on the same cores wait for each other most of the time)."""
        while not hasattr(model, "init_continuous_batching"):
            inner = getattr(model, "module", None)  # DistributedDataParallel
            if not isinstance(inner, nn.Module):
                raise UserError(f"{type(model).__name__} cannot generate: not a transformers model")
            model = inner
        self.model = model
        self.tokenizer = tokenizer
        self.kv_bytes = kv_bytes
        self.batch_tokens = batch_tokens
        self.block_tokens = block_tokens
        self.threads = threads or max(1, torch.get_num_threads() // 2)
        self.context = int(self.model.config.get_text_config().max_position_embeddings)
        self.eos_ids = _eos_ids(model, tokenizer)
        from transformers import AttentionInterface

        AttentionInterface.register(ROWS, _rows_attention)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float = 0.9,
        on_finish: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        """One response for each prompt; `on_finish(index, generation)` as soon as each is there.

        Temperature 0 is greedy. Leaves train or eval mode, attention and the global random state
        as they were. Raises UserError if a prompt does not fit, RuntimeError if the engine fails.
        """
        if not prompts:
            return []
        self._check_lengths(prompts, max_new_tokens)
        done: list[Generation | None] = [None] * len(prompts)
        with self._engine(prompts, seed, max_new_tokens, temperature) as (manager, indices):
            while not all(done):
                output = manager.get_result(timeout=1)
                if output is None:
                    if manager.is_running():
                        continue
                    break
                if not output.is_finished():
                    continue
                if output.error is not None:
                    raise RuntimeError(f"generation failed: {output.error}")
                index = indices[output.request_id]
                generation = self._generation(output)
                done[index] = generation
                if on_finish is not None:
                    on_finish(index, generation)
            fatal = manager.background_thread_status.fatal_error
        finished = [generation for generation in done if generation is not None]
        if len(finished) < len(prompts):
            lost = next(index for index, generation in enumerate(done) if generation is None)
            raise RuntimeError(
                f"the engine returned {len(finished)} of {len(prompts)} responses; the first "
                f"missing one is number {lost} ({fatal or 'no reason given'})"
            )
        return finished

    def sync(self, params: Iterable[tuple[str, Tensor]]) -> None:
        """Take over `params` (name, value). A no-op for tensors that are the module's own."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        own.update(self.model.named_buffers(remove_duplicate=False))
        for name, value in params:
            name = name.replace("_checkpoint_wrapped_module.", "").removeprefix("module.")
            if name not in own:
                raise ValueError(f"no parameter {name} in {type(self.model).__name__}")
            if own[name].data_ptr() != value.data_ptr():
                with torch.no_grad():
                    own[name].copy_(value)

    def sleep(self) -> None:
        """Nothing is held between calls but the weights; hand cached GPU memory back."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Ready at any time."""

    def close(self) -> None:
        self.sleep()

    # -- inside

    def _check_lengths(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        longest = max(len(prompt) for prompt in prompts)
        if max_new_tokens < 1 or min(len(prompt) for prompt in prompts) < 1:
            raise ValueError("prompts and responses have at least one token")
        if longest + max_new_tokens > self.context:
            raise UserError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's "
                f"context of {self.context}; lower prompt_budget or max_new_tokens"
            )

    def _generation(self, output: Any) -> Generation:
        ids = tuple(output.generated_tokens)
        if len(ids) != len(output.logprobs):
            raise RuntimeError(f"{len(ids)} tokens came with {len(output.logprobs)} log-probs")
        stopped = bool(ids) and ids[-1] in self.eos_ids
        text = self.tokenizer.decode(
            list(ids[:-1] if stopped else ids),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Generation(ids, tuple(output.logprobs), text, reason)

    @contextlib.contextmanager
    def _engine(
        self,
        prompts: Sequence[Sequence[int]],
        seed: int,
        max_new_tokens: int,
        temperature: float,
    ) -> Iterator[tuple[Any, dict[str, int]]]:
        """A running manager with all requests queued, and each request's index."""
        from transformers import GenerationConfig

        model = self.model
        training, attention = model.training, model.config._attn_implementation
        threads = torch.get_num_threads()
        # ASSUMPTION A08: nothing but temperature shapes the distribution (no top-p, top-k or
        # penalty), whatever the model's own generation config says.
        generation = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature if temperature > 0 else None,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(self.eos_ids) or -1,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        manager = None
        if model.device.type == "cpu":
            torch.set_num_threads(self.threads)
        gc.freeze()  # the engine collects garbage twice a call: 0.5 s with all of torch's objects
        try:
            with torch.random.fork_rng([] if model.device.type == "cpu" else [model.device]):
                model.set_attn_implementation(self._attention(attention))
                manager = model.init_continuous_batching(
                    generation_config=generation,
                    continuous_batching_config=self._batching(prompts, seed, max_new_tokens),
                )
                names = manager.add_requests(
                    [list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens
                )
                manager.start()
                try:
                    yield manager, {name: index for index, name in enumerate(names)}
                finally:
                    # Hard: after the last result there is nothing to flush, and after an error or
                    # Ctrl-C the rest of a long batch must not run to its end first.
                    manager.stop(block=True, hard_stop=True)
                    manager.destroy()
        finally:
            gc.unfreeze()
            torch.set_num_threads(threads)
            model.set_attn_implementation(attention)
            model.train(training)

    def _attention(self, attention: str) -> str:
        """Name of the paged attention for a module that normally uses `attention`."""
        config, device = self.model.config.get_text_config(), self.model.device.type
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if device == "cpu" and attention == "sdpa" and kinds == {"full_attention"}:
            return ROWS
        if device == "cpu" or self.model.dtype == torch.float32:
            return f"paged|{attention}"  # left to itself the engine may pick flash attention here
        return attention

    def _batching(self, prompts: Sequence[Sequence[int]], seed: int, max_new_tokens: int) -> Any:
        """All sizes explicit, so that nothing depends on the memory that happens to be free."""
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        config, cpu = self.model.config.get_text_config(), self.model.device.type == "cpu"
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        block_bytes = self.block_tokens * 2 * config.num_hidden_layers * heads * head
        block_bytes *= self.model.dtype.itemsize
        limit = self.kv_bytes
        if limit is None:
            limit = 3 * 2**29 if cpu else torch.cuda.mem_get_info(self.model.device)[0] // 2
        blocks = [-(-(len(prompt) + max_new_tokens) // self.block_tokens) for prompt in prompts]
        # A quarter more than needed: the scheduler admits no new request below 15 % free blocks.
        wanted = sum(blocks) * 5 // 4 + 4
        allowed = limit // block_bytes
        if allowed < max(blocks) + 4:
            raise UserError(
                f"a sequence of {max(blocks) * self.block_tokens} tokens needs "
                f"{max(blocks) * block_bytes >> 20} MiB of KV cache, {limit >> 20} MiB are allowed"
            )
        return ContinuousBatchingConfig(
            block_size=self.block_tokens,
            num_blocks=min(wanted, allowed),
            max_batch_tokens=self.batch_tokens or (CPU_BATCH_TOKENS if cpu else GPU_BATCH_TOKENS),
            max_requests_per_batch=len(prompts),
            return_logprobs=True,
            seed=seed,
        )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's and those of the model's generation config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    found = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    return frozenset(i for i in found | {tokenizer.eos_token_id} if i is not None and i >= 0)


# ----------------------------------------------------------------------------- rollout


def call_seed(seed: int, step: int, turn: int) -> int:
    """Seed of one engine call, below 2**62: from where it stands in the run, nothing else."""
    digest = hashlib.sha256(f"{seed} {step} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message with the generation prompt behind it."""
    # ASSUMPTION A09: one user message, no system prompt (the paper shows one flat text).
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError("the tokenizer has no chat template; take an instruction-tuned model")
    message = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)


def rollout(
    policy: Policy,
    tokenizer: Any,
    tasks: Sequence[Task],
    sandbox: Sandbox,
    *,
    trajectories: int,
    turns: int,
    seed: int,
    step: int,
    temperature: float,
    max_new_tokens: int,
    prompt_budget: int,
    progress: bool = False,
) -> list[Episode]:
    """`trajectories` conversations of `turns` turns on each task, ordered by task, trajectory.

    All conversations go through a turn together: one call of the engine, each kernel sent to the
    sandbox as soon as its response ends. A prompt has at most `prompt_budget` tokens, and less
    where the model's context leaves less beside `max_new_tokens`.
    """
    budget = min(prompt_budget, policy.context - max_new_tokens)
    encode = functools.lru_cache(maxsize=None)(lambda text: tuple(encode_prompt(tokenizer, text)))
    places = [(task, trajectory) for task in tasks for trajectory in range(trajectories)]
    histories: list[list[Turn]] = [[] for _ in places]
    with tqdm(
        total=len(places) * turns,
        desc=f"step {step}",
        unit="turn",
        disable=not progress,
        leave=False,
    ) as bar:
        for number in range(turns):
            texts = [
                build_prompt(task, history, lambda text: len(encode(text)), budget)
                for (task, _), history in zip(places, histories, strict=True)
            ]
            made = _play_turn(
                policy,
                [task for task, _ in places],
                texts,
                [encode(text) for text in texts],
                sandbox,
                seed=call_seed(seed, step, number),
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                on_verdict=lambda _: bar.update(),
            )
            for history, turn in zip(histories, made, strict=True):
                history.append(turn)
            encode.cache_clear()
    return [
        Episode(task, tuple(history), trajectory)
        for (task, trajectory), history in zip(places, histories, strict=True)
    ]


def _play_turn(
    policy: Policy,
    tasks: Sequence[Task],
    texts: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
    sandbox: Sandbox,
    *,
    seed: int,
    temperature: float,
    max_new_tokens: int,
    on_verdict: Callable[[Any], None],
) -> list[Turn]:
    """One turn of every conversation."""
    parsed: dict[int, Parsed] = {}
    verdicts: dict[int, Future[KernelResult]] = {}

    def judge(index: int, generation: Generation) -> None:
        answer = parse_response(generation.text, generation.finish_reason == "length")
        parsed[index] = answer
        verdicts[index] = sandbox.submit(tasks[index], answer.code, answer.error)
        verdicts[index].add_done_callback(on_verdict)

    with sandbox.busy():  # builds may start, but nothing is timed while the engine runs
        generations = policy.generate(
            prompts,
            seed=seed,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            on_finish=judge,
        )
    turns = []
    for index, generation in enumerate(generations):
        answer, result = parsed[index], verdicts[index].result()
        turns.append(
            Turn(
                prompt=texts[index],
                response=generation.text,
                thought=answer.thought,
                code=answer.code,
                summary=answer.summary,
                result=result,
                feedback=feedback_text(result),
                prompt_ids=prompts[index],
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                truncated=generation.finish_reason == "length",
            )
        )
    return turns
