"""Prompts, parsing, task loading, the transformers policy, and whole conversations."""

from __future__ import annotations

import hashlib
import itertools
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rollout
import static_checks
from kernel_sandbox import KernelResult, Sandbox, Status, Task, UserError, load_task
from rollout import Generation, TransformersPolicy, build_prompt, feedback_text, parse_response

HERE = Path(__file__).resolve().parent
ADD_TANH = load_task(HERE / "tasks" / "add_tanh.py", "cpp")


@dataclass(frozen=True)
class Earlier:
    """The part of a turn that a later prompt shows."""

    code: str | None
    summary: str
    feedback: str


def letters(text: str) -> int:
    return len(text)


# ----------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("target", ["cpp", "cuda"])
def test_first_prompt_shows_task_rules_and_example(target):
    task = load_task(HERE / "tasks" / "add_tanh.py", target)
    text = build_prompt(task, [], letters, 10**6)
    example = (HERE / "prompts" / f"example_{target}.py").read_text().rstrip("\n")
    assert f"```python\n{task.source.strip()}\n```" in text
    assert f"```python\n{example}\n```" in text
    for needed in ("class ModelNew", "load_inline", "state dict", "summary", "init", "</think>"):
        assert needed in text
    assert ("NVIDIA H200" in text) == (target == "cuda")
    assert ("__global__" in text) == (target == "cuda")
    assert "$" not in text
    assert "earlier attempts" not in text


def test_gpu_name_is_a_field():
    task = load_task(HERE / "tasks" / "add_tanh.py", "cuda")
    assert "an NVIDIA L40S GPU" in build_prompt(task, [], letters, 10**6, gpu="L40S")


def test_later_prompt_layout():
    """Base prompt, header, turns oldest first as kernel, summary, feedback; closing instruction."""
    history = [
        Earlier("first = '$x {y}'\n", "I wrote a loop.", "It failed."),
        Earlier(None, "", "No code."),
    ]
    text = build_prompt(ADD_TANH, history, letters, 10**6)
    base = build_prompt(ADD_TANH, [], letters, 10**6).split("\n\nExample:")[0]
    assert text == base + (
        "\n\nYour earlier attempts, oldest first:"
        "\n\nAttempt 1:\n```python\nfirst = '$x {y}'\n```"
        "\nSummary:\nI wrote a loop.\nFeedback:\nIt failed."
        "\n\nAttempt 2:\n(No code could be read from this answer.)"
        "\nSummary:\n(none)\nFeedback:\nNo code."
        "\n\nStart your reasoning afresh, use what the feedback says, and give complete new code."
    )


def test_example_stands_in_the_first_prompt_only():
    assert "example_add" in build_prompt(ADD_TANH, [], letters, 10**6)
    later = build_prompt(ADD_TANH, [Earlier("x", "", "")], letters, 10**6)
    assert "example_add" not in later


def test_oldest_turns_are_dropped_first():
    """A budget that is one character short of all turns drops the first, and so on."""
    history = [Earlier(f"code_{i} = 1\n", f"summary {i}", f"feedback {i}") for i in range(1, 5)]
    budget = 10**6
    for dropped in range(5):
        text = build_prompt(ADD_TANH, history, letters, budget)
        for number, turn in enumerate(history, start=1):
            assert (f"Attempt {number}:" in text) == (number > dropped)
            assert (turn.feedback in text) == (number > dropped)
        assert ADD_TANH.source.strip() in text and text.endswith("complete new code.")
        assert build_prompt(ADD_TANH, history, letters, len(text)) == text
        budget = len(text) - 1
    assert "earlier attempts" not in text


def test_base_prompt_that_does_not_fit_is_a_user_error():
    for history in ([], [Earlier("x", "", "")]):
        with pytest.raises(UserError, match=r"add_tanh.*prompt_budget"):
            build_prompt(ADD_TANH, history, letters, 100)


def test_long_summary_is_cut():
    text = build_prompt(ADD_TANH, [Earlier("x", "word " * 5000, "ok")], letters, 10**6)
    assert text.count("word") <= rollout.SUMMARY_CHARS // 5 + 1


