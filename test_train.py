"""train.py and its parts: equations against numbers worked out by hand, invariance of the loss
under memory settings, exact resume, errors. Everything runs on CPU in fp32."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import run_folder
import train
import train_config
from kernel_sandbox import KernelResult, Status
from packing import Sample, TokenLogprobs, collate, logprobs_of, pack, share
from rollout import Episode, Task, Turn
from train_config import Config, load_config

HERE = Path(__file__).resolve().parent
NAN = math.nan
# One thread each: with more, the threads of tiny tensors spin, and on a busy machine take 20 times
# as long (measured). It is part of what must be equal for bitwise equal runs.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------
# Equations
# ------------------------------------------------------------------------------------------------


def test_return_sum_matches_hand_computation() -> None:
    """gamma 0.4, scores 0, 1.3, 0, 2.3: R4 = 2.3; R3 = 0 + 0.4*2.3 = 0.92; R2 = 1.3 + 0.4*0.92
    = 1.668; R1 = 0 + 0.4*1.668 = 0.6672."""
    scores = torch.tensor([[0.0, 1.3, 0.0, 2.3]], dtype=torch.float64)
    returns = train.discounted_returns(scores, 0.4)
    expected = torch.tensor([[0.6672, 1.668, 0.92, 2.3]], dtype=torch.float64)
    torch.testing.assert_close(returns, expected, atol=1e-12, rtol=0)


def test_return_max_matches_hand_computation() -> None:
    """R4 = 2.3; R3 = max(0, 0.92); R2 = max(1.3, 0.16*2.3 = 0.368) = 1.3; R1 = max(0, 0.4*1.3 =
    0.52, 0.064*2.3 = 0.1472) = 0.52."""
    scores = torch.tensor([[0.0, 1.3, 0.0, 2.3]], dtype=torch.float64)
    returns = train.discounted_returns(scores, 0.4, "max")
    expected = torch.tensor([[0.52, 1.3, 0.92, 2.3]], dtype=torch.float64)
    torch.testing.assert_close(returns, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["sum", "max"])
@pytest.mark.parametrize("gamma", [0.0, 0.4, 0.8, 1.0])
def test_return_equals_its_definition_written_out(kind: str, gamma: float) -> None:
    """The recursion against the sum (maximum) over i >= t, term by term."""
    scores = torch.rand(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    returns = train.discounted_returns(scores, gamma, kind)
    for g, t in itertools.product(range(5), range(6)):
        terms = [gamma ** (i - t) * float(scores[g, i]) for i in range(t, 6)]
        expected = sum(terms) if kind == "sum" else max(terms)
        assert float(returns[g, t]) == pytest.approx(expected, abs=1e-12)


def test_return_of_one_turn_is_its_score() -> None:
    scores = torch.tensor([[1.7], [0.0]])
    assert torch.equal(train.discounted_returns(scores, 0.4), scores)


def test_return_leaves_the_scores_alone() -> None:
    scores = torch.ones(2, 3)
    train.discounted_returns(scores, 0.5)
    assert torch.equal(scores, torch.ones(2, 3))


@pytest.mark.parametrize("kind", ["sum", "max"])
def test_unknown_score_makes_earlier_returns_unknown_and_later_ones_not(kind: str) -> None:
    """A harness error at turn 2 is neither 0 nor skipped: R1 and R2 contain it, R3 does not."""
    returns = train.discounted_returns(torch.tensor([[1.0, NAN, 2.0]]), 0.4, kind)
    assert returns.isnan().tolist() == [[True, True, False]]
    assert float(returns[0, 2]) == 2.0


def test_advantage_matches_hand_computation() -> None:
    """Returns 1 3 / 5 7: mean 4; deviations -3 -1 1 3; variance (9+1+1+9)/4 = 5."""
    returns = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]], dtype=torch.float64)
    root = math.sqrt(5.0)
    expected = torch.tensor([[[-3 / root, -1 / root], [1 / root, 3 / root]]], dtype=torch.float64)
    torch.testing.assert_close(train.advantages(returns), expected, atol=1e-12, rtol=0)
    no_std = torch.tensor([[[-3.0, -1.0], [1.0, 3.0]]], dtype=torch.float64)
    torch.testing.assert_close(train.advantages(returns, "group_no_std"), no_std)


def test_trloo_matches_hand_computation() -> None:
    """Turn 1 returns 1, 5, 6: 1 - (5+6)/2 = -4.5, 5 - 3.5 = 1.5, 6 - 3 = 3; turn 2 all 2: 0."""
    returns = torch.tensor([[[1.0, 2.0], [5.0, 2.0], [6.0, 2.0]]], dtype=torch.float64)
    expected = torch.tensor([[[-4.5, 0.0], [1.5, 0.0], [3.0, 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(train.advantages(returns, "trloo"), expected)


def random_returns(seed: int = 0, shape: tuple[int, ...] = (3, 5, 4)) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_advantage_has_mean_0_and_std_1_over_each_task() -> None:
    advantage = train.advantages(random_returns())
    torch.testing.assert_close(advantage.mean(dim=(1, 2)), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(
        advantage.std(dim=(1, 2), correction=0), torch.ones(3, dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", ["group", "group_no_std", "trloo"])
def test_advantage_ignores_a_shift_and_keeps_the_order_of_trajectories(kind: str) -> None:
    returns = random_returns()
    advantage = train.advantages(returns, kind)
    torch.testing.assert_close(train.advantages(returns + 7.5, kind), advantage)
    order = [3, 0, 4, 1, 2]
    torch.testing.assert_close(train.advantages(returns[:, order], kind), advantage[:, order])


def test_advantage_with_std_ignores_a_positive_scale() -> None:
    returns = random_returns()
    torch.testing.assert_close(train.advantages(returns * 12.0), train.advantages(returns))


@pytest.mark.parametrize("kind", ["group", "group_no_std", "trloo"])
def test_tasks_do_not_leak_into_each_other(kind: str) -> None:
    returns = random_returns()
    changed = returns.clone()
    changed[1] = 100 * random_returns(9, (5, 4))
    before, after = train.advantages(returns, kind), train.advantages(changed, kind)
    assert torch.equal(before[[0, 2]], after[[0, 2]])


@pytest.mark.parametrize("kind", ["group", "group_no_std", "trloo"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1.3, 1e6 / 3])
def test_equal_returns_give_exactly_zero(kind: str, value: float) -> None:
    """No epsilon that would blow rounding up to an advantage."""
    returns = torch.full((1, 7, 3), value, dtype=torch.float64)
    assert torch.equal(train.advantages(returns, kind), torch.zeros_like(returns))


@pytest.mark.parametrize("kind", ["group", "group_no_std", "trloo"])
def test_dropped_samples_enter_no_mean(kind: str) -> None:
    """A group with a dropped trajectory has the advantages of the group without it."""
    returns = random_returns()
    returns[:, 4] = NAN
    advantage = train.advantages(returns, kind)
    assert advantage[:, 4].isnan().all()
    torch.testing.assert_close(advantage[:, :4], train.advantages(returns[:, :4], kind))


# ratio, advantage -> loss, d loss / d logprob; clip 0.2 below, 0.28 above.
LOSS_TABLE = [
    (1.0, 2.0, -2.0, -2.0),  # on-policy: -A, gradient -A
    (1.0, -2.0, 2.0, 2.0),
    (1.1, 2.0, -2.2, -2.2),  # inside the clip: -r A, gradient -r A
    (0.9, -2.0, 1.8, 1.8),
    (1.5, 2.0, -2.56, 0.0),  # too likely already and good: clipped at 1.28
    (1.27, 2.0, -2.54, -2.54),  # clip-higher: 1.27 is still inside
    (0.5, -2.0, 1.6, 0.0),  # too unlikely already and bad: clipped at 0.8
    (0.5, 2.0, -1.0, -1.0),  # good and unlikely: never clipped
    (1.5, -2.0, 3.0, 3.0),  # bad and likely: never clipped
    (1.5, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope"), LOSS_TABLE)
def test_policy_loss_table(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0], dtype=torch.float64)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    value = train.policy_loss(logprob, old, advantages, 0.2, 0.28)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(slope, abs=1e-12)


def test_on_policy_gradient_is_the_policy_gradient_of_a_bandit() -> None:
    """Three actions: sum_a pi(a) d loss(a) with A = r - mean equals -d E[r] by differences."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64)
    chance = torch.softmax(logits, 0).detach()
    advantage = reward - (chance * reward).sum()
    logprobs = torch.log_softmax(logits, 0)
    loss = train.policy_loss(logprobs, logprobs.detach(), advantage, 0.2, 0.28)
    (chance * loss).sum().backward()
    assert logits.grad is not None
    for action in range(3):
        shift = torch.zeros(3, dtype=torch.float64)
        shift[action] = 1e-6
        up = (torch.softmax(logits.detach() + shift, 0) * reward).sum()
        down = (torch.softmax(logits.detach() - shift, 0) * reward).sum()
        assert logits.grad[action].item() == pytest.approx(-(up - down).item() / 2e-6, abs=1e-8)


