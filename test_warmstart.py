"""Tests of warmstart.py, trace_grammar.py and cuda_grammar.py.

The grammar is held against the real sandbox: its correct answers must be CORRECT, its mistakes must
get the verdict that the table says. The long version of that (every core, every variant, every
mistake) is `python test_warmstart.py`.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import trace_grammar as grammar
import warmstart
from kernel_sandbox import Sandbox, UserError
from rollout import parse_response
from static_checks import check
from tasks import generate

TINY = warmstart.Settings(
    hidden=64,
    layers=2,
    heads=2,
    inner=128,
    copying=600,
    writing=60,
    refining=80,
    merges=100,
    batch_tokens=512,
)
# One spec a family, so that one test can pass over all of them.
SPECS = {
    "elementwise": generate.Spec("elementwise", ("leaky_relu",), "sub", ("clamp",)),
    "reduce": generate.Spec("reduce", ("silu",), "mean", ("affine",)),
    "softmax": generate.Spec("softmax", ("scale",), "softmax", ("sqrt",)),
    "norm": generate.Spec("norm", ("tanh",), "layernorm", ("gelu",)),
    "matmul": generate.Spec("matmul", ("abs",), "linear", ("relu",)),
    "conv": generate.Spec("conv", ("elu",), "conv2d", ("mish",)),
    "scan": generate.Spec("scan", ("sin",), "rcumsum", ("leaky_relu",)),
    "tuple": generate.Spec("tuple", ("softplus",), "center_mean", ("hardswish",)),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    with Sandbox("cpp", fixed_speedup=1.0) as box:
        yield box


def answer(spec: generate.Spec, number: int, target: str = "cpp") -> list[grammar.Line]:
    return grammar.kernel(spec, grammar.variants(spec.core, target)[number], target)


# ------------------------------------------------------------------------------ grammar and sandbox


@pytest.mark.slow
@pytest.mark.parametrize("family", SPECS)
def test_correct_answers_are_correct(family: str, sandbox: Sandbox) -> None:
    """The slowest and the fastest variant of every family pass."""
    spec = SPECS[family]
    task = warmstart.make_task(spec, "cpp")
    for number in (0, -1):
        result = sandbox.evaluate(task, grammar.text(answer(spec, number)))
        assert result.status.value == "CORRECT", result.reason


# Kind of mistake -> a family in which to look for it.
WHERE = {
    "semicolon": "scan",
    "undeclared": "elementwise",
    "binding": "elementwise",
    "dtype": "elementwise",
    "argument": "norm",
    "constant": "elementwise",
    "wrong_op": "elementwise",
    "forgotten": "reduce",
    "off_by_one": "softmax",
    "init": "reduce",
    "dims": "reduce",
    "bias": "norm",
    "hack": "reduce",
}


def test_every_kind_of_mistake_is_looked_at() -> None:
    assert set(WHERE) == set(grammar.STATUS) == set(grammar.WEIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WHERE)
def test_mistakes_get_their_verdict(kind: str, sandbox: Sandbox) -> None:
    """A mistake of each kind gets the status of the table, and feedback like the traces' own."""
    spec, rng = SPECS[WHERE[kind]], random.Random(kind)
    task = warmstart.make_task(spec, "cpp")
    right = answer(spec, -1)
    wrong, drawn = grammar.broken(right, rng, kind)
    assert drawn == kind
    result = sandbox.evaluate(task, grammar.text(wrong))
    assert result.status.value == grammar.STATUS[kind], result.reason
    status, reason = warmstart.verdict(spec, right, wrong, kind, "cpp", "", rng)
    assert status == result.status.value
    number = re.compile(r"-?\d[\d.]*")  # numbers aside, the made-up feedback begins as the real one
    made, real = (number.sub("#", text.split("\n")[0])[:25] for text in (reason, result.reason))
    assert made == real


def test_compile_errors_read_like_the_compilers(sandbox: Sandbox) -> None:
    """The first message of the traces for a broken answer is the one that g++ gives."""
    rng = random.Random(4)
    compared = 0
    for spec in (SPECS["scan"], SPECS["norm"]):
        right = answer(spec, 0)
        for kind in ("semicolon", "undeclared"):
            wrong, _ = grammar.broken(right, rng, kind)
            result = sandbox.evaluate(warmstart.make_task(spec, "cpp"), grammar.text(wrong))
            _, reason = warmstart.verdict(spec, right, wrong, kind, "cpp", "", rng)
            assert reason.split("\n")[:2] == result.reason.split("\n")[:2]
            compared += 1
    assert compared == 4


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_answers_keep_the_rules(target: str) -> None:
    """Static checks have nothing fatal to say about any correct variant of any core."""
    rng = random.Random(1)
    for core in generate.CORES:
        spec = warmstart.specs(rng, 0)[0]
        while spec.core != core:
            spec = generate.random_spec(rng, families=[generate.CORES[core].family])
        for variant in grammar.variants(core, target):
            code = grammar.text(grammar.kernel(spec, variant, target))
            fatal = [finding for finding in check(code, target) if finding.fatal]
            assert not fatal, (core, variant, fatal)


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_operations_come_in_the_order_of_the_task(target: str) -> None:
    """pre before post, one line an operation, in order, whatever the variant."""
    spec = generate.Spec("elementwise", ("silu", "tanh"), "add", ("relu", "scale"))
    wanted = [grammar.C_LINE[op] for op in ("silu", "tanh", "relu", "scale")]
    for variant in grammar.variants("add", target):
        lines = [line.text.strip() for line in grammar.kernel(spec, variant, target)]
        assert [line for line in lines if line in wanted] == wanted


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_a_mistake_changes_one_line(target: str) -> None:
    rng = random.Random(2)
    for spec in SPECS.values():
        right = answer(spec, 0, target)
        for kind in grammar.fault_kinds(right):
            wrong, _ = grammar.broken(right, rng, kind)
            missing = len(right) - len(wrong)
            assert missing in (0, 1)
            if not missing:
                assert sum(p.text != q.text for p, q in zip(right, wrong, strict=True)) == 1


