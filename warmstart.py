"""A small language model that already writes kernels for our tasks, made on the spot.

RL needs a model that is sometimes right. On a machine without a GPU no downloaded model both runs
fast enough and can write a kernel, so this file makes one: a Llama of a few million parameters,
trained for about two minutes on *refinement traces*. A trace is what the RL loop itself would
have recorded: prompts rendered by `rollout.build_prompt`, answers by `trace_grammar`, feedback by
`rollout.feedback_text`. The first answer is often broken or slow; an error is followed by a repair
(or by another mistake), a slow kernel sometimes by a faster one. `Dials` says how often, and so
how much is left to learn: the model starts mediocre on purpose.

Held-out tasks are compositions that no trace holds. A new composition is translated line by line
(the thought copies the lines of `forward`, the code has one line for each), which is a skill that
a model of this size can learn in this time.

The tokenizer follows from the same wish. Its pre-tokenizer splits at line ends only, and every line
that the grammar or the prompts can produce is one token; other text falls back to byte-level BPE
that never joins digits. So an answer of 40 lines is about 50 tokens, and any text survives the
round trip byte for byte.

`ensure_model(target)` caches the result by content; `python warmstart.py --target cpp --out DIR`
writes it to a folder, `--stats` measures it in the sandbox.
"""

from __future__ import annotations

import os

# Before torch starts its threads: idle ones sleep. Threads that spin wait for the compilers that
# share the cores, and a step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import argparse
import fcntl
import functools
import hashlib
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trace_grammar as grammar
from kernel_sandbox import KernelResult, Status, Task, UserError, resolve_sizes
from rollout import build_prompt, feedback_text, parse_response
from tasks import generate

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from rollout import Turn

ROOT = Path(__file__).resolve().parent

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Dials:
    """How good the traces are: probabilities, each for one answer."""

    fault: float = 0.58  # a first answer holds a mistake
    fault_again: float = 0.50  # an answer after an error holds a mistake
    fault_after_correct: float = 0.42  # an answer after a correct one holds a mistake
    same_fault: float = 0.3  # ... which after an error is the same one
    malformed: float = 0.03  # an answer without code block or with two
    fastest: float = 0.07  # a first answer takes the fastest variant
    fast_field: float = 0.20  # otherwise, each field is the fastest one's with this probability
    improve: float = 0.20  # an answer after a correct slow one is faster
    redraw: float = 0.10  # an answer takes a variant unrelated to the previous one


@dataclass(frozen=True)
class Settings:
    """Size of the model and of its training."""

    hidden: int = 160  # width
    layers: int = 4
    heads: int = 5
    inner: int = 448  # width of the feed-forward part
    context: int = 2048  # longest sequence, tokens
    lines: int = 1600  # tokens that are whole lines
    merges: int = 500  # BPE merges for everything else
    copying: int = 8000  # lessons of the first kind: the steps of forward alone
    writing: int = 1500  # of the second: one whole answer to the bare module
    refining: int = 2100  # of the third: any turn, with the prompt of the RL loop
    batch_tokens: int = 1280  # a step
    lr: float = 3e-3  # of embeddings and norms: peak; short linear rise, then cosine to 4 %
    muon_lr: float = 2e-2  # of the other matrices


# ------------------------------------------------------------------------------------------- traces


@dataclass(frozen=True)
class Sample:
    """One turn: what the model sees and what it should write."""

    spec: generate.Spec
    prompt: str  # the user message
    response: str  # the answer, without the end token
    turn: int  # from 0
    variant: grammar.Variant
    fault: str  # kind of mistake (trace_grammar.STATUS, or "malformed"); "" for a correct answer


@dataclass(frozen=True)
class _Attempt:
    """An earlier turn, as `build_prompt` wants it."""

    code: str | None
    summary: str
    feedback: str


@functools.cache
def make_task(spec: generate.Spec, target: str) -> Task:
    """The task of a spec, with the target's sizes."""
    return Task(generate.name(spec), 0, resolve_sizes(generate.source(spec), target), target)


