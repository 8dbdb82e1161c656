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

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Protocol

from kernel_sandbox import KernelResult, Status, Task, UserError

PROMPTS = Path(__file__).resolve().parent / "prompts"

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
    return _fill(_FEEDBACK[result.status], message=_cut(result.reason, MESSAGE_CHARS)).rstrip()


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