# ------------------------------------------------------------------------------------------- traces


def sample_of(count: int, seed: int = 0, target: str = "cpp") -> list[warmstart.Sample]:
    return list(warmstart.traces(target, seed, count))


def test_traces_are_a_pure_function_of_the_seed() -> None:
    assert sample_of(24) == sample_of(24)
    assert sample_of(24) != sample_of(24, seed=1)


def test_no_trace_holds_a_held_out_composition() -> None:
    """Neither as a sample's spec nor as the forward of any prompt of any lesson."""
    settings = replace(TINY, copying=3000)
    copying, writing, refining = warmstart.lessons("cpp", 0, settings)
    held_out = set(generate.HELDOUT)
    assert not held_out & {sample.spec for sample in (*writing, *refining)}

    def forward(text: str) -> str:
        body = text[text.index("    def forward") :]
        return body[: body.index("        return ") + 1]

    secret = {forward(generate.source(spec)) for spec in held_out}
    prompts = [prompt for prompt, _ in copying] + [s.prompt for s in (*writing, *refining)]
    assert len(secret) == len(held_out)
    assert not secret & {forward(prompt) for prompt in prompts}


def test_traces_are_what_the_dials_say() -> None:
    """Share of correct answers, of the fastest variant and of improvements in 2000 samples."""
    dials = warmstart.Dials(fault=0.4, malformed=0.0, fastest=0.2, fast_field=0.0)
    rng = random.Random(0)
    pool = warmstart.specs(rng, 50)
    first = [warmstart.trace(rng.choice(pool), "cpp", dials, rng, 0) for _ in range(1000)]
    assert sum(s.fault != "" for s in first) / 1000 == pytest.approx(0.4, abs=0.05)
    fastest = [s.variant == grammar.fastest(s.spec.core, "cpp") for s in first]
    assert sum(fastest) / 1000 == pytest.approx(0.2, abs=0.04)


def test_later_turns_answer_their_feedback() -> None:
    """The prompt of a later turn holds the earlier attempts and the thought names the verdict."""
    openings = set()
    for sample in sample_of(200):
        assert sample.response.startswith("Okay,")
        assert sample.prompt.count("Feedback:") == sample.turn
        last = sample.prompt.split("Feedback:\n")[-1]
        opening = sample.response.split("\n")[0]
        openings.add(opening)
        if sample.turn and "Your kernel is correct." in last:
            assert opening.startswith("Okay, it is correct.")
        if sample.turn and "failed to compile" in last:
            assert opening == "Okay, it did not compile. I fix that."
    assert len(openings) >= 6


def test_responses_parse() -> None:
    for sample in sample_of(120):
        parsed = parse_response(sample.response)
        assert (parsed.code is None) == (sample.fault == "malformed")
        if parsed.code is not None:
            assert parsed.summary == grammar.summary(sample.variant)


# ---------------------------------------------------------------------------------------- tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for s in sample_of(300) for text in (s.prompt, s.response)]
    return warmstart.build_tokenizer(texts, warmstart.Settings())


def test_any_text_comes_back(tokenizer) -> None:
    rng = random.Random(0)
    texts = ["", "\n", "\r\n\t x \n\n", "\0 a", "naïve ∑ 😀", (Path(__file__)).read_text()]
    texts += [bytes(rng.randrange(256) for _ in range(300)).decode("latin-1") for _ in range(20)]
    texts += ["".join(chr(rng.randrange(0x20, 0xD7FF)) for _ in range(100)) for _ in range(20)]
    texts += [sample.response for sample in sample_of(20, seed=9)]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_answers_are_short(tokenizer) -> None:
    """A line of code is one token, also in answers that the tokenizer was not made from."""
    for sample in sample_of(60, seed=5):
        if sample.fault in ("", "malformed"):
            ids = tokenizer.encode(sample.response, add_special_tokens=False)
            assert len(ids) <= 1.3 * len(sample.response.splitlines())


def test_numbers_are_spelt_in_digits(tokenizer) -> None:
    for text in ("12.34x", "kernel.cpp:15:14: error: 'q' was not declared", "got 0.123456, e"):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert not [token for token in tokens if re.search(r"\d.|.\d", token)]