def specs(rng: random.Random, count: int) -> list[generate.Spec]:
    """The training tasks and `count` random compositions, none of them held out."""
    held_out = frozenset(generate.HELDOUT)
    assert not held_out & frozenset(generate.TRAIN)
    return [*generate.TRAIN, *(generate.random_spec(rng, exclude=held_out) for _ in range(count))]


def _first_variant(core: str, target: str, dials: Dials, rng: random.Random) -> grammar.Variant:
    best = grammar.fastest(core, target)
    if rng.random() < dials.fastest:
        return best
    choices = grammar.variants(core, target)
    slow = choices[0]
    start = grammar.Variant(
        *(
            getattr(best, field)
            if rng.random() < dials.fast_field
            else rng.choice(
                [getattr(v, field) for v in choices if getattr(v, field) != getattr(best, field)]
                or [getattr(slow, field)]
            )
            for field in ("loop", "build", "passes")
        )
    )
    return start if start in choices else slow


def _next_variant(
    variant: grammar.Variant,
    correct: bool,
    core: str,
    target: str,
    dials: Dials,
    rng: random.Random,
) -> grammar.Variant:
    """The variant of the answer after one in `variant`."""
    if rng.random() < dials.redraw:
        return _first_variant(core, target, dials, rng)
    fields = grammar.slower_in(variant, core, target)
    if correct and fields and rng.random() < dials.improve:
        number = rng.choice((1, len(fields)))
        better = grammar.improved(variant, rng.sample(fields, number), core, target)
        return better if better in grammar.variants(core, target) else variant
    return variant


def _thought(spec: generate.Spec, variant: grammar.Variant, opening: str) -> str:
    """`forward` copied whole (so that copying needs no exception), then the plan."""
    source = generate.source(spec)
    forward = source[source.index("    def forward") : source.index("\n\ndef get_inputs")].rstrip(
        "\n"
    )
    lines = [opening, forward, f"Core: {spec.core}.", *grammar.plan(variant)]
    return "\n".join(lines) + "\n</think>\n"


_OPENING = {
    "": "Okay, these are the steps.",
    "FORMAT_ERROR": "Okay, the format was wrong. I write it again.",
    "HACK": "Okay, that broke a rule. I write it again.",
    "COMPILE_ERROR": "Okay, it did not compile. I fix that.",
    "RUNTIME_ERROR": "Okay, it failed at run time. I fix that.",
    "INCORRECT": "Okay, the result was wrong. I check each step.",
}


def _opening(status: str, before: grammar.Variant | None, now: grammar.Variant) -> str:
    if status != "CORRECT":
        return _OPENING[status]
    return "Okay, it is correct. " + ("I keep it." if before == now else "I make it faster.")


# ----------------------------------------------------------------- what the sandbox would say


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


def _compile_error(
    lines: Sequence[grammar.Line], used: Sequence[grammar.Line], fault: str, target: str
) -> str:
    """The compiler's message for a mistake, worded and placed as kernel_build reports it."""
    texts = [line.text for line in used]
    first = next(i for i, text in enumerate(texts) if text.endswith('r"""'))  # line 0 of the source
    place = next(i for i, (p, q) in enumerate(zip(lines, used, strict=False)) if p != q)
    cuda = target == "cuda"

    def report(number: int, column: int, message: str) -> str:
        line = str(number - first + 1)
        head = f"kernel.cu:{line}" if cuda else f"kernel.cpp:{line}:{column}"
        return f"{head}: error: {message}\n{line.rjust(5)} | {texts[number]}"

    if fault == "dtype":
        launch = next(i for i in range(place, len(texts)) if "<<<" in texts[i])
        kinds = 'argument of type "double *" is incompatible with parameter of type "const float *"'
        return report(launch, 1, kinds)
    if fault == "semicolon":
        following = texts[place + 1]
        word = next(iter(re.findall(r"\w+|\S", following)), "}")
        indent = len(following) - len(following.lstrip())
        if cuda:
            return report(place + 1, 1, 'expected a ";"')
        if "auto " in texts[place]:
            return report(place + 1, indent + 1, f"expected ',' or ';' before '{word}'")
        suffix = " token" if word == "}" else ""
        return report(place, len(texts[place]) + 1, f"expected ';' before '{word}'{suffix}")
    gone = _gone(lines[place].text, texts[place] if len(used) == len(lines) else "")
    message = f"'{gone}' was not declared in this scope"
    if cuda:
        message = f'identifier "{gone}" is undefined'
    uses = [i for i in range(place, len(texts)) if gone in _words(texts[i])][:2]
    return "\n".join(
        report(i, found.start() + 1, message)
        for i in uses
        if (found := re.search(rf"\b{re.escape(gone)}\b", texts[i]))
    )