def test_sample_weights_match_hand_computation() -> None:
    """Two samples of 2 and 6 tokens. Constant 100: 1/200. Sample: 1/4, 1/12. Token: 1/8."""
    assert train.sample_weights([2, 6], "constant", 100) == pytest.approx([1 / 200, 1 / 200])
    assert train.sample_weights([2, 6], "sample", 100) == pytest.approx([1 / 4, 1 / 12])
    assert train.sample_weights([2, 6], "token", 100) == pytest.approx([1 / 8, 1 / 8])


def test_learning_rate_rises_over_3_percent_of_the_steps_then_stays() -> None:
    """40 steps of 2 gradient steps: ceil(0.03 * 80) = 3 of warm-up: 1/3, 2/3, 1, 1, ..."""
    config = Config(learning_rate=3e-6)
    rates = [train.learning_rate_at(config, i) for i in (0, 1, 2, 3, 79)]
    assert rates == pytest.approx([1e-6, 2e-6, 3e-6, 3e-6, 3e-6])


def test_response_limit_rises_at_its_step() -> None:
    config = Config(max_new_tokens_schedule="30:22528")
    assert [train_config.limit_at_step(config, s) for s in (1, 29, 30, 40)] == [
        16384,
        16384,
        22528,
        22528,
    ]


@pytest.mark.parametrize(
    ("response", "okay"),
    [
        ("Okay, so the task", True),
        ("<think>\nOkay, let me see", True),
        ("Okay Amigos, we", False),  # the paper's own example
        ("Okay", False),
        ("okay, so", False),
        ("So: Okay,", False),
        ("", False),
    ],
)
def test_not_okay_needs_the_exact_opening(response: str, okay: bool) -> None:
    assert run_folder.is_okay(response) is okay


def test_task_order_is_a_pure_function_that_visits_all_without_repeats() -> None:
    """180 tasks, 8 a step: 22 whole steps an epoch, no task twice in it, then another order."""
    epoch = [train.tasks_of_step(180, 8, 0, step) for step in range(1, 23)]
    flat = [task for step in epoch for task in step]
    assert len(flat) == len(set(flat)) == 176
    assert epoch[4] == train.tasks_of_step(180, 8, 0, 5)
    assert epoch[0] != train.tasks_of_step(180, 8, 0, 23)
    assert epoch[0] != train.tasks_of_step(180, 8, 1, 1)
    four = {task for step in range(1, 40) for task in train.tasks_of_step(5, 4, 0, step)}
    assert four == set(range(5)), "what one epoch leaves out, another takes"


