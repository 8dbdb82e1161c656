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

import argparse
import hashlib
import json
import math
import os
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
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Dials:
    """How good the traces are: probabilities, each for one answer."""

    fault: float = 0.42  # a first answer holds a mistake
    fault_again: float = 0.40  # an answer after an error holds a mistake
    fault_after_correct: float = 0.30  # an answer after a correct one holds a mistake
    same_fault: float = 0.3  # ... which after an error is the same one
    malformed: float = 0.03  # an answer without code block or with two
    fastest: float = 0.07  # a first answer takes the fastest variant
    fast_field: float = 0.10  # otherwise, each field is the fastest one's with this probability
    improve: float = 0.20  # an answer after a correct slow one is faster
    redraw: float = 0.10  # an answer takes a variant unrelated to the previous one


@dataclass(frozen=True)
class Settings:
    """Size of the model and of its training."""

    hidden: int = 192  # width
    layers: int = 4
    heads: int = 3
    inner: int = 512  # width of the feed-forward part
    context: int = 2048  # longest sequence, tokens
    lines: int = 1600  # tokens that are whole lines
    merges: int = 500  # BPE merges for everything else
    tokens: int = 600_000  # trained on, prompts included
    batch_tokens: int = 2048  # a step
    lr: float = 3e-3  # of embeddings and norms: peak; cosine to a tenth, a twentieth to warm up
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
    variant: grammar.Variant, correct: bool, core: str, target: str, dials: Dials, rng: random.Random
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
    steps = [generate.OPS[op] for op in spec.pre]
    steps += [*generate.CORES[spec.core].lines, *(generate.OPS[op] for op in spec.post)]
    core = f"Core: {spec.core}."
    lines = [opening, *(f"        {step}" for step in steps), core, *grammar.plan(variant)]
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


# ------------------------------------------------------------------------- what the sandbox would say


def _compile_error(lines: Sequence[grammar.Line], used: Sequence[grammar.Line], fault: str) -> str:
    """The compiler's message for a mistake, worded and placed as g++ does it."""
    texts = [line.text for line in used]
    first = texts.index('source = r"""')  # the C++ source begins with the line after this one
    place = next(i for i, (p, q) in enumerate(zip(lines, used, strict=False)) if p != q)
    if fault == "binding":
        return "'forward' was not declared in this scope"
    if fault == "semicolon":
        column = len(texts[place]) + 1
        following = (texts[place + 1].split() or ["}"])[0].rstrip("(){;")
        return f"kernel.cpp:{place - first}:{column}: error: expected ';' before '{following}'"
    gone = _gone(lines[place].text, texts[place] if len(used) == len(lines) else "")
    where = next(
        (i for i in range(place, len(texts)) if gone in _words(texts[i])),
        place,
    )
    column = _column(texts[where], gone)
    return f"kernel.cpp:{where - first}:{column}: error: '{gone}' was not declared in this scope"


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()


def _column(text: str, word: str) -> int:
    found = re.search(rf"\b{re.escape(word)}\b", text)
    return found.start() + 1 if found else 1


def _gone(right: str, wrong: str) -> str:
    """The name that a broken line uses without declaring it, or no longer declares."""
    new = [word for word in _words(wrong) if word not in _words(right)]
    lost = [word for word in _words(right) if word not in _words(wrong)]
    declares = right.split(" = ")[0].split()[:-1]
    return lost[0] if declares and lost and not wrong.lstrip().startswith("return") else new[0]


def verdict(
    lines: Sequence[grammar.Line],
    used: Sequence[grammar.Line],
    fault: str,
    target: str,
    block: str,
) -> tuple[str, str]:
    """(status, reason) that a broken answer gets, as the sandbox words it."""
    if fault == "":
        return "CORRECT", ""
    if fault == "malformed":
        return "FORMAT_ERROR", parse_response(block).error
    status = grammar.STATUS[fault]
    if status == "COMPILE_ERROR":
        return status, _compile_error(lines, used, fault)
    return status, _REASON[fault]


_REASON: dict[str, str] = {
    "dtype": "RuntimeError: expected scalar type Double but found Float",
    "argument": "TypeError: run() takes more arguments than it was given",
    "hack": "torch.relu is a PyTorch operator: write a kernel for it.",
    "constant": "The values differ.",
    "wrong_op": "The values differ.",
    "forgotten": "The values differ.",
    "off_by_one": "The values differ.",
    "init": "The values differ.",
    "dims": "The shapes differ.",
    "bias": "The values differ.",
}