def _gone(right: str, wrong: str) -> str:
    """The name that a broken line uses without declaring it, or no longer declares."""
    declared = re.match(r"\s*(?:auto|float4?|int|int64_t|dim3) (\w+)(?: =|\()", right)
    if declared and declared.group(1) not in _words(wrong.split("=")[0]):
        return declared.group(1)
    new = [word for word in _words(wrong) if word not in _words(right)]
    return (new or [word for word in _words(right) if word not in _words(wrong)])[0]


def _mismatch(spec: generate.Spec, rng: random.Random) -> str:
    """A made-up comparison that failed, in the sandbox's words."""
    family = generate.CORES[spec.core].family
    rank = {"reduce": 1, "conv": 3 if spec.core == "conv1d" else 4}.get(family, 2)
    share = "100" if rng.random() < 0.6 else f"{rng.random() ** 2 * 100:.3g}"
    place = ", ".join(["0"] * rank)
    error, got, expected = (rng.gauss(0, 1) for _ in range(3))
    return (
        f"{share} % of the elements are wrong; largest error {abs(error) * 3:.3g}; "
        f"first at [{place}]: got {got:.6g}, expected {expected:.6g}"
    )


def verdict(
    spec: generate.Spec,
    lines: Sequence[grammar.Line],
    used: Sequence[grammar.Line],
    fault: str,
    target: str,
    block: str,
    rng: random.Random,
) -> tuple[str, str]:
    """(status, reason) that an answer gets, as the sandbox words it."""
    if fault == "":
        return "CORRECT", ""
    if fault == "malformed":
        return "FORMAT_ERROR", parse_response(block).error
    status = grammar.status_of(fault, target)
    if status == "COMPILE_ERROR":
        return status, _compile_error(lines, used, fault, target)
    if fault == "dims" and generate.CORES[spec.core].family == "reduce":
        sizes = generate.CORES[spec.core].layout.sizes
        rows, cols = (size[2] if target == "cpp" else size[1] for size in sizes)
        return status, f"the output has shape [{cols}], expected [{rows}]"
    if status == "INCORRECT":
        return status, _mismatch(spec, rng)
    if fault == "hack":
        return status, "torch.relu is computed by PyTorch; do it inside your own kernel"
    where = f"(line {len(used)} of the code)"
    if fault == "dtype":
        return status, f"RuntimeError: expected scalar type Double but found Float {where}"
    if fault == "binding":
        return status, f"AttributeError: module 'fused' has no attribute 'forward' {where}"
    return status, f"TypeError: run(): incompatible function arguments. {where}"


def speedup(core: str, variant: grammar.Variant, target: str, rng: random.Random) -> float:
    """A made-up speedup for the history of a trace, of the order that the variant really has."""
    slow = len(grammar.slower_in(variant, core, target))
    middle = {0: 1.8, 1: 0.6, 2: 0.25, 3: 0.12}[slow]
    return middle * math.exp(rng.gauss(0.0, 0.5))