FEEDBACK = [
    (Status.FORMAT_ERROR, "could not be used: it does not keep to the format.\nwhy"),
    (Status.HACK, "could not be used: it violates the rules.\nwhy"),
    (Status.COMPILE_ERROR, "failed to compile.\nwhy"),
    (Status.RUNTIME_ERROR, "compiled but failed when it ran.\nwhy"),
    (Status.TIMEOUT, "compiled but failed when it ran.\nwhy"),
    (Status.INCORRECT, "its result is incorrect.\nwhy"),
    (Status.CORRECT, "correct.\nSpeedup over PyTorch:\n1.23x\nMake it faster."),
    (Status.HARNESS_ERROR, "because the evaluation itself failed."),
]


def test_feedback_cases():
    assert {status for status, _ in FEEDBACK} == set(Status)
    for status, ending in FEEDBACK:
        text = feedback_text(KernelResult(status, "why", speedup=1.234))
        assert text.endswith(ending), text


def test_feedback_is_cut_and_printable():
    lines = "\n".join(f"kernel.cpp:{i}:1: error: no" for i in range(1000))
    text = feedback_text(KernelResult(Status.COMPILE_ERROR, lines + "\ud800\0"))
    assert len(text) < rollout.MESSAGE_CHARS + 100
    assert text.endswith("error: no\n...")  # whole lines
    text = feedback_text(KernelResult(Status.RUNTIME_ERROR, "bad \ud800\0"))
    text.encode("utf-8")
    assert "\0" not in text
    assert feedback_text(KernelResult(Status.TIMEOUT)) == (
        "Your kernel compiled but failed when it ran."
    )


def test_templates_have_no_unknown_fields():
    known = {
        "task",
        "gpu",
        "example",
        "number",
        "kernel",
        "summary",
        "feedback",
        "code",
        "message",
        "speedup",
    }
    for path in (HERE / "prompts").glob("*.txt"):
        found = set(rollout._template(path.name).get_identifiers())
        assert found <= known, path.name


# ----------------------------------------------------------------------------- parsing

BLOCK = "```python\nx = 1\n```"
PARSED: list[tuple[str, str, str | None, str, str]] = [
    # response, thought, code, summary, words of the error
    (f"<think>\nhm\n</think>\n{BLOCK}\nDone.", "hm", "x = 1\n", "Done.", ""),
    (f"hm\n</think>\n{BLOCK}\nDone.", "hm", "x = 1\n", "Done.", ""),  # template opened the tag
    (f"hm\n{BLOCK}\nDone.", "hm", "x = 1\n", "Done.", ""),
    (f"<think>\nhm\n{BLOCK}\n", "hm", "x = 1\n", "", ""),
    (f"a {BLOCK} b\n```py\ny\n```\n</think>{BLOCK}", None, "x = 1\n", "", ""),  # type: ignore
    ("a</think>\n```\nx = 1\n```\n", "a", "x = 1\n", "", ""),
    ("a</think>\n```PY\nx = 1\n```", "a", "x = 1\n", "", ""),
    ("a</think>\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\nok", "a", "x = 1\ny = 2\n", "ok", ""),
    ("a</think>````python\ns = '''\n```\n'''\n````", "a", "s = '''\n```\n'''\n", "", ""),
    (f"a</think>Here it is:\n{BLOCK}\n two\nlines \n", "a", "x = 1\n", "two\nlines", ""),
    (f"a</think>\n{BLOCK}\n{BLOCK}\n", "a", None, "", "more than one"),
    (f"{BLOCK}\n{BLOCK}\n", "", None, "", "more than one"),
    ("a</think>\nno code", "a", None, "", "no python code block"),
    ("just words", "just words", None, "", "no python code block"),
    ("a</think>\n```python\nx = 1\n", "a", None, "", "not closed"),
    ("a</think>\n```cpp\nint x;\n```", "a", None, "", "not marked as python"),
    ("a</think>\n```python\n\n```", "a", None, "", "empty"),
    ("a</think>\n```python\nx = '\0'\n```", "a", None, "", "characters"),
    ("a</think>\n```python\nx = '\ud83d'\n```", "a", None, "", "characters"),
    ("\ud83d</think>\n" + BLOCK + "\n\ud83d\0", "\ufffd\ufffd\ufffd", "x = 1\n", None, ""),  # type: ignore
    ("", "", None, "", "empty"),
    (" \n\t", "", None, "", "empty"),
]