def test_halves_use_each_sample_once_and_passes_use_all_twice() -> None:
    halves = train.split_updates(7, Config(), 3)
    assert sorted(halves[0] + halves[1]) == list(range(7))
    assert {len(half) for half in halves} == {3, 4}
    passes = train.split_updates(7, Config(update_split="passes"), 3)
    assert [sorted(part) for part in passes] == [list(range(7))] * 2
    assert train.split_updates(7, Config(), 3) == halves
    assert train.split_updates(1, Config(), 3) == [[0]]
    assert train.split_updates(0, Config(), 3) == []


# ------------------------------------------------------------------------------------------------
# Packing, log-probs, loss of a model
# ------------------------------------------------------------------------------------------------

VOCABULARY = 61


def tiny_model(seed: int = 0) -> Any:
    """A Llama of 2 layers with random weights, large enough to tell samples apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(shape).float()


def random_samples(count: int = 9, seed: int = 0) -> list[Sample]:
    """Samples of 3 to 30 tokens with advantages and engine log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        size = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, VOCABULARY, (size,), generator=generator).tolist())

    samples = []
    for _ in range(count):
        prompt, response = ids(2, 18), ids(1, 13)
        engine = (-torch.rand(len(response), generator=generator) - 3.0).tolist()
        advantage = float(torch.randn(1, generator=generator))
        samples.append(Sample(prompt, response, tuple(engine), advantage))
    return samples


def plain_logprobs(model: Any, sample: Sample, temperature: float) -> Tensor:
    """The definition: one unpadded forward, log-softmax of all logits over the temperature."""
    ids = torch.tensor([sample.prompt_ids + sample.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
    every = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return every[len(sample.prompt_ids) - 1 :]


def one_process() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def test_packing_keeps_samples_whole_and_rows_within_the_budget() -> None:
    lengths = [7, 3, 5, 12, 2, 2, 9, 1]
    rows = pack(lengths, 10)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert [3] in rows, "a sample above the budget has its own row"
    assert all(sum(lengths[i] for i in row) <= 10 for row in rows if row != [3])
    assert len(rows) == 4  # 12 | 9+1 | 7+3 | 5+2+2


def test_rows_are_shared_in_equal_numbers() -> None:
    """Processes run in lockstep: 5 rows over 2 are 3 each, the sixth a copy that does not count."""
    rows = [[0], [1], [2], [3], [4]]
    first, second = share(rows, 0, 2), share(rows, 1, 2)
    assert first == [([0], True), ([2], True), ([4], True)]
    assert second == [([1], True), ([3], True), ([0], False)]


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_logprobs_equal_separate_ones(chunk: int, attention: str) -> None:
    """One row of nine samples against nine forwards, at temperature 0.9: 1e-6."""
    model = tiny_model()
    model.set_attn_implementation(attention)
    samples = random_samples()
    row = collate(samples)
    policy = TokenLogprobs(model, 0.9, chunk)
    with torch.no_grad():
        found, entropy = policy(row.input_ids, row.position_ids, row.where, row.labels)
        expected = torch.cat([plain_logprobs(model, sample, 0.9) for sample in samples])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert 0 < float(entropy.min()) and float(entropy.max()) <= math.log(VOCABULARY)


def test_a_sample_does_not_see_its_neighbours_in_the_row() -> None:
    """Poison: other tokens in all samples but the middle one leave its log-probs as they were."""
    policy = TokenLogprobs(tiny_model(), 1.0, 64)
    samples = random_samples(3)
    other = random_samples(3, seed=5)
    results = []
    for first, last in [(samples[0], samples[2]), (other[0], other[2])]:
        row = collate([first, samples[1], last])
        with torch.no_grad():
            logprobs, _ = policy(row.input_ids, row.position_ids, row.where, row.labels)
        results.append(logprobs.split(row.sizes)[1])
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=0)


def test_logprobs_and_entropy_match_hand_computation() -> None:
    """Logits 0, ln 3 at temperature 0.5 are 0, ln 9: chances 0.1, 0.9; entropy 0.3251."""
    from packing import token_logprobs

    head = nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[0.0], [math.log(3.0)]])
    hidden, labels = torch.ones(2, 1), torch.tensor([0, 1])
    logprobs, entropy = token_logprobs(hidden, labels, head, 0.5)
    torch.testing.assert_close(logprobs.detach(), torch.tensor([0.1, 0.9]).log())
    expected = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9))
    torch.testing.assert_close(entropy, torch.full((2,), expected))


def test_logits_never_exist_for_more_than_a_chunk_of_tokens() -> None:
    model = tiny_model()
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda m, i, out: sizes.append(len(out)))
    row = collate(random_samples())
    policy = TokenLogprobs(model, 1.0, 5)
    logprobs, _ = policy(row.input_ids, row.position_ids, row.where, row.labels)
    logprobs.sum().backward()
    assert max(sizes) == 5 and len(row.labels) > 5
    assert len(sizes) == 2 * math.ceil(len(row.labels) / 5), "recomputed, not kept, for backward"