@dataclass(frozen=True)
class _Answer:
    text: str  # the whole response
    code: str | None  # what the sandbox would get
    fault: str  # see Sample
    status: str  # the verdict it gets
    reason: str  # and its reason
    place: int  # line of the mistake, -1 if there is none or no line holds it


def answer(
    spec: generate.Spec,
    variant: grammar.Variant,
    target: str,
    rng: random.Random,
    fault: str = "",
    opening: str = _OPENING[""],
) -> _Answer:
    """One response, with a mistake of kind `fault` ("any": drawn; "": none)."""
    lines = grammar.kernel(spec, variant, target)
    kinds = grammar.fault_kinds(lines)
    if fault not in ("", "malformed", "any") and fault not in kinds:
        fault = "any"
    used = lines
    if fault not in ("", "malformed"):
        used, fault = grammar.broken(lines, rng, "" if fault == "any" else fault)
    code = grammar.text(used)
    block = f"```python\n{code}```\n"
    if fault == "malformed":
        block = rng.choice((code, block + block))
    text = _thought(spec, variant, opening) + block + grammar.summary(variant)
    status, reason = verdict(spec, lines, used, fault, target, block, rng)
    place = next((i for i, (p, q) in enumerate(zip(lines, used, strict=False)) if p != q), -1)
    return _Answer(text, None if fault == "malformed" else code, fault, status, reason, place)


def trace(spec: generate.Spec, target: str, dials: Dials, rng: random.Random, turn: int) -> Sample:
    """Turn number `turn` of a trajectory on a task, after a history that the dials drew."""
    task = make_task(spec, target)
    history: list[_Attempt] = []
    before: _Answer | None = None
    variant = _first_variant(spec.core, target, dials, rng)
    opening = _OPENING[""]
    for number in range(turn + 1):
        fault_rate = dials.fault
        if before is not None:
            correct = before.status == "CORRECT"
            fault_rate = dials.fault_after_correct if correct else dials.fault_again
            now = _next_variant(variant, correct, spec.core, target, dials, rng)
            opening = _opening(before.status, variant, now)
            variant = now
        fault = ""
        if rng.random() < dials.malformed:
            fault = "malformed"
        elif rng.random() < fault_rate:
            again = before is not None and before.fault and rng.random() < dials.same_fault
            fault = before.fault if again and before is not None else "any"
        now_answer = answer(spec, variant, target, rng, fault, opening)
        if number == turn:
            prompt = build_prompt(task, history, len, 10**9)
            return Sample(spec, prompt, now_answer.text, turn, variant, now_answer.fault)
        fast = speedup(spec.core, variant, target, rng) if now_answer.status == "CORRECT" else 0.0
        result = KernelResult(Status(now_answer.status), now_answer.reason, (), fast)
        kept = parse_response(now_answer.text)
        history.append(_Attempt(kept.code, kept.summary, feedback_text(result)))
        before = now_answer
    raise AssertionError("unreachable")


_TURNS = (9, 5, 4, 3)  # how often a lesson is the first, second... turn: later ones are longer