@pytest.mark.parametrize("case", PARSED, ids=range(len(PARSED)))
def test_parse_table(case):
    text, thought, code, summary, error = case
    parsed = parse_response(text)
    assert parsed.code == code
    assert thought is None or parsed.thought == thought
    assert summary is None or parsed.summary == summary
    assert error in parsed.error and bool(parsed.error) == (code is None)
    (parsed.thought + parsed.summary + (parsed.code or "")).encode("utf-8")


def test_truncated_response_is_a_format_error():
    parsed = parse_response(f"<think>hm</think>\n{BLOCK}\nDone", truncated=True)
    assert parsed.code is None and "cut off" in parsed.error and parsed.thought == "hm"


def test_junk_never_raises_and_costs_linear_time():
    pieces = [
        "```",
        "```python",
        "\n",
        " ",
        "</think>",
        "<think>",
        "x = 1",
        "`",
        "\0",
        "\ud800",
        "\r",
        "\r\n",
        "\u2028",
        "é",
        "$task",
        "{}",
        "\t",
        "~~~",
    ]
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(40)))
        parsed = parse_response(text, rng.random() < 0.1)
        assert (parsed.code is None) == bool(parsed.error)
        (parsed.thought + parsed.summary + (parsed.code or "")).encode("utf-8")
    noise = "".join(chr(rng.randrange(1, 0xFFFF)) for _ in range(2**20))
    million = [
        noise,
        "`" * 2**20,
        "```\n" * 2**18,
        "```" + " " * 2**20 + "`",
        "<think>" * 2**17,
        "</think>" * 2**17,
        "```python\n" + "x\n" * 2**19,
        "\r" * 2**20,
    ]
    for text in million:
        started = time.perf_counter()
        parse_response(text)
        assert time.perf_counter() - started < 3.0  # 0.2 s on an idle core


# ------------------------------------------------------------------------------- tasks


def test_own_tasks_and_their_splits(tmp_path, monkeypatch):
    train = rollout.load_tasks("tasks", "cpp", "train")
    heldout = rollout.load_tasks("tasks", "cpp", "heldout")
    every = rollout.load_tasks("tasks", "cpp", "all")
    names = [task.name for task in train + heldout]
    assert len(train) + len(heldout) >= 24 and len(set(names)) == len(names)
    assert [task.name for task in every][: len(names)] == names
    assert all("sizes[" not in task.source for task in every)
    monkeypatch.chdir(tmp_path)
    assert rollout.load_tasks("tasks", "cpp", "train") == train


KB_TASK = "import torch\nclass Model(torch.nn.Module): ...\ndef get_inputs(): return []\n"


def kernelbench(root: Path, levels: Iterable[int], problems: int) -> Path:
    for level in levels:
        folder = root / "KernelBench" / f"level{level}"
        folder.mkdir(parents=True)
        for problem in range(1, problems + 1):
            (folder / f"{problem}_Thing.py").write_text(KB_TASK)
    return root


def test_kernelbench_checkout(tmp_path):
    root = kernelbench(tmp_path, (1, 2, 3), 100)
    every = rollout.load_tasks(f"kernelbench:{root}", "cuda", "all")
    assert [task.level for task in every] == [1] * 100 + [2] * 100 + [3] * 100
    assert [task.name for task in every[8:11]] == [
        "level1_9_Thing",
        "level1_10_Thing",
        "level1_11_Thing",
    ]
    train = rollout.load_tasks(f"kernelbench:{root}", "cuda", "train")
    heldout = rollout.load_tasks(f"kernelbench:{root}", "cuda", "heldout")
    assert (len(train), len(heldout)) == (180, 20)  # P, Sec. 3.1
    assert not {task.name for task in train} & {task.name for task in heldout}
    second = rollout.load_tasks(f"kernelbench:{root}:2", "cuda", "all")
    assert {task.level for task in second} == {2}
    both = rollout.load_tasks(f"kernelbench:{root}:3,1", "cuda", "all")
    assert [task.level for task in both] == [3] * 100 + [1] * 100