def plain_gradients(config: Config, samples: list[Sample], old: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the loss written out sample by sample, without packing, chunks or weights."""
    model = tiny_model()
    total = torch.zeros(())
    for sample, old_n in zip(samples, old, strict=True):
        ratio = torch.exp(plain_logprobs(model, sample, config.temperature) - old_n)
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        token = -torch.minimum(ratio * sample.advantage, clipped * sample.advantage)
        if config.length_norm == "constant":
            total = total + token.sum() / config.max_new_tokens / len(samples)
        elif config.length_norm == "sample":
            total = total + token.mean() / len(samples)
        else:
            total = total + token.sum() / sum(len(s.token_ids) for s in samples)
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), **grads}


def our_gradients(config: Config, samples: list[Sample], old: list[Tensor]) -> dict[str, Tensor]:
    """The same from train.backward."""
    model = tiny_model()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    policy = TokenLogprobs(model, config.temperature, config.logprob_chunk)
    accelerator = one_process()
    loss, _, _ = train.backward(policy, samples, old, config, accelerator)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": torch.tensor(loss), **grads}


def loss_config(**fields: Any) -> Config:
    plain = {"max_new_tokens": 40, "precision": "fp32", "model": "test", "target": "cpp"}
    return Config(**{**plain, **fields})


def old_logprobs(samples: list[Sample], spread: float = 0.3) -> list[Tensor]:
    """Stale log-probs, so that ratios lie on both sides of the clip."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        exact = [plain_logprobs(model, sample, 0.9) for sample in samples]
    return [part + spread * torch.randn(len(part), generator=generator) for part in exact]


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Loss within 1e-6; all gradients as one vector within 1e-6 of its length."""
    assert found.keys() == expected.keys()
    assert float(found["loss"]) == pytest.approx(float(expected["loss"]), abs=1e-6)
    names = sorted(found.keys() - {"loss"})
    ours = torch.cat([found[name].double().flatten() for name in names])
    theirs = torch.cat([expected[name].double().flatten() for name in names])
    relative = float((ours - theirs).norm() / theirs.norm())
    assert relative <= 1e-6, f"gradients differ by {relative:.1e} of their length"


@pytest.mark.parametrize("norm", ["constant", "sample", "token"])
def test_loss_and_gradients_do_not_depend_on_memory_settings(norm: str) -> None:
    """One row for all, one per sample, something between, chunks, recomputation: 1e-6 (fp32)."""
    samples = random_samples()
    old = old_logprobs(samples)
    expected = plain_gradients(loss_config(length_norm=norm), samples, old)
    assert abs(float(expected["loss"])) > 1e-4
    for budget, chunk, recompute in [(10000, 4096, False), (1, 3, True), (40, 7, True)]:
        config = loss_config(
            length_norm=norm,
            max_tokens_per_microbatch=budget,
            logprob_chunk=chunk,
            gradient_checkpointing=recompute,
        )
        assert_same_gradients(our_gradients(config, samples, old), expected)


def test_a_wrong_normaliser_would_be_noticed() -> None:
    """The check above can fail: per-row means instead of the whole batch's differ."""
    samples = random_samples()
    old = old_logprobs(samples)
    whole = our_gradients(loss_config(length_norm="token"), samples, old)
    halves = [
        our_gradients(loss_config(length_norm="token"), samples[part], old[part])
        for part in (slice(0, 2), slice(2, None))
    ]
    mixed = {name: (halves[0][name] + halves[1][name]) / 2 for name in whole}
    with pytest.raises(AssertionError):
        assert_same_gradients(mixed, whole)


def test_on_policy_ratio_is_one() -> None:
    """Log-probs of one packing against those of another, same weights: ratio 1 within 1e-5."""
    policy = TokenLogprobs(tiny_model(), 0.9, 16)
    samples = random_samples()
    accelerator = one_process()
    old, entropy = logprobs_of(policy, samples, 30, accelerator)
    assert [len(part) for part in old] == [len(sample.token_ids) for sample in samples]
    config = loss_config(max_tokens_per_microbatch=1000)
    _, ratio, clipped = train.backward(policy, samples, old, config, accelerator)
    assert ratio == pytest.approx(1.0, abs=1e-5)
    assert clipped == 0.0
    assert 0 < entropy < math.log(VOCABULARY)


def test_importance_cap_weighs_tokens_by_the_capped_ratio_to_the_engine() -> None:
    """Engine log-probs log 4 below the old ones: ratio 4, capped at 2: the gradient doubles."""
    samples = random_samples()
    old = old_logprobs(samples)
    moved = [
        dataclasses.replace(s, engine_logprobs=tuple((o - math.log(4.0)).tolist()))
        for s, o in zip(samples, old, strict=True)
    ]
    plain = our_gradients(loss_config(), samples, old)
    capped = our_gradients(loss_config(importance_cap=2.0), moved, old)
    assert_same_gradients(capped, {name: 2 * value for name, value in plain.items()})


def make_update(
    samples: list[Sample], config: Config, seed: int = 0
) -> tuple[train.UpdateStats, Tensor, Tensor]:
    """One gradient step of plain SGD with rate 1: stats, flat weights before and after."""
    policy = TokenLogprobs(tiny_model(seed), config.temperature, 64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    accelerator = one_process()
    before = nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
    old, _ = logprobs_of(policy, samples, 1000, accelerator)
    stats = train.update(policy, optimizer, samples, old, config, 1.0, accelerator)
    return stats, before, nn.utils.parameters_to_vector(policy.parameters()).detach()


def test_gradient_norm_is_clipped_and_logged_before_clipping() -> None:
    """A norm above 0.05 is reported whole; the step of SGD with rate 1 is 0.05 long."""
    stats, before, after = make_update(random_samples(), loss_config(length_norm="token"))
    assert stats.grad_norm > 0.1
    assert float((after - before).norm()) == pytest.approx(0.05, rel=1e-3)


def test_update_that_is_not_finite_is_skipped() -> None:
    samples = random_samples()
    samples[4] = dataclasses.replace(samples[4], advantage=math.inf)
    stats, before, after = make_update(samples, loss_config())
    assert stats.skipped
    assert torch.equal(before, after)


@pytest.mark.parametrize("sign", [1, -1])
def test_learning_follows_the_sign_of_the_advantage(sign: int) -> None:
    """A bandit: one prompt, one token, score 1 for an even token. 20 steps of real updates move the
    chance of an even token up; with the advantage's sign flipped, down."""
    model = tiny_model()
    policy = TokenLogprobs(model, 1.0, 64)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    accelerator = one_process()
    prompt = (5, 9, 11)
    generator = torch.Generator().manual_seed(0)

    def chances() -> Tensor:
        with torch.no_grad():
            return torch.softmax(model(torch.tensor([prompt]), use_cache=False).logits[0, -1], -1)

    def even() -> float:
        return float(chances()[0::2].sum())

    start = even()
    for step in range(1, 21):
        tokens = torch.multinomial(chances(), 32, replacement=True, generator=generator).tolist()
        scores = torch.tensor([float(t % 2 == 0) for t in tokens]).reshape(1, 32, 1)
        advantage = (sign * train.advantages(scores)).flatten().tolist()
        samples = [Sample(prompt, (t,), (0.0,), a) for t, a in zip(tokens, advantage, strict=True)]
        old, _ = logprobs_of(policy, samples, 1000, accelerator)
        for part in train.split_updates(32, loss_config(), step):
            chosen = [samples[i] for i in part], [old[i] for i in part]
            train.update(policy, optimizer, *chosen, loss_config(), 3e-3, accelerator)
    if sign > 0:
        assert even() > start + 0.15
    else:
        assert even() < start - 0.15


# ------------------------------------------------------------------------------------------------
# Processes
# ------------------------------------------------------------------------------------------------


def gradients_on_one_of_many(out: Path) -> None:
    """What each process of the next test runs: the same batch, shared out; the first one saves."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    samples = random_samples()
    old = old_logprobs(samples)
    config = loss_config(max_tokens_per_microbatch=40)  # rows that 2 does not divide
    policy = accelerator.prepare(TokenLogprobs(tiny_model(), 0.9, 7))
    found, entropy = logprobs_of(policy, samples, 40, accelerator)
    loss, ratio, clipped = train.backward(policy, samples, old, config, accelerator)
    model = accelerator.unwrap_model(policy).model
    if accelerator.is_main_process:
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        scalars = torch.tensor([loss, ratio, clipped, entropy], dtype=torch.float64)
        torch.save({"grads": grads, "scalars": scalars, "logprobs": torch.cat(found)}, out)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def test_two_processes_give_the_gradients_of_one(tmp_path: Path) -> None:
    """torchrun with two gloo processes: loss, gradients, log-probs of one process within 1e-6."""
    out = tmp_path / "out.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    subprocess.run([*command, "2", __file__, str(out)], check=True, timeout=240, cwd=HERE)
    found = torch.load(out)
    samples = random_samples()
    old = old_logprobs(samples)
    rows = pack([sample.length for sample in samples], 40)
    assert len(rows) % 2 == 1, "one process has a row that does not count"
    policy, accelerator = TokenLogprobs(tiny_model(), 0.9, 7), one_process()
    logprobs, entropy = logprobs_of(policy, samples, 40, accelerator)
    config = loss_config(max_tokens_per_microbatch=1000)
    loss, ratio, clipped = train.backward(policy, samples, old, config, accelerator)
    expected = torch.tensor([loss, ratio, clipped, entropy], dtype=torch.float64)
    torch.testing.assert_close(found["scalars"], expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found["logprobs"], torch.cat(logprobs), atol=1e-6, rtol=0)
    one = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    same = {"loss": torch.tensor(0.0)}
    assert_same_gradients({**found["grads"], **same}, {**one, **same})


# ------------------------------------------------------------------------------------------------
# From verdicts to samples and metrics
# ------------------------------------------------------------------------------------------------


def episode(task: str, trajectory: int, statuses: list[Status], speedup: float = 1.0) -> Episode:
    """An episode with given verdicts."""
    turns = []
    for number, status in enumerate(statuses):
        good = status == Status.CORRECT
        result = KernelResult(status=status, reason="r", speedup=speedup if good else 0.0)
        response = "Okay, x" if number == 0 else "x"
        ids, logprobs = (5, 6), (-1.0, -2.0)
        turns.append(
            Turn("p", response, "x", None, "s", result, "f", (3, 4), ids, logprobs, number == 1)
        )
    return Episode(Task(task, 0, "", "cpp"), tuple(turns), trajectory)


def test_harness_errors_are_dropped_and_counted_never_scored() -> None:
    """Trajectory 1 fails in our harness at turn 2: its turns 1 and 2 have no return and no sample,
    its turn 3 has both; means leave the failed turn out."""
    correct, wrong, ours = Status.CORRECT, Status.INCORRECT, Status.HARNESS_ERROR
    episodes = [episode("a", 0, [wrong, correct, wrong]), episode("a", 1, [correct, ours, correct])]
    config = loss_config(trajectories=2, turns=3)
    scores = train.score_grid(episodes, config)
    expected = torch.tensor([[[0.0, 1.3, 0.0], [1.3, NAN, 1.3]]], dtype=torch.float64)
    torch.testing.assert_close(scores, expected, equal_nan=True)
    advantage = train.advantages(train.discounted_returns(scores, 0.4))
    samples = train.samples_of(episodes, advantage)
    assert len(samples) == 4
    metrics = run_folder.rollout_metrics(episodes, scores)
    assert metrics["harness_errors"] == 1
    assert metrics["score"] == pytest.approx(3 * 1.3 / 5)
    assert metrics["correct"] == pytest.approx(3 / 5)
    assert metrics["score_best"] == pytest.approx(1.3)
    assert metrics["score_by_turn"] == pytest.approx([0.65, 1.3, 0.65])
    records = run_folder.rollout_records(1, episodes, scores, scores, advantage)
    assert [record["score"] for record in records] == [0.0, 1.3, 0.0, 1.3, None, 1.3]
    json.dumps(records, allow_nan=False)


def test_too_many_harness_errors_stop_the_run() -> None:
    bad = [episode("a", 0, [Status.HARNESS_ERROR, Status.CORRECT])]
    train.stop_on_harness_errors(bad, loss_config(max_harness_error_rate=0.5))
    with pytest.raises(train.RunStopped, match="failed on 1 of 2 samples"):
        train.stop_on_harness_errors(bad, loss_config(max_harness_error_rate=0.4))


def test_engine_gap_is_a_mean_over_tokens() -> None:
    """|0.1| + |0.3| + |0.2| over 3 tokens = 0.2."""
    ours = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    theirs = [torch.tensor([-1.1, -1.7]), torch.tensor([-3.2])]
    assert train.engine_gap(ours, theirs) == pytest.approx(0.2)
    assert train.engine_gap([], []) == 0.0


# ------------------------------------------------------------------------------------------------
# Settings and errors
# ------------------------------------------------------------------------------------------------

BAD_SETTINGS = [
    ("learning_rat = 1e-3\n", "unknown field learning_rat; did you mean learning_rate?"),
    ('steps = "ten"\n', "steps must be a whole number, not 'ten'"),
    ("steps = 1.5\n", "steps must be a whole number, not 1.5"),
    ("steps = true\n", "steps must be a whole number, not True"),
    ("gradient_checkpointing = 1\n", "gradient_checkpointing must be true or false, not 1"),
    ("model = 3\n", "model must be text, not 3"),
    ('target = "rocm"\n', 'target must be "cuda" or "cpp", not \'rocm\''),
    ("gamma = 1.5\n", "gamma must be between 0 and 1, not 1.5"),
    ("learning_rate = nan\n", "learning_rate must be between 0 and 10, not nan"),
    ("trajectories = 0\n", "trajectories must be at least 1, not 0"),
    ("[train]\nsteps = 3\n", "unknown field train; did you mean"),
    ("steps = \n", "is not valid TOML"),
    ('max_new_tokens_schedule = "soon"\n', 'must be "STEP:LIMIT,..."'),
    ("advantage_sign = 0\n", "advantage_sign must be 1 or -1"),
    ('advantage = "trloo"\ntrajectories = 1\n', "needs trajectories >= 2"),
]


def one_line_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Runs train.main: exit status 2 and exactly one line on stderr, which is returned."""
    assert train.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize(("text", "message"), BAD_SETTINGS)
def test_bad_settings_are_one_line_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    run = tmp_path / "run"
    assert message in one_line_error(capsys, ["--config", str(path), "--run-dir", str(run)])
    assert not run.exists(), "nothing is written for settings that cannot run"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nosuch.toml"], "no config file nosuch.toml"),
        ([], "Give --config FILE"),
        (["--config", "configs/smoke.toml", "--stepz", "3"], "unknown field stepz; did you mean s"),
        (["--config", "configs/smoke.toml", "--steps", "many"], "steps must be a whole number"),
        (["--config", "configs/smoke.toml", "--steps"], "expected one argument"),
        (["--config", "configs/smoke.toml", "word"], "unexpected argument 'word'"),
        (["--config", "configs/smoke.toml", "--trackers", "x"], "unknown tracker x"),
        (["--resume", "no/such/run"], "no/such/run is not a run folder"),
        (["--resume", "a", "--config", "b"], "drop --config"),
    ],
)
def test_bad_command_lines_are_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(HERE)
    assert message in one_line_error(capsys, words)