def speedup(core: str, variant: grammar.Variant, target: str, rng: random.Random) -> float:
    """A made-up speedup for the history of a trace, of the order that the variant really has."""
    slow = len(grammar.slower_in(variant, core, target))
    middle = {0: 3.0, 1: 1.1, 2: 0.5, 3: 0.2}[slow]
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
    status, reason = verdict(lines, used, fault, target, block)
    place = next((i for i, (p, q) in enumerate(zip(lines, used, strict=False)) if p != q), -1)
    return _Answer(text, None if fault == "malformed" else code, fault, status, reason, place)


def trace(
    spec: generate.Spec, target: str, dials: Dials, rng: random.Random, turn: int
) -> Sample:
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


def traces(
    target: str, seed: int, count: int, dials: Dials | None = None, turns: int = 4
) -> Iterator[Sample]:
    """`count` samples, the turns of a trajectory equally often; a pure function of its arguments."""
    rng = random.Random(f"traces {target} {seed}")
    dials = dials or Dials()
    pool = specs(rng, count // 2)
    for number in range(count):
        yield trace(rng.choice(pool), target, dials, rng, number % turns)


# ---------------------------------------------------------------------------------------- tokenizer

_SEEN = 3  # a line is a token of its own if the texts hold it at least so often
_LINE = "[^\n]*\n|[^\n]+"  # a line with its end, or the rest of the text


def build_tokenizer(texts: Sequence[str], settings: Settings) -> PreTrainedTokenizerFast:
    """The tokenizer of a set of texts: frequent lines whole, byte-level BPE for everything else.

    Every line (its end included) is a pre-token. If it is in the vocabulary it is one token
    (`ignore_merges`), otherwise BPE splits it; the merges were learnt within words and between
    single digits, so that numbers stay spelt out. All 256 bytes are tokens: decode(encode(s)) == s.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(line for text in texts for line in re.findall(_LINE, text))
    whole = [line for line, seen in counts.most_common() if seen >= _SEEN and line.strip(" ")]
    whole = whole[: settings.lines]
    rest = list(counts)
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[A-Za-z]+|\s+|[^\sA-Za-z\d]+"), "isolated"),
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
    prompt: int  # tokens of the prompt, which carry no loss


def encode(
    samples: Sequence[Sample], tokenizer: PreTrainedTokenizerFast, context: int
) -> list[_Row]:
    """Samples as the policy will see them: chat template, generation prompt, response, end token."""
    rows = []
    for sample in samples:
        message = [{"role": "user", "content": sample.prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        response = tokenizer(sample.response, add_special_tokens=False).input_ids
        ids = [*prompt, *response, tokenizer.eos_token_id]
        if len(ids) <= context:
            rows.append(_Row(ids, len(prompt)))
    return rows


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
    """Mean cross-entropy (nats) of the response tokens of a batch.

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
        wanted[number, row.prompt : len(row.ids)] = True
    ids, wanted = ids.to(device), wanted.to(device)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][wanted[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][wanted[:, 1:]])


def _optimizers(model, settings: Settings) -> list:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms.

    Copying the lines of a task into the thought, and translating each in turn, needs attention
    that finds "the line after the one I just wrote". AdamW did not learn that in three hundred
    steps of short sequences, Muon (Jordan et al. 2024) did in a hundred.
    """
    import torch

    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    other = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(inside, lr=settings.muon_lr, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(other, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model, rows: Sequence[_Row], settings: Settings, seed: int, pad: int, progress: bool = True
) -> list[float]:
    """Train in place, one pass over the rows; returns the loss of each step."""
    import torch
    from tqdm import tqdm

    rng = random.Random(f"order {seed}")
    steps = batches(rows, settings.batch_tokens, rng)
    optimizers = _optimizers(model, settings)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    warm = max(1, len(steps) // 20)
    losses: list[float] = []
    model.train()
    bar = tqdm(steps, desc="warm-up", unit="step", disable=not progress, file=sys.stderr)
    for number, batch in enumerate(bar):
        rise = min(1.0, (number + 1) / warm)
        fall = 0.55 + 0.45 * math.cos(math.pi * number / len(steps))
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