def test_kernelbench_from_the_hub(monkeypatch):
    """The library's shape of the data set (columns code, level, name, problem_id), out of order."""

    def load_dataset(name, split):
        assert name == "ScalingIntelligence/KernelBench"
        level = int(split.removeprefix("level_"))
        return [
            {"code": KB_TASK, "level": level, "name": f"{i}_Thing.py", "problem_id": i}
            for i in (10, 9, 5)
        ]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    tasks = rollout.load_tasks("kernelbench:hf:1", "cuda", "all")
    assert [task.name for task in tasks] == ["level1_5_Thing", "level1_9_Thing", "level1_10_Thing"]
    assert [t.name for t in rollout.load_tasks("kernelbench:hf:1", "cuda", "heldout")] == [
        "level1_5_Thing"
    ]

    def offline(name, split):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(UserError, match="no route to host.*kernelbench:DIR"):
        rollout.load_tasks("kernelbench:hf", "cuda")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        rollout.load_tasks("kernelbench:hf", "cuda")


def test_tasks_that_are_not_there(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\nclass Model(:\n")
    with pytest.raises(UserError, match=r"broken\.py.*2"):
        rollout.load_tasks(str(broken), "cpp")
    for spec in ("nosuch", "kernelbench:/nosuch", f"kernelbench:{tmp_path}"):
        with pytest.raises(UserError, match="nosuch|KernelBench"):
            rollout.load_tasks(spec, "cpp")
    with pytest.raises(UserError, match="split"):
        rollout.load_tasks("tasks", "cpp", "test")  # type: ignore[arg-type]
    (tmp_path / "splits.toml").write_text('train = ["ghost"]\n')
    with pytest.raises(UserError, match="ghost"):
        rollout.load_tasks(str(tmp_path), "cpp")
    with pytest.raises(UserError, match="no heldout tasks"):
        rollout.load_tasks(str(tmp_path), "cpp", "heldout")
    (tmp_path / "splits.toml").write_text("train = [\n")
    with pytest.raises(UserError, match=r"splits\.toml"):
        rollout.load_tasks(str(tmp_path), "cpp")
    for lone in ("nosplits", "empty"):
        (tmp_path / lone).mkdir()
    (tmp_path / "nosplits" / "10_b.py").write_text(KB_TASK)
    (tmp_path / "nosplits" / "9_a.py").write_text(KB_TASK)
    found = rollout.load_tasks(str(tmp_path / "nosplits"), "cpp")
    assert [task.name for task in found] == ["9_a", "10_b"]
    with pytest.raises(UserError, match="no train tasks"):
        rollout.load_tasks(str(tmp_path / "empty"), "cpp")


# ------------------------------------------------------------------------------ policy

VOCABULARY = 512
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>"


def small_model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights, with grouped-query attention; sampled text is noise of random length."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=4096,
                initializer_range=0.2,
                eos_token_id=0,
                bos_token_id=None,
                pad_token_id=1,
            )
        )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<eos>", "<pad>", "<|user|>", "<|assistant|>"]
    texts = [build_prompt(ADD_TANH, [], letters, 10**6)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<eos>", pad_token="<pad>", chat_template=TEMPLATE
    )


def some_prompts(count: int, length: int = 60) -> list[list[int]]:
    rng = random.Random(1)
    shared = [rng.randrange(4, VOCABULARY) for _ in range(length)]
    return [
        shared + [rng.randrange(4, VOCABULARY) for _ in range(rng.randrange(1, length))]
        for _ in range(count)
    ]