def traces(
    target: str, seed: int, count: int, dials: Dials | None = None, turns: int = 4
) -> Iterator[Sample]:
    """`count` samples, every turn equally often; a pure function of the arguments."""
    rng = random.Random(f"traces {target} {seed}")
    dials = dials or Dials()
    pool = specs(rng, count // 4)
    for number in range(count):
        yield trace(rng.choice(pool), target, dials, rng, number % turns)


# ---------------------------------------------------------------------------------------- tokenizer

_SEEN = 3  # a line is a token of its own if the texts hold it at least so often
_LINE = "[^\n]*\n|[^\n]+"  # a line with its end, or the rest of the text


def build_tokenizer(texts: Sequence[str], settings: Settings) -> PreTrainedTokenizerFast:
    """The tokenizer of a set of texts: frequent lines whole, byte-level BPE for everything else.

    Every line (its end included) is a pre-token. If it is in the vocabulary it is one token
    (`ignore_merges`), otherwise BPE splits it; no merge contains a digit, so numbers stay spelt out
    while the phrases around them become single tokens. All 256 bytes are tokens, so any text comes
    back unchanged: decode(encode(s)) == s.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(line for text in texts for line in re.findall(_LINE, text))
    whole = [line for line, seen in counts.most_common() if seen >= _SEEN and line.strip(" ")]
    whole = whole[: settings.lines]
    rest = [line for line in counts if line not in set(whole)] + whole
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\D+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words.train_from_iterator(
        rest,
        trainers.BpeTrainer(
            vocab_size=256 + settings.merges, initial_alphabet=alphabet, show_progress=False
        ),
    )
    state = json.loads(words.to_str())["model"]
    vocab: dict[str, int] = dict(sorted(state["vocab"].items(), key=lambda item: item[1]))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for line in whole:
        token = as_bytes.pre_tokenize_str(line)[0][0]
        vocab.setdefault(token, len(vocab))
    merges = [tuple(pair) for pair in state["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_LINE), "isolated"), as_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=settings.context,
    )


# ----------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class _Row:
    """One sample in tokens."""

    ids: list[int]  # prompt and response, end token included
    prompt: int  # tokens of the prompt
    learnt: list[bool]  # which tokens carry loss: the response, and the kernels of earlier turns


def encode(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, context: int
) -> list[_Row]:
    """(prompt, response) as the policy sees them: chat template, generation prompt, end token."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt, _ in pairs
    ]
    ids = tokenizer(
        [*prompts, *(answer for _, answer in pairs)], add_special_tokens=False
    ).input_ids
    rows = []
    for prompt, response in zip(ids[: len(pairs)], ids[len(pairs) :], strict=True):
        answer = [*response, tokenizer.eos_token_id]
        if len(prompt) + len(answer) <= context:
            learnt = [*_earlier_kernels(tokenizer, prompt), *[True] * len(answer)]
            rows.append(_Row([*prompt, *answer], len(prompt), learnt))
    return rows


def _earlier_kernels(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int]) -> list[bool]:
    """Which tokens of a prompt lie between "Attempt n:" and "Feedback:".

    Earlier kernels are answers to the same task, so predicting them teaches the same thing as
    predicting the response, at no cost: they are read anyway.
    """
    inside, result = False, []
    for token in tokenizer.convert_ids_to_tokens(list(prompt)):
        inside = (inside or token.startswith("Attempt")) and not token.startswith("Feedback")
        result.append(inside)
    return result


def copying_lesson(target: str, rng: random.Random) -> tuple[str, str]:
    """Steps of a forward and their translation, nothing else: (prompt, response).

    Compositions here need not make sense as tasks, but none of them is a held-out one.
    """
    while True:
        ops = rng.sample(list(generate.OPS), rng.choice((1, 2, 2, 3, 3, 4)))
        core = rng.choice(list(generate.CORES))
        cut = len(ops) if core == "map" else rng.randint(0, len(ops))
        family = generate.CORES[core].family
        spec = generate.Spec(family, tuple(ops[:cut]), core, tuple(ops[cut:]))
        if spec not in generate.HELDOUT:
            break
    thought = _thought(spec, grammar.fastest(core, target), _OPENING[""])
    code = grammar.chains(spec, target)
    prompt = _bare(generate.source(spec)).split("    def forward")[1]
    return "    def forward" + prompt, thought.split(grammar.PLAN)[0] + grammar.text(code)


def _bare(source: str) -> str:
    """The class Model of a task file, without imports, sizes and inputs."""
    return source[source.index("class Model") : source.index("\n\ndef get_inputs")]