def test_chat_template(tokenizer) -> None:
    message = [{"role": "user", "content": "Hello\n"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>Hello\n<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert ids[-2:] == tokenizer.convert_tokens_to_ids(["<|end|>", "<|assistant|>"])
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id


# ----------------------------------------------------------------------------------------- training


def test_a_short_training_lowers_the_loss() -> None:
    import torch

    state = torch.random.get_rng_state()
    model, tokenizer, losses = warmstart.make_model("cpp", settings=TINY, progress=False)
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's random numbers
    assert sum(losses[-10:]) / 10 < 0.75 * losses[0]
    assert not model.training
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_padding_does_not_change_the_loss() -> None:
    import torch

    rows = [
        warmstart._Row(list(range(5, 5 + n)), 3, [False] * 3 + [True] * (n - 3)) for n in (6, 11)
    ]
    tokenizer = warmstart.build_tokenizer(["a\nb\n"] * 5, TINY)
    model = warmstart.new_model(300, TINY, tokenizer, 0)
    with torch.no_grad():
        both = warmstart.batch_loss(model, rows, 0)
        alone = [warmstart.batch_loss(model, [row], 0) for row in rows]
    tokens = [len(row.ids) - row.prompt for row in rows]
    mean = sum(loss * n for loss, n in zip(alone, tokens, strict=True)) / sum(tokens)
    assert both.item() == pytest.approx(mean.item(), abs=1e-6)


def test_orthogonal_update() -> None:
    """Singular values end near 1, singular vectors stay."""
    import torch

    torch.manual_seed(0)
    matrices = torch.randn(2, 30, 12)
    result = warmstart._orthogonal(matrices)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(result.flatten(), (u @ v).flatten(), 0) > 0.95


def test_ensure_model_makes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = replace(TINY, copying=40, writing=8, refining=8)
    made = warmstart.ensure_model("cpp", cache_dir=tmp_path, settings=settings, progress=False)
    assert made.parent == tmp_path / "models"
    assert not list(made.parent.glob(".*"))  # no scratch folder left
    model = AutoModelForCausalLM.from_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert model.config.model_type == "llama" and model.config.tie_word_embeddings
    text = "    x = torch.relu(x)\n\n0.37x"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert "<|assistant|>" in tokenizer.chat_template

    def again(*_, **__):
        raise AssertionError("made a second time")

    monkeypatch.setattr(warmstart, "make_model", again)
    monkeypatch.setenv("KEVIN_CACHE_DIR", str(tmp_path))
    assert warmstart.ensure_model("cpp", settings=settings) == made
    with pytest.raises(AssertionError, match="second time"):
        warmstart.ensure_model("cpp", settings=settings, seed=1)


def test_user_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the warm-start model"):
        warmstart.ensure_model("cpp", cache_dir=tmp_path / "file", settings=TINY)
    with pytest.raises(UserError, match="unknown target"):
        warmstart.ensure_model("tpu", cache_dir=tmp_path)
    with pytest.raises(SystemExit) as stopped:
        warmstart.main(["--target", "cpp"])
    assert stopped.value.code == 2
    assert "--out" in capsys.readouterr().err


# ------------------------------------------------------------------------ the long version by hand


def sweep(target: str) -> int:
    """Every core: every variant correct (with its speedup), every mistake with its verdict."""
    rng = random.Random(3)
    wrong = 0
    for core in generate.CORES:
        spec = next(
            (s for s in (*generate.HELDOUT, *generate.TRAIN) if s.core == core), generate.TRAIN[0]
        )
        while spec.core != core:
            spec = generate.random_spec(rng, families=[generate.CORES[core].family])
        task = warmstart.make_task(spec, target)
        speeds = []
        with Sandbox(target) as box:
            for variant in grammar.variants(core, target):
                code = grammar.text(grammar.kernel(spec, variant, target))
                result = box.evaluate(task, code)
                name = f"{variant.loop}/{variant.build}/{variant.passes}"
                speeds.append(f"{name} {result.speedup:.2f}")
                if not result.correct:
                    wrong += 1
                    print(f"!! {generate.name(spec)} {name}: {result.status.value} {result.reason}")
        print(generate.name(spec), "; ".join(speeds), flush=True)
        with Sandbox(target, fixed_speedup=1.0) as box:
            lines = answer(spec, -1, target)
            for kind, places in grammar.fault_kinds(lines).items():
                for place in places:
                    instead = dict(lines[place].faults)[kind]
                    middle = [] if instead is None else [grammar.Line(instead)]
                    code = grammar.text([*lines[:place], *middle, *lines[place + 1 :]])
                    result = box.evaluate(task, code)
                    if result.status.value != grammar.status_of(kind, target):
                        wrong += 1
                        print(f"!! {generate.name(spec)} {kind} in line {place}: {instead}")
                        print(f"   {result.status.value}: {result.reason}", flush=True)
    print(f"{wrong} surprises")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(sweep(sys.argv[1] if len(sys.argv) > 1 else "cpp"))