def full_forward(model: Any, prompt: Sequence[int], ids: Sequence[int], temperature: float):
    """[T] log-probs of `ids` after `prompt`, by one plain forward pass."""
    tokens = torch.tensor([*prompt, *ids], device=model.device)
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0] / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.cpu().gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("batch_tokens", [None, 16])  # 16: prompts are cut into chunks
def test_logprobs_equal_a_full_forward(tokenizer, batch_tokens):
    model = small_model()
    policy = TransformersPolicy(model, tokenizer, batch_tokens=batch_tokens)
    prompts = some_prompts(9)
    for temperature in (0.9, 1.0):
        made = policy.generate(prompts, seed=1, max_new_tokens=20, temperature=temperature)
        for prompt, generation in zip(prompts, made, strict=True):
            want = full_forward(model, prompt, generation.token_ids, temperature)
            assert (want - torch.tensor(generation.logprobs)).abs().max() < 5e-5


def test_sampling_follows_the_distribution(tokenizer):
    """First tokens of many samples: chi-square against the model's own probabilities."""
    model, prompt, temperature = small_model(), some_prompts(1)[0], 0.9
    policy = TransformersPolicy(model, tokenizer)
    made = policy.generate([prompt] * 600, seed=4, max_new_tokens=1, temperature=temperature)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt])).logits[0, -1] / temperature
    probability = logits.softmax(-1)
    top = probability.topk(8).indices.tolist()
    expected = torch.tensor([600 * float(probability[i]) for i in top])
    seen = torch.tensor([sum(g.token_ids[0] == i for g in made) for i in top], dtype=torch.float)
    big = expected >= 5
    assert big.sum() >= 2
    chi = ((seen - expected) ** 2 / expected)[big].sum()
    assert chi < 3 * big.sum() + 12


def test_same_seed_same_tokens_and_nothing_else_moves(tokenizer):
    model = small_model().train()
    policy = TransformersPolicy(model, tokenizer)
    prompts, random_state = some_prompts(12), torch.get_rng_state()
    threads = torch.get_num_threads()
    first = policy.generate(prompts, seed=7, max_new_tokens=24)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training and all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert torch.get_num_threads() == threads
    torch.rand(5)  # the caller's random state must not matter
    assert policy.generate(prompts, seed=7, max_new_tokens=24) == first
    other = policy.generate(prompts, seed=8, max_new_tokens=24)
    assert [g.token_ids for g in other] != [g.token_ids for g in first]
    model.eval()
    policy.generate(prompts[:1], seed=7, max_new_tokens=2)
    assert not model.training


def digest(made: Sequence[Generation]) -> str:
    return hashlib.sha256(repr([g.token_ids for g in made]).encode()).hexdigest()