def lessons(
    target: str, seed: int, settings: Settings, dials: Dials | None = None
) -> tuple[list[tuple[str, str]], list[Sample], list[Sample]]:
    """What is learnt, in order: copying, then writing answers, then all turns of the RL loop.

    Full prompts from the start also lead there, but the copying then begins after several times as
    many tokens.
    """
    rng = random.Random(f"lessons {target} {seed}")
    dials = dials or Dials()
    copying = [copying_lesson(target, rng) for _ in range(settings.copying)]
    pool = specs(rng, (settings.writing + settings.refining) // 6)
    writing = [trace(rng.choice(pool), target, dials, rng, 0) for _ in range(settings.writing)]
    refining = [
        trace(rng.choice(pool), target, dials, rng, rng.choices(range(4), _TURNS)[0])
        for _ in range(settings.refining)
    ]
    return copying, writing, refining


def batches(rows: Sequence[_Row], tokens: int, rng: random.Random) -> list[list[_Row]]:
    """Batches of similar length, about `tokens` each with padding, in random order."""
    order = sorted(rows, key=lambda row: (len(row.ids), rng.random()))
    result: list[list[_Row]] = []
    for row in order:
        if result and (len(result[-1]) + 1) * len(row.ids) <= tokens:
            result[-1].append(row)
        else:
            result.append([row])
    rng.shuffle(result)
    return result


def new_model(vocabulary: int, settings: Settings, tokenizer: PreTrainedTokenizerFast, seed: int):
    """A Llama with random weights, tied embeddings, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def batch_loss(model, batch: Sequence[_Row], pad: int):
    """Mean cross-entropy (nats) of the tokens of a batch that are to be learnt.

    Rows are padded on the right and get no mask: in a causal model what stands behind a token
    does not reach it.
    """
    import torch

    device = next(model.parameters()).device
    width = max(len(row.ids) for row in batch)
    ids = torch.full((len(batch), width), pad)
    wanted = torch.zeros((len(batch), width), dtype=torch.bool)
    for number, row in enumerate(batch):
        ids[number, : len(row.ids)] = torch.tensor(row.ids)
        wanted[number, : len(row.ids)] = torch.tensor(row.learnt)
    ids, wanted = ids.to(device), wanted.to(device)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][wanted[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted[:, 1:]])


class Muon:
    """Momentum with an orthogonal update (Jordan et al. 2024), for the matrices of the layers.

    Copying the lines of a task into the thought, and translating each in turn, needs attention
    that finds "the line after the one I just wrote". AdamW did not learn that in three hundred
    steps of short sequences, this did in a hundred. torch.optim.Muon does the same in bfloat16, one
    matrix at a time; here equal shapes go together and stay in float32, for CPUs without bfloat16.
    """

    def __init__(self, parameters: Sequence[Tensor], lr: float, momentum: float = 0.95) -> None:
        self.param_groups = [{"lr": lr}]
        self.momentum = momentum
        self.shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            self.shapes.setdefault(tuple(parameter.shape), []).append(parameter)
        self.buffers: dict[tuple[int, ...], Tensor] = {}

    def step(self) -> None:
        import torch

        with torch.no_grad():
            for shape, parameters in self.shapes.items():
                gradient = torch.stack([p.grad for p in parameters if p.grad is not None])
                buffer = self.buffers.setdefault(shape, torch.zeros_like(gradient))
                buffer.lerp_(gradient, 1 - self.momentum)
                update = _orthogonal(gradient.lerp(buffer, self.momentum))
                scale = self.param_groups[0]["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, change in zip(parameters, update, strict=True):
                    parameter.sub_(change, alpha=scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameters in self.shapes.values():
            for parameter in parameters:
                parameter.grad = None


def _orthogonal(matrices: Tensor) -> Tensor:
    """[n, a, b] -> singular values near 1: four quintic Newton-Schulz steps."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    for _ in range(4):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


def _optimizers(model, settings: Settings) -> list:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    import torch

    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    other = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adamw = torch.optim.AdamW(other, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(inside, settings.muon_lr), adamw]


def train(
    model,
    stages: Sequence[Sequence[_Row]],
    settings: Settings,
    seed: int,
    pad: int,
    progress: bool = True,
) -> list[float]:
    """Train in place, one pass over the rows of each stage; returns the loss of each step."""
    import torch
    from tqdm import tqdm

    rng = random.Random(f"order {seed}")
    steps = [batch for rows in stages for batch in batches(rows, settings.batch_tokens, rng)]
    optimizers = _optimizers(model, settings)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    warm = max(1, len(steps) // 30)
    losses: list[float] = []
    model.train()
    bar = tqdm(steps, desc="warm-up", unit="step", disable=not progress, file=sys.stderr)
    for number, batch in enumerate(bar):
        rise = min(1.0, (number + 1) / warm)
        fall = 0.52 + 0.48 * math.cos(math.pi * number / len(steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, peak, strict=True):
                group["lr"] = lr * rise * fall
        loss = batch_loss(model, batch, pad)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if number % 10 == 0:
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    model.eval()
    return losses


# ------------------------------------------------------------------------------------ made and kept


def make_model(
    target: str,
    *,
    seed: int = 0,
    settings: Settings | None = None,
    dials: Dials | None = None,
    progress: bool = True,
):
    """Tokenizer and trained model: (model on the CPU, tokenizer, loss of each step)."""
    import torch

    settings = settings or Settings()
    copying, writing, refining = lessons(target, seed, settings, dials)
    turns = [*writing, *refining]
    tokenizer = build_tokenizer([t for s in turns for t in (s.prompt, s.response)], settings)
    stages = [
        copying,
        [(_bare(generate.source(sample.spec)), sample.response) for sample in writing],
        [(sample.prompt, sample.response) for sample in refining],
    ]
    rows = [encode(pairs, tokenizer, settings.context) for pairs in stages]
    model = new_model(len(tokenizer), settings, tokenizer, seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, MAX_THREADS))
    try:
        losses = train(model, rows, settings, seed, tokenizer.pad_token_id, progress)
    finally:
        torch.set_num_threads(threads)
    model.to("cpu")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer, losses


MAX_THREADS = 8  # more only wait for each other on matrices of this size


def save(model, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face folder; it is there whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def fingerprint(target: str, seed: int, settings: Settings, dials: Dials) -> str:
    """Hash of all that decides what the model becomes, apart from rounding."""
    digest = hashlib.sha256(json.dumps([target, seed, asdict(settings), asdict(dials)]).encode())
    for path in sorted(
        [*ROOT.glob("*_grammar.py"), ROOT / "warmstart.py", *ROOT.glob("prompts/*")]
    ):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update((ROOT / "tasks" / "generate.py").read_bytes())
    rng = random.Random(0)
    for number in range(20):  # how rollout puts the prompts together
        sample = trace(rng.choice(generate.TRAIN), target, dials, rng, number % 4)
        digest.update(sample.prompt.encode())
    return digest.hexdigest()[:16]


def ensure_model(
    target: str,
    *,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
    settings: Settings | None = None,
    dials: Dials | None = None,
) -> Path:
    """Folder of the warmed-up model for a target ("cpp", "cuda"); made first if it is not there.

    `cache_dir` is the root of all caches, by default $KEVIN_CACHE_DIR or ~/.cache/kevin_repro.
    Processes that ask at the same time wait for the one that makes it. Raises UserError.
    """
    if target not in ("cpp", "cuda"):
        raise UserError(f"unknown target {target!r}; use cpp or cuda")
    settings, dials = settings or Settings(), dials or Dials()
    root = cache_dir or os.environ.get("KEVIN_CACHE_DIR") or Path.home() / ".cache" / "kevin_repro"
    folder = Path(root) / "models" / f"{target}-{fingerprint(target, seed, settings, dials)}"
    if (folder / "config.json").exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "config.json").exists():
                model, tokenizer, _ = make_model(
                    target, seed=seed, settings=settings, dials=dials, progress=progress
                )
                save(model, tokenizer, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the warm-start model below {root}: {error.strerror or error}; "
            "make room there or set KEVIN_CACHE_DIR to another folder"
        ) from None
    return folder


# ------------------------------------------------------------------------------ what it can do


def variant_of(code: str | None, spec: generate.Spec, target: str) -> grammar.Variant | None:
    """The variant of which `code` is the grammar's correct answer, or None."""
    if code is None:
        return None
    for variant in grammar.variants(spec.core, target):
        if grammar.text(grammar.kernel(spec, variant, target)).strip() == code.strip():
            return variant
    return None


def print_stats(model, tokenizer, target: str, trajectories: int, progress: bool) -> None:
    """Play the RL loop's conversation on both splits and print what came of it."""
    from kernel_sandbox import Sandbox
    from rollout import TransformersPolicy, load_tasks, rollout

    policy = TransformersPolicy(model, tokenizer)
    with Sandbox(target, reuse_verdicts=True) as sandbox:
        for split in ("train", "heldout"):
            tasks = load_tasks(str(ROOT / "tasks"), target, split)
            episodes = rollout(
                policy,
                tokenizer,
                tasks,
                sandbox,
                trajectories=trajectories,
                turns=4,
                seed=0,
                step=0,
                temperature=0.9,
                max_new_tokens=192,
                prompt_budget=1536,
                progress=progress,
            )
            print(f"\n{split}: {len(tasks)} tasks, {trajectories} trajectories, 4 turns")
            for turn in range(4):
                _print_turn(turn, [(e.task, e.turns[turn]) for e in episodes], target)
            best = [max(turn.result.score for turn in e.turns) for e in episodes]
            print(f"mean score of the best of 4 turns: {sum(best) / len(best):.3f}")
    policy.close()


def _print_turn(number: int, played: Sequence[tuple[Task, Turn]], target: str) -> None:
    turns = [turn for _, turn in played]
    statuses = Counter(turn.result.status.value for turn in turns)
    found = fast = 0
    for task, turn in played:
        spec = generate.read_spec(task.source)
        variant = variant_of(turn.code, spec, target) if spec else None
        found += variant is not None
        fast += spec is not None and variant == grammar.fastest(spec.core, target)
    n = len(turns)
    shares = ", ".join(f"{name} {count / n:.2f}" for name, count in statuses.most_common())
    correct = [turn.result.speedup for turn in turns if turn.result.correct]
    print(
        f"  turn {number + 1}: {shares}; mean score {sum(t.result.score for t in turns) / n:.3f}, "
        f"speedup of correct {sum(correct) / max(1, len(correct)):.2f}, "
        f"as the grammar writes it {found / n:.2f}, fastest variant {fast / n:.2f}; tokens: prompt "
        f"{sum(len(t.prompt_ids) for t in turns) / n:.0f}, "
        f"response {sum(len(t.token_ids) for t in turns) / n:.0f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make the small model that the RL loop starts from."
    )
    parser.add_argument("--target", choices=("cpp", "cuda"), default="cpp")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=2, help="traces to print")
    parser.add_argument("--stats", action="store_true", help="measure it in the sandbox")
    parser.add_argument("--trajectories", type=int, default=4, help="of each task, for --stats")
    options = parser.parse_args(arguments)
    try:
        for sample in traces(options.target, options.seed, options.samples, turns=2):
            print(sample.prompt, "-" * 80, sample.response, "=" * 80, sep="\n")
        start = time.monotonic()
        model, tokenizer, losses = make_model(options.target, seed=options.seed)
        save(model, tokenizer, options.out)
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{millions:.1f} million parameters, {len(tokenizer)} tokens, {len(losses)} steps, "
            f"loss {losses[0]:.2f} -> {sum(losses[-20:]) / 20:.3f}, "
            f"{time.monotonic() - start:.0f} s; written to {options.out}"
        )
        if options.stats:
            print_stats(model, tokenizer, options.target, options.trajectories, progress=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"error: {options.out}: {error.strerror or error}; choose another --out",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