def test_a_failing_command_has_no_traceback(tmp_path: Path) -> None:
    """The real command, as typed."""
    command = [sys.executable, str(HERE / "train.py"), "--config", "nosuch.toml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "error: no config file nosuch.toml: give one of configs/*.toml\n"


def test_words_override_the_file_for_every_field(tmp_path: Path) -> None:
    """Both spellings, every field, through the command line's own parser."""
    path = tmp_path / "x.toml"
    path.write_text("steps = 3\ngamma = 1\n")
    assert load_config(path) == Config(steps=3, gamma=1.0)
    words = ["--config", str(path)]
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        value = field.default
        if isinstance(value, bool):
            value = not value
        if field.name == "learning_rate":
            value = 1e-3
        changed[field.name] = value
        spelling = field.name if len(field.name) % 2 else field.name.replace("_", "-")
        words += [f"--{spelling}", str(value).lower() if isinstance(value, bool) else str(value)]
    known, values = train_config.parse_arguments(words, "")
    assert load_config(known.config, values) == Config(**changed)


def test_every_numeric_field_has_a_range() -> None:
    numeric = {f for f, kind in train_config.FIELD_TYPES.items() if kind in (int, float)}
    assert numeric - train_config.ALLOWED_RANGE.keys() == {"seed", "advantage_sign"}
    assert train_config.ALLOWED_RANGE.keys() <= numeric


def test_all_configs_load_and_the_papers_is_the_default() -> None:
    found = {path.stem: load_config(path) for path in sorted((HERE / "configs").glob("*.toml"))}
    assert {"smoke", "mini", "kevin32b", "single_turn"} <= found.keys()
    records = {"tasks", "max_new_tokens_schedule", "eval_trajectories"}
    paper = dataclasses.asdict(found["kevin32b"])
    default = dataclasses.asdict(Config())
    assert {name for name in paper if paper[name] != default[name]} == records


def test_a_folder_that_holds_a_run_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["--config", str(HERE / "configs/smoke.toml"), "--run-dir", str(tmp_path)]
    assert "already holds a run" in one_line_error(capsys, words)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_assumption_and_deviation_ids_are_those_of_the_readme() -> None:
    """Ids marked in the code and ids in the README's table are the same set."""
    pattern = re.compile(r"# (?:ASSUMPTION|DEVIATION) ([AD]\d+):")
    code = {i for path in HERE.glob("*.py") for i in pattern.findall(path.read_text())}
    assert {"A10", "A11", "D05"} <= code
    readme = HERE / "README.md"
    listed = (
        set(re.findall(r"^\| *([AD]\d\d) *\|", readme.read_text(), re.M))
        if readme.exists()
        else set()
    )
    if not listed:
        pytest.skip("README.md has no table of assumptions and deviations yet")
    assert code == listed


# ------------------------------------------------------------------------------------------------
# Run folder
# ------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, keep: int = 2, size: int = 10) -> Path:
    def model(into: Path) -> None:
        torch.save(torch.zeros(size), into / "model.pt")

    state = {"step": step, "updates": 2 * step}
    return run_folder.save_checkpoint(folder, step, state, {"lr": torch.ones(2)}, model, keep)


def test_checkpoints_keep_the_last_k_and_latest_names_a_whole_one(tmp_path: Path) -> None:
    assert run_folder.latest_checkpoint(tmp_path) is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    latest = run_folder.latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == "step_00003"
    assert run_folder.read_state(latest) == {"step": 3, "updates": 6}
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00002", "step_00003"]


def test_save_again_after_a_kill_between_rename_and_latest(tmp_path: Path) -> None:
    """step_2 is there already, `latest` still says step_1: the second life saves step_2 again."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "latest").write_text("step_00001\n")
    (tmp_path / "checkpoints" / "step_00003.part").mkdir()
    save(tmp_path, 2)
    latest = run_folder.latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == "step_00002"
    assert not (tmp_path / "checkpoints" / "step_00003.part").exists()


def test_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    """A real failing write in the middle of a save (file size limit): OSError, nothing lost."""
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(OSError):
            save(tmp_path, 2, size=1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    latest = run_folder.latest_checkpoint(tmp_path)
    assert latest is not None and latest.name == "step_00001"
    assert sorted(p.name for p in latest.parent.iterdir()) == ["latest", "step_00001"]


def test_full_disk_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full is a disk without room: the log line cannot be written, the command says so."""
    log = tmp_path / "metrics.jsonl"
    log.symlink_to("/dev/full")

    def launch(_: Any) -> int:
        run_folder.append_lines(log, [{"step": 1}])
        return 0

    monkeypatch.setattr(train, "launch", launch)
    assert os.strerror(errno.ENOSPC) in one_line_error(capsys, [])


def test_logs_are_cut_back_to_a_step_and_lose_half_lines(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    run_folder.append_lines(log, [{"step": step, "x": 0.1} for step in (1, 2, 3)])
    with open(log, "a") as file:
        file.write('{"step": 2, "x')  # killed while writing
    run_folder.cut_log(log, 2)
    assert [row["step"] for row in run_folder.read_lines(log)] == [1, 2]
    run_folder.cut_log(tmp_path / "none.jsonl", 2)


# ------------------------------------------------------------------------------------------------
# The whole command, with the real sandbox and the real engine
# ------------------------------------------------------------------------------------------------

ADD_TASK = """import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return a + b

def get_inputs():
    return [torch.randn(64, 33), torch.randn(64, 33)]

def get_init_inputs():
    return []
"""


MEMORISE_STEPS = 80


@pytest.fixture(scope="module")
def kernel_writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tasks (a + b) and a tiny model that answers with the right kernel, one that
    subtracts, or one that does not compile, each about as often. Returns the config file."""
    import warmstart
    from kernel_sandbox import load_task
    from rollout import build_prompt, encode_prompt, feedback_text

    folder = tmp_path_factory.mktemp("writer")
    (folder / "tasks").mkdir()
    for name in ("plus", "sum", "more"):
        (folder / "tasks" / f"{name}.py").write_text(ADD_TASK)
    splits = 'train = ["plus", "sum"]\nheldout = ["more"]\n'
    (folder / "tasks" / "splits.toml").write_text(splits)
    right = (HERE / "prompts" / "example_cpp.py").read_text()
    kernels = [right, right.replace("] + pb", "] - pb"), right.replace("return out;", "return;")]
    assert len(set(kernels)) == 3
    ways = [f"Okay, one.\n</think>\n```python\n{code}```\nAdded.\n" for code in kernels]
    task = load_task(folder / "tasks" / "plus.py", "cpp")
    done = [KernelResult(Status.CORRECT, speedup=1.0), KernelResult(Status.INCORRECT, "it differs")]
    earlier = [PastTurn(right, "Added.", feedback_text(result)) for result in done]
    prompts = [build_prompt(task, past, len, 10**9) for past in ([], earlier[:1], earlier[1:])]
    settings = warmstart.Settings(hidden=64, layers=2, heads=2, inner=128, context=4096, merges=20)
    tokenizer = warmstart.build_tokenizer([*prompts, *ways] * 3, settings)
    rows = []
    for prompt, way in itertools.product(prompts, ways):
        answer = [*tokenizer(way, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        rows.append((encode_prompt(tokenizer, prompt), answer))
    model = warmstart.new_model(len(tokenizer), settings, tokenizer, 0)
    memorise(model, rows)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    config = folder / "config.toml"
    config.write_text(
        f'''
        target = "cpp"
        tasks = "{folder / "tasks"}"
        model = "{folder / "model"}"
        precision = "fp32"
        steps = 4
        tasks_per_step = 2
        trajectories = 3
        turns = 2
        max_new_tokens = 80
        prompt_budget = 1500
        learning_rate = 1e-4
        max_tokens_per_microbatch = 2048
        fixed_speedup = 1.0
        reuse_verdicts = true
        save_every = 2
        eval_trajectories = 2
        eval_turns = 2
        '''
    )
    return config


@dataclasses.dataclass(frozen=True)
class PastTurn:
    """What a later prompt needs of an earlier turn."""

    code: str | None
    summary: str
    feedback: str


def memorise(model: Any, rows: list[tuple[list[int], list[int]]]) -> None:
    """Supervised training on a few (prompt, answer) pairs until they are nearly known by heart.

    Padded on the right without a mask: no token of a causal model sees the padding.
    """
    width = max(len(ids) + len(answer) for ids, answer in rows)
    every, labels = torch.zeros(len(rows), width).long(), torch.full((len(rows), width), -100)
    for row, (ids, answer) in enumerate(rows):
        every[row, : len(ids) + len(answer)] = torch.tensor(ids + answer)
        labels[row, len(ids) : len(ids) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(MEMORISE_STEPS):
        optimizer.zero_grad()
        model(input_ids=every, labels=labels, use_cache=False).loss.backward()
        optimizer.step()


def train_command(*words: str | Path) -> list[str]:
    return [sys.executable, str(HERE / "train.py"), *map(str, words)]


def without_times(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl, seconds left out."""
    rows = run_folder.read_lines(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]


def trained_text(run: Path) -> list[tuple[Any, ...]]:
    """What rollouts.jsonl says of every turn, times and cache left out."""
    text = ("step", "task", "trajectory", "turn", "prompt", "token_ids", "logprobs", "feedback")
    keys = (*text, "score", "return", "advantage")
    return [
        tuple(row[key] for key in keys) for row in run_folder.read_lines(run / "rollouts.jsonl")
    ]


@pytest.fixture(scope="module")
def whole_run(kernel_writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    words = train_command("--config", kernel_writer, "--run-dir", run)
    done = subprocess.run(words, capture_output=True, text=True, timeout=250, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert f"run folder: {run}" in done.stdout
    return run


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_promises(whole_run: Path) -> None:
    """Real verdicts of several kinds, exactly the documented keys, credit that adds up."""
    rows = run_folder.read_lines(whole_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row.keys() == run_folder.METRIC_KEYS.keys() for row in rows)
    kinds = {kind for row in rows for kind in row["statuses"]}
    assert {"CORRECT", "INCORRECT", "COMPILE_ERROR"} <= kinds
    assert all(row["engine_gap"] < 1e-4 and row["skipped_updates"] == 0 for row in rows)
    assert rows[-1]["updates"] == 8
    records = run_folder.read_lines(whole_run / "rollouts.jsonl")
    assert len(records) == 4 * 2 * 3 * 2
    for first, second in zip(records[0::2], records[1::2], strict=True):
        assert (first["turn"], second["turn"]) == (0, 1)
        assert first["return"] == pytest.approx(first["score"] + 0.4 * second["score"])
        assert second["return"] == second["score"]
    resolved = json.loads((whole_run / "config.json").read_text())
    assert resolved["config"]["gamma"] == 0.4 and "torch" in resolved["versions"]
    latest = run_folder.latest_checkpoint(whole_run)
    assert latest is not None and latest.name == "step_00004"


@pytest.mark.slow
def test_a_run_ends_with_the_held_out_comparison(whole_run: Path) -> None:
    """Before and after on the held-out task: table, results, and the turns behind them."""
    table = (whole_run / "table.txt").read_text()
    assert "held-out best-of-2-turns score" in table
    results = json.loads((whole_run / "results.json").read_text())
    assert results["comparison"]["turns"] == 2
    for moment in ("before", "after"):
        turns = run_folder.read_lines(whole_run / f"eval_{moment}" / "turns.jsonl")
        assert [row["task"] for row in turns] == ["more"] * 4


@pytest.mark.slow
def test_killed_at_a_random_moment_and_resumed_is_the_uninterrupted_run(
    kernel_writer: Path, whole_run: Path, tmp_path: Path
) -> None:
    """SIGKILL somewhere after the first step; --resume; same metrics, rollouts and weights."""
    run = tmp_path / "run"
    words = train_command("--config", kernel_writer, "--run-dir", run)
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD
    )
    log = run / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (log.exists() and log.read_text()) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    delay = int.from_bytes(os.urandom(2)) / 65536 * 4.0
    print(f"killed {delay:.2f} s after the first step")
    time.sleep(delay)
    process.kill()
    process.wait()
    first_evaluation, resumed = run / "eval_before" / "finished", time.time()
    done = subprocess.run(
        train_command("--resume", run),
        capture_output=True,
        text=True,
        timeout=250,
        env=ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    assert first_evaluation.stat().st_mtime < resumed, "the evaluation before is not repeated"
    assert without_times(run) == without_times(whole_run)
    assert trained_text(run) == trained_text(whole_run)
    final = ("checkpoints", "step_00004", "model.safetensors")
    assert run.joinpath(*final).read_bytes() == whole_run.joinpath(*final).read_bytes()


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume(kernel_writer: Path, tmp_path: Path) -> None:
    """SIGINT after the first step: status 130, the command to continue, logs that can be cut."""
    run = tmp_path / "run"
    words = train_command("--config", kernel_writer, "--run-dir", run, "--steps", "1000")
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"python train.py --resume {run}" in out
    assert "Traceback" not in err
    checkpoint = run_folder.latest_checkpoint(run)
    saved = run_folder.read_state(checkpoint)["step"] if checkpoint else 0
    assert f"{saved} of 1000 steps are saved" in out


@pytest.mark.slow
def test_flaws_of_tasks_are_one_line_and_exit_status_2(
    kernel_writer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task file that does not parse; fewer tasks than a step takes; a model that is not there."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.py").write_text("class Model(:\n")
    cases = [
        (["--tasks", str(tmp_path / "bad")], "x.py"),
        (["--tasks_per_step", "3"], "has only 2 training tasks"),
        (["--model", str(tmp_path / "nothing")], "cannot load model"),
    ]
    for number, (words, message) in enumerate(cases):
        run = str(tmp_path / f"run{number}")
        base = ["--config", str(kernel_writer), "--run-dir", run]
        assert train.main([*base, *words]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1 and message in errors[0], errors


if __name__ == "__main__":
    gradients_on_one_of_many(Path(sys.argv[1]))