def test_a_fresh_process_samples_the_same_tokens(tokenizer, tmp_path):
    policy = TransformersPolicy(small_model(), tokenizer)
    here = digest(policy.generate(some_prompts(12), seed=7, max_new_tokens=24))
    tokenizer.save_pretrained(tmp_path)
    program = (
        "import sys, test_rollout as t, transformers as h\n"
        "tokenizer = h.AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "policy = t.TransformersPolicy(t.small_model(), tokenizer)\n"
        "print(t.digest(policy.generate(t.some_prompts(12), seed=7, max_new_tokens=24)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split()[-1] == here


def test_responses_end_at_eos_or_at_the_limit(tokenizer):
    policy = TransformersPolicy(small_model(), tokenizer)
    made = policy.generate(some_prompts(24), seed=3, max_new_tokens=400, temperature=1.5)
    reasons = {generation.finish_reason for generation in made}
    for generation in made:
        assert len(generation.token_ids) == len(generation.logprobs)
        assert (generation.token_ids[-1] == 0) == (generation.finish_reason == "stop")
        assert len(generation.token_ids) == 400 or generation.finish_reason == "stop"
        assert "<eos>" not in generation.text
    assert "stop" in reasons
    short = policy.generate(some_prompts(2), seed=3, max_new_tokens=1)
    assert all(len(generation.token_ids) == 1 for generation in short)


def test_finished_requests_are_handed_over_before_the_batch_ends(tokenizer):
    policy = TransformersPolicy(small_model(), tokenizer)
    seen: list[tuple[int, Generation]] = []
    made = policy.generate(
        some_prompts(24),
        seed=3,
        max_new_tokens=400,
        temperature=1.5,
        on_finish=lambda index, generation: seen.append((index, generation)),
    )
    assert sorted(index for index, _ in seen) == list(range(24))
    assert all(made[index] is generation for index, generation in seen)
    lengths = [len(generation.token_ids) for _, generation in seen]
    assert lengths == sorted(lengths)  # all start together, so the shortest ends first


def test_error_in_a_callback_stops_the_engine(tokenizer):
    model = small_model()
    policy = TransformersPolicy(model, tokenizer)

    def fail(index: int, generation: Generation) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy.generate(some_prompts(8), seed=1, max_new_tokens=50, on_finish=fail)
    assert model.config._attn_implementation == "sdpa"
    made = policy.generate(some_prompts(8), seed=1, max_new_tokens=5)
    assert len(made) == 8


def test_engine_failure_is_an_error_not_a_short_list(tokenizer, monkeypatch):
    model = small_model()
    policy = TransformersPolicy(model, tokenizer)
    calls = itertools.count()
    forward = model.forward

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("broken layer")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", sometimes)
    with pytest.raises(RuntimeError, match="broken layer"):
        policy.generate(some_prompts(4), seed=1, max_new_tokens=10)


def test_small_cache_queues_requests_and_changes_no_logprob(tokenizer):
    """Four sequences' worth of cache for twelve: later ones wait, every one comes out right."""
    model = small_model()
    block = 16 * 2 * 2 * 2 * 16 * 4  # tokens, K and V, layers, heads, head size, bytes
    policy = TransformersPolicy(model, tokenizer, kv_bytes=44 * block)
    prompts = some_prompts(12)
    made = policy.generate(prompts, seed=2, max_new_tokens=20)
    for prompt, generation in zip(prompts, made, strict=True):
        want = full_forward(model, prompt, generation.token_ids, 0.9)
        assert (want - torch.tensor(generation.logprobs)).abs().max() < 5e-5
    with pytest.raises(UserError, match="KV cache"):
        TransformersPolicy(model, tokenizer, kv_bytes=block).generate(
            prompts, seed=2, max_new_tokens=20
        )


def test_prompt_beyond_the_context_is_a_user_error(tokenizer):
    policy = TransformersPolicy(small_model(), tokenizer)
    assert policy.context == 4096
    with pytest.raises(UserError, match="context of 4096"):
        policy.generate([[5] * 4000], seed=0, max_new_tokens=97)


def test_sync_moves_weights_and_shared_weights_stay(tokenizer):
    model, other = small_model(0), small_model(1)
    policy = TransformersPolicy(model, tokenizer)
    prompts = some_prompts(4)
    before = policy.generate(prompts, seed=1, max_new_tokens=8)
    policy.sync(model.named_parameters())
    assert policy.generate(prompts, seed=1, max_new_tokens=8) == before
    policy.sync((f"module.{name}", value) for name, value in other.named_parameters())
    after = policy.generate(prompts, seed=1, max_new_tokens=8)
    assert after == TransformersPolicy(other, tokenizer).generate(prompts, seed=1, max_new_tokens=8)
    gaps = [
        (full_forward(small_model(0), prompt, g.token_ids, 0.9) - torch.tensor(g.logprobs)).abs()
        for prompt, g in zip(prompts, after, strict=True)
    ]
    assert max(float(gap.max()) for gap in gaps) > 0.5  # stale weights would be seen
    with pytest.raises(ValueError, match="nosuch"):
        policy.sync([("nosuch", torch.zeros(1))])


def test_update_between_calls_is_seen(tokenizer):
    """The module is shared: no sync needed, and no cache of the old weights survives a call."""
    model = small_model()
    policy = TransformersPolicy(model, tokenizer)
    prompts = some_prompts(4)
    policy.generate(prompts, seed=1, max_new_tokens=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for prompt, generation in zip(
        prompts, policy.generate(prompts, seed=1, max_new_tokens=8), strict=True
    ):
        want = full_forward(model, prompt, generation.token_ids, 0.9)
        assert (want - torch.tensor(generation.logprobs)).abs().max() < 5e-5


def test_wrapped_module_is_unwrapped_and_others_are_refused(tokenizer):
    model = small_model()
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert TransformersPolicy(wrapper, tokenizer).model is model
    with pytest.raises(UserError, match="Linear"):
        TransformersPolicy(torch.nn.Linear(2, 2), tokenizer)


# ----------------------------------------------------------------------------- rollout

TANH_KERNEL = '''import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor run(torch::Tensor a, torch::Tensor b) {
    torch::Tensor out = torch::empty_like(a);
    const float* pa = a.data_ptr<float>();
    const float* pb = b.data_ptr<float>();
    float* po = out.data_ptr<float>();
    const int64_t n = a.numel();
    #pragma omp parallel for
    for (int64_t i = 0; i < n; ++i) po[i] = std::tanh(pa[i] + pb[i]);
    return out;
}
"""
kernels = load_inline(name="k", cpp_sources=source, functions=["run"],
                      extra_cflags=["-O2", "-fopenmp"], extra_ldflags=["-fopenmp"])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return kernels.run(a, b)
'''


class Script:
    """An engine that reads its responses from a list, one list a turn; no language model."""

    context = 10**6

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[str]]) -> None:
        self.tokenizer, self.turns = tokenizer, iter(turns)
        self.seeds: list[int] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float = 0.9,
        on_finish: Callable[[int, Generation], None] | None = None,
    ) -> list[Generation]:
        self.seeds.append(seed)
        made = []
        for text in next(self.turns):
            ids = tuple(self.tokenizer(text).input_ids)
            made.append(
                Generation(
                    ids[:max_new_tokens],
                    (0.0,) * len(ids[:max_new_tokens]),
                    text,
                    "length" if len(ids) > max_new_tokens else "stop",
                )
            )
        assert len(made) == len(prompts)
        for index in reversed(range(len(made))):
            assert on_finish is not None
            on_finish(index, made[index])
        return made

    def sync(self, params: Iterable[tuple[str, Tensor]]) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("cpp", fixed_speedup=1.5) as box:
        yield box


SETTINGS: dict[str, Any] = {
    "seed": 3,
    "step": 2,
    "temperature": 0.9,
    "max_new_tokens": 4000,
    "prompt_budget": 10**5,
}


def test_conversation_with_real_verdicts(tokenizer, sandbox):
    right = f"Okay, one loop.\n</think>\n```python\n{TANH_KERNEL}```\nFused both operators."
    broken = right.replace("po[i] = std::tanh", "po[i] = std::tanhh")
    wrong = right.replace("pa[i] + pb[i]", "pa[i] - pb[i]")
    scripts = [[broken, "no code here"], [wrong, right + "\n" + BLOCK], [right, "x " * 8000]]
    policy = Script(tokenizer, scripts)
    episodes = rollout.rollout(
        policy, tokenizer, [ADD_TANH], sandbox, trajectories=2, turns=3, **SETTINGS
    )
    assert [(e.task.name, e.trajectory, len(e.turns)) for e in episodes] == [
        ("add_tanh", 0, 3),
        ("add_tanh", 1, 3),
    ]
    statuses = [[turn.result.status for turn in episode.turns] for episode in episodes]
    assert statuses == [
        [Status.COMPILE_ERROR, Status.INCORRECT, Status.CORRECT],
        [Status.FORMAT_ERROR] * 3,
    ]
    first, second, third = episodes[0].turns
    assert first.code and second.code
    assert "tanhh" in first.feedback and first.thought == "Okay, one loop."
    assert "earlier attempts" not in first.prompt and "example_add" in first.prompt
    assert first.code in second.prompt and first.feedback in second.prompt
    assert "Fused both operators." in second.prompt and "Okay, one loop." not in second.prompt
    assert third.prompt.index(first.code) < third.prompt.index(second.code)
    assert "1.50x" in third.feedback and third.result.speedup == 1.5
    failed = episodes[1].turns
    assert "more than one" in failed[1].feedback
    assert failed[2].truncated and "cut off" in failed[2].feedback
    for turn in itertools.chain(*(episode.turns for episode in episodes)):
        assert list(turn.prompt_ids) == rollout.encode_prompt(tokenizer, turn.prompt)
        assert len(turn.token_ids) == len(turn.logprobs)
    assert policy.seeds == [rollout.call_seed(3, 2, turn) for turn in range(3)]
    assert (
        len({rollout.call_seed(a, b, c) for a in range(4) for b in range(9) for c in range(8)})
        == 4 * 9 * 8
    )


ADD_TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return a + b
def get_inputs():
    return [torch.randn(512, 512), torch.randn(512, 512)]
def get_init_inputs():
    return []
"""


def test_example_of_the_prompt_is_a_correct_answer(sandbox):
    code = (HERE / "prompts" / "example_cpp.py").read_text()
    result = sandbox.evaluate(Task("add", 1, ADD_TASK, "cpp"), code)
    assert result.status is Status.CORRECT, result


def test_cuda_example_keeps_the_rules():
    code = (HERE / "prompts" / "example_cuda.py").read_text()
    assert not [finding for finding in static_checks.check(code, "cuda") if finding.fatal]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_example_is_a_correct_answer():
    code = (HERE / "prompts" / "example_cuda.py").read_text()
    with Sandbox("cuda", fixed_speedup=1.5) as box:
        result = box.evaluate(Task("add", 1, ADD_TASK, "cuda"), code)
    assert result.status is Status.CORRECT, result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_on_the_gpu(tokenizer, dtype):
    model: Any = small_model()
    model.to("cuda", dtype)
    policy = TransformersPolicy(model, tokenizer)
    prompts = some_prompts(40)
    made = policy.generate(prompts, seed=1, max_new_tokens=30)
    assert policy.generate(prompts, seed=1, max_new_tokens=30) == made
    reference: Any = small_model()
    reference.to("cuda")
    with torch.no_grad():
        for own, value in zip(reference.parameters(), model.parameters(), strict=True):
            own.copy_(value)
    gaps = [
        (full_forward(reference, p, g.token_ids, 0.9) - torch.tensor(g.logprobs)).abs().mean()
        for p, g in zip(prompts, made, strict=True)
    ]
    assert float(torch.stack(gaps).mean()) < (5e-4 if dtype == torch.float32 else 0.1)


def test_random_model_gives_verdicts_and_repeats_exactly(tokenizer, sandbox):
    """Noise for answers, two tasks, tight prompt budget: the same episodes twice."""
    tasks = rollout.load_tasks("tasks", "cpp", "train")[:2]
    runs = []
    for _ in range(2):
        policy = TransformersPolicy(small_model(), tokenizer)
        settings = SETTINGS | {"max_new_tokens": 30, "prompt_budget": 3000}
        runs.append(
            rollout.rollout(policy, tokenizer, tasks, sandbox, trajectories=3, turns=3, **settings)
        )
    assert [
        [(t.prompt_ids, t.token_ids, t.logprobs, t.feedback) for t in e.turns] for e in runs[0]
    ] == [[(t.prompt_ids, t.token_ids, t.logprobs, t.feedback) for t in e.turns] for e in runs[1]]
    assert [(e.task, e.trajectory) for e in runs[0]] == list(itertools.product(tasks, range(3)))
    for turn in itertools.chain(*(episode.turns for episode in runs[0])):
        assert turn.result.status is Status.FORMAT_ERROR
        assert len(turn.prompt_ids) <= 3000


def test_tokenizer_without_chat_template_is_a_user_error():
    with pytest.raises(UserError, match="chat template"):
        rollout.encode_prompt(types.SimpleNamespace(chat_template=None), "hello")


def test_task_that_leaves_no_room_is_a_user_error(tokenizer, sandbox):
    policy = TransformersPolicy(small_model(), tokenizer)
    big = Task("big", 1, ADD_TANH.source + "# x\n" * 9000, "cpp")
    with pytest.raises(UserError, match=r"big.*prompt_budget"):
        rollout.rollout(
            policy,
            tokenizer,
            [big],
            sandbox,
            trajectories=1,
            turns=1,
            **SETTINGS | {"max_new_tokens": 30},
        )


def test_assumptions_and_deviations_of_this_file_are_marked():
    text = (HERE / "rollout.py").read_text()
    assert [f"# ASSUMPTION A{i:02}:" in text for i in range(1, 10)] == [True] * 9
    assert [f"# DEVIATION D{i:02}:" in text for i in range(1, 5)] == [True] * 4
