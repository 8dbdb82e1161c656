"""The metrics against numbers worked out by hand and brute force, the intervals against simulation,
the command line against its promises."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import evaluate as ev
import kernel_sandbox
import metrics
import report
import rollout
from kernel_sandbox import UserError


def evaluation(correct, speedup=None, harness=None, **meta):
    """Evaluation from nested lists [P][G][K]; speedup defaults to 1 where correct."""
    correct = np.array(correct, dtype=bool)
    speedup = np.where(correct, 1.0 if speedup is None else np.array(speedup, dtype=float), 0.0)
    harness = np.zeros_like(correct) if harness is None else np.array(harness, dtype=bool)
    status = np.where(harness, "HARNESS_ERROR", np.where(correct, "CORRECT", "INCORRECT"))
    names = tuple(f"task{i}" for i in range(len(correct)))
    return metrics.Evaluation(names, correct & ~harness, speedup, harness, meta, status)


def simulated(rng, tasks, trajectories, turns, *, skill=0.0, hardness=None):
    """A made-up benchmark whose tasks differ in difficulty (logit), as real ones do."""
    hardness = rng.normal(-0.5, 1.5, size=tasks) if hardness is None else hardness
    solve = 1 / (1 + np.exp(-(hardness + skill)))
    shape = (tasks, trajectories, turns)
    correct = rng.random(shape) < solve[:, None, None]
    speedup = np.where(correct, np.exp(rng.normal(-0.2, 0.4, size=shape)), 0.0)
    names = tuple(f"task{i}" for i in range(tasks))
    return metrics.Evaluation(names, correct, speedup, np.zeros(shape, dtype=bool))


# ------------------------------------------------------------------------------- metrics


def test_score_is_the_training_score_of_section_3_2():
    correct, speedup = np.array([True, True, False]), np.array([2.0, 0.5, 0.0])
    assert metrics.score_values(correct, speedup).tolist() == pytest.approx([2.3, 0.8, 0.0])
    pairs = zip(correct.tolist(), speedup.tolist(), strict=True)
    scalar = [kernel_sandbox.score(*pair) for pair in pairs]
    assert metrics.score_values(correct, speedup).tolist() == pytest.approx(scalar)


def test_fast_p_counts_a_speedup_of_exactly_p_and_never_a_wrong_kernel():
    correct, speedup = np.array([True, True, False]), np.array([1.0, 0.999, 5.0])
    assert metrics.fast_values(1.0)(correct, speedup).tolist() == [1.0, 0.0, 0.0]
    assert metrics.fast_values(0.0)(correct, speedup).tolist() == [1.0, 1.0, 0.0]


def test_trajectory_after_k_turns_is_worth_its_best_kernel_so_far():
    one = evaluation([[[0, 1, 1, 0]]], [[[0, 0.5, 2.0, 0]]])
    values = {name: metrics.trajectory_values(one, name)[0, 0].tolist() for name in metrics.METRICS}
    assert values["correct"] == [0, 1, 1, 1]
    assert values["speedup"] == [0, 0.5, 2.0, 2.0]
    assert values["fast_1"] == [0, 0, 1, 1]
    assert values["fast_1.5"] == [0, 0, 1, 1]
    assert values["score"] == pytest.approx([0, 0.8, 2.3, 2.3])
    assert metrics.scores_at_turn(one) == pytest.approx([0, 0.8, 2.3, 0])


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_best_at_m_equals_the_mean_maximum_over_all_subsets(n):
    values = np.random.default_rng(n).normal(size=n).round(1)  # rounding makes ties
    for m in range(1, n + 1):
        subsets = [max(subset) for subset in itertools.combinations(values, m)]
        assert metrics.best_at_m(values, m) == pytest.approx(np.mean(subsets))


def test_best_at_m_of_zeros_and_ones_is_pass_at_k():
    solved, n = 3, 10
    values = np.array([1.0] * solved + [0.0] * (n - solved))
    for k in range(1, n + 1):
        chen = 1 - math.comb(n - solved, k) / math.comb(n, k)
        assert metrics.best_at_m(values, k) == pytest.approx(chen)


def test_best_at_one_is_the_average_and_best_at_all_the_maximum():
    values = np.random.default_rng(0).random((4, 6))
    assert metrics.best_at_m(values, 1) == pytest.approx(metrics.avg_at_m(values))
    assert metrics.best_at_m(values, 6) == pytest.approx(values.max(axis=1))
    with pytest.raises(ValueError, match="best@7"):
        metrics.best_at_m(values, 7)


def test_unsolved_tasks_count_zero_in_the_mean():
    two = evaluation([[[1], [1]], [[0], [0]]], [[[3], [1]], [[0], [0]]])
    by_turn = metrics.metrics_by_turn(two, draws=50)
    assert by_turn["speedup"]["avg"][0].value == pytest.approx((2 + 0) / 2)
    assert by_turn["speedup"]["best"][0].value == pytest.approx((3 + 0) / 2)
    assert by_turn["correct"]["avg"][0].value == pytest.approx(0.5)
    assert ev.task_rows(two)[0] == {"task": "task0", "best": 3, "correct": 1, "speedup": 2,
                                    "score": pytest.approx(2.3)}


def test_best_by_m_starts_at_avg_and_ends_at_best():
    some = simulated(np.random.default_rng(3), 5, 4, 2)
    curve = metrics.best_by_m(some, "score", draws=20)
    by_turn = metrics.metrics_by_turn(some, draws=20)["score"]
    assert curve[0].value == pytest.approx(by_turn["avg"][-1].value)
    assert curve[-1].value == pytest.approx(by_turn["best"][-1].value)
    assert all(a.value <= b.value for a, b in itertools.pairwise(curve))


def test_fast_p_curve_starts_at_correctness_and_falls():
    some = simulated(np.random.default_rng(4), 5, 4, 2)
    curve = [x.value for x in metrics.fast_p_curve(some, [0, 0.5, 1, 2], None, draws=20)]
    correct = metrics.metrics_by_turn(some, draws=20)["correct"]["avg"][-1]
    assert curve[0] == pytest.approx(correct.value)
    assert curve == sorted(curve, reverse=True)


# -------------------------------------------------------------------------- harness errors


def test_harness_errors_are_left_out_and_counted_never_scored_zero():
    # Trajectory 0: harness error, then correct. Trajectory 1: nothing but harness errors.
    # Trajectory 2: wrong, then harness error.
    one = evaluation(
        [[[0, 1], [0, 0], [0, 0]]], [[[0, 2], [0, 0], [0, 0]]], [[[1, 0], [1, 1], [0, 1]]]
    )
    values = metrics.trajectory_values(one, "speedup")[0]
    assert values[0, 1] == 2 and values[2].tolist() == [0, 0]
    assert np.isnan(values[0, 0]) and np.isnan(values[1]).all()
    after = metrics.metrics_by_turn(one, draws=20)["speedup"]
    assert [x.value for x in after["avg"]] == pytest.approx([0, 1])  # (2 + 0) / 2 after two turns
    assert after["best"][1].value == 2
    assert metrics.scores_at_turn(one) == pytest.approx([0, 2.3])
    counted = metrics.counts(one)
    assert counted["harness_errors"] == 4 and counted["kernels"] == 6
    assert counted["dropped_trajectories"] == 1 and counted["dropped_tasks"] == 0
    assert "4 of 6 kernels not judged" in ev.table(one, draws=20)


def test_a_task_of_harness_errors_only_leaves_the_means_alone():
    lost = evaluation([[[1]], [[0]]], harness=[[[0]], [[1]]])
    assert metrics.metrics_by_turn(lost, draws=20)["correct"]["avg"][0].value == 1
    assert metrics.counts(lost)["dropped_tasks"] == 1
    nothing = evaluation([[[0]]], harness=[[[1]]])
    assert math.isnan(metrics.metrics_by_turn(nothing, draws=20)["score"]["avg"][0].value)
    text = json.dumps(ev.results(nothing, nothing, draws=20), allow_nan=False)
    assert json.loads(text)["by_turn"]["score"]["avg"] == [[None, None, None]]


# -------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("m, least", [(None, 0.90), (8, 0.88)])
def test_intervals_cover_the_truth_of_simulated_benchmarks(m, least):
    """95 % nominal; 200 simulated benchmarks of 20 tasks, so a share of 0.90 is 3 sd below."""
    rng = np.random.default_rng(11)

    def draw(tasks):
        return metrics.trajectory_values(simulated(rng, tasks, 8, 1), "score")[:, :, 0]

    truth = metrics.mean_over_tasks(metrics.estimator(m)(draw(200_000)))
    inside = []
    for number in range(200):
        found = metrics.estimate_interval(draw(20), m, draws=400, seed=number)
        inside.append(found.low <= truth <= found.high)
    assert least <= np.mean(inside) <= 0.995


def test_paired_difference_is_narrower_than_an_unpaired_one():
    rng = np.random.default_rng(5)
    hardness = rng.normal(-0.5, 2.0, size=12)
    sides = [simulated(rng, 12, 16, 1, skill=skill, hardness=hardness) for skill in (0.0, 0.8)]
    before, after = (metrics.trajectory_values(side, "score")[:, :, 0] for side in sides)
    paired = metrics.difference_interval(before, after, None)
    draws = [metrics.bootstrap(v, metrics.avg_at_m, seed=i) for i, v in enumerate((after, before))]
    apart = draws[0] - draws[1]
    low, high = np.percentile(apart, [2.5, 97.5])
    assert paired.value == pytest.approx(after.mean() - before.mean())
    assert paired.high - paired.low < 0.8 * (high - low)


def test_intervals_are_reproducible_and_hold_the_estimate():
    some = simulated(np.random.default_rng(6), 6, 4, 3)
    first, second = (metrics.metrics_by_turn(some, draws=200, seed=3) for _ in range(2))
    assert first == second
    for kinds in first.values():
        for row in (*kinds["avg"], *kinds["best"]):
            assert row.low <= row.value <= row.high


def test_chunks_do_not_change_the_bootstrap(monkeypatch):
    values = np.random.default_rng(7).random((5, 4))
    whole = metrics.bootstrap(values, metrics.avg_at_m, draws=100)
    monkeypatch.setattr(metrics, "CHUNK_CELLS", 20)
    assert metrics.bootstrap(values, metrics.avg_at_m, draws=100) == pytest.approx(whole)


# -------------------------------------------------------------------------------- comparison


def test_comparison_line_by_hand():
    before = evaluation([[[0, 1]], [[0, 0]]], [[[0, 0.7]], [[0, 0]]], split="heldout")
    after = evaluation([[[1, 1]], [[1, 0]]], [[[1.2, 1.7]], [[0.7, 0]]], split="heldout")
    found = ev.compare(before, after)
    assert found.before.value == pytest.approx(0.5)  # (1.0 + 0) / 2
    assert found.after.value == pytest.approx(1.5)  # (2.0 + 1.0) / 2
    assert found.ratio == pytest.approx(3) and found.difference.value == pytest.approx(1)
    assert str(found) == (
        "held-out best-of-2-turns score: 0.50 -> 1.50 (x3.00, difference +1.00, "
        "95 % interval +1.00 .. +1.00)"
    )
    assert found.improved


def test_no_change_is_not_called_an_improvement():
    rng = np.random.default_rng(8)
    hardness = rng.normal(size=10)
    sides = [simulated(rng, 10, 8, 2, hardness=hardness) for _ in range(2)]
    assert not ev.compare(*sides).improved and not ev.compare(*reversed(sides)).improved


def test_comparison_pairs_tasks_by_name_and_uses_common_turns():
    before = evaluation([[[1, 0]], [[0, 0]]], [[[1.0, 0]], [[0, 0]]])
    after = metrics.Evaluation(
        ("task1", "task0"), np.array([[[True]], [[True]]]), np.array([[[2.0]], [[1.0]]]),
        np.zeros((2, 1, 1), dtype=bool),
    )  # fmt: skip
    found = ev.compare(before, after)
    assert found.turns == 1 and found.difference.value == pytest.approx((0 + 2.3) / 2)
    arrays = (after.correct[:1], after.speedup[:1], after.harness[:1])
    stranger = metrics.Evaluation(("other",), *arrays)
    with pytest.raises(UserError, match="no task in common"):
        ev.compare(before, stranger)


def test_evaluation_rejects_arrays_that_do_not_fit():
    good = np.zeros((1, 2, 3), dtype=bool)
    with pytest.raises(ValueError, match="alike"):
        metrics.Evaluation(("a",), good, np.zeros((1, 2, 2)), good)
    with pytest.raises(ValueError, match="finite"):
        metrics.Evaluation(("a",), good, np.full((1, 2, 3), np.nan), good)


# -------------------------------------------------------------------------- tables and page


def test_tables_fit_in_100_columns_and_show_each_turn():
    some = simulated(np.random.default_rng(9), 4, 16, 8)
    text = ev.table(some, draws=50)
    assert max(len(line) for line in text.splitlines()) <= 100
    numbered = [line[0] for line in text.splitlines() if line[:1].isdigit()]
    assert numbered == list("12345678") * 2
    first = metrics.metrics_by_turn(some, draws=50)["correct"]["avg"][0]
    assert str(first) in text
    both = ev.compare_table(some, some, draws=50)
    assert max(len(line) for line in both.splitlines()) <= 100
    assert metrics.digits(12.345) == "12.3" and metrics.digits(123.45, "+") == "+123"
    assert both.splitlines()[-1] == str(ev.compare(some, some, draws=50))


def test_report_is_one_file_with_every_table_and_figure(tmp_path):
    rng = np.random.default_rng(10)
    before, after = simulated(rng, 3, 4, 2), simulated(rng, 3, 4, 2, skill=1)
    before = metrics.Evaluation(before.tasks, before.correct, before.speedup, before.harness,
                           {"model": "<b>before</b>"})  # fmt: skip
    found = ev.results(after, before, draws=50)
    found["meta"]["model"] = "after"
    (tmp_path / "results.json").write_text(json.dumps(found, allow_nan=False))
    assert report.main([str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert found["comparison"]["text"].replace(">", "&gt;") in page
    assert "<b>before" not in page and "&lt;b&gt;before" in page
    assert page.count("<figure>") == 6 == len(list((tmp_path / "figures").glob("*.png")))
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert all(task in page for task in after.tasks)
    assert report.main([str(tmp_path / "nosuch")]) == 2


# ------------------------------------------------------------------------------ command line


def hf_folder(path):
    """The least that is a model folder to the command line."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def run_of_train(path, **fields):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"config": fields, "git_commit": ""}))
    return path


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "--model"),
        (["--modle", "x"], "--modle"),
        (["--model", "warmstart", "--search", "beam"], "beam"),
        (["--model", "warmstart", "--turns", "many"], "many"),
        (["--model", "./nosuch"], "no model ./nosuch: give a run folder, a model folder"),
        (["--model", "warmstart", "--config", "nosuch.toml"], "nosuch.toml"),
        (["--model", "warmstart", "--trajectories", "0"], "--trajectories must be 1 or more"),
        (["--model", "warmstart", "--turns", "0"], "eval_turns"),
        (["--model", "{tmp}/empty"], "neither a run folder nor a model folder"),
        (["--model", "{tmp}/young"], "has no checkpoint yet"),
        (["--model", "{tmp}/odd"], "unknown field colour"),
    ],
)
def test_user_errors_are_one_line_and_status_2(words, said, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    run_of_train(tmp_path / "young", target="cpp")
    run_of_train(tmp_path / "odd", colour="red")
    assert ev.main([word.format(tmp=tmp_path) for word in words]) == 2
    caught = capsys.readouterr()
    assert caught.err.count("\n") == 1 and caught.err.startswith("error: ")
    assert said in caught.err and not caught.out


def test_help_ends_with_status_0(capsys):
    with pytest.raises(SystemExit) as stop:
        ev.main(["--help"])
    assert stop.value.code == 0 and "--baseline" in capsys.readouterr().out


def test_settings_come_from_the_run_and_the_command_line_wins(tmp_path):
    run = run_of_train(tmp_path / "run", target="cpp", eval_trajectories=3, eval_turns=2, seed=5)
    options = ev.parse_options(["--model", str(run), "--turns", "4", "--temperature", "0.5"])
    config = ev.settings_of(options)
    assert (config.target, config.eval_trajectories, config.seed) == ("cpp", 3, 5)
    assert (config.eval_turns, config.temperature) == (4, 0.5)
    paper = ev.settings_of(ev.parse_options(["--model", "Qwen/QwQ-32B"]))
    assert (paper.eval_trajectories, paper.eval_turns, paper.temperature) == (16, 8, 0.9)


def test_model_names_lead_to_weights(tmp_path):
    assert ev.model_source("Qwen/QwQ-32B", "cuda") == "Qwen/QwQ-32B"
    folder = hf_folder(tmp_path / "model")
    assert ev.model_source(str(folder), "cpp") == folder


# -------------------------------------------------- the real rollout and the real sandbox

KERNEL = '''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
#include <torch/extension.h>
#include <cmath>

torch::Tensor run(torch::Tensor x) {
    torch::Tensor out = torch::empty_like(x);
    const float* in = x.data_ptr<float>();
    float* to = out.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = FORMULA;
    return out;
}
"""
kernels = load_inline(name="k", cpp_sources=source, functions=["run"])


class ModelNew(nn.Module):
    def forward(self, x):
        return kernels.run(x)
'''
TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return SCALE * torch.tanh(x)


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""


def answer(formula):
    code = KERNEL.replace("FORMULA", formula)
    return f"Okay, a loop.</think>\n```python\n{code}\n```\nA plain loop."


class Script:
    """Stands where a language model would: what it says at each turn is written down."""

    context = 100_000

    def __init__(self, *turns, fails_at=None):
        self.turns, self.calls, self.fails_at = turns, 0, fails_at

    def generate(self, prompts, *, seed, max_new_tokens, temperature, on_finish):
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        text = self.turns[self.calls % len(self.turns)]
        self.calls += 1
        out = [rollout.Generation((1,), (0.0,), text, "stop") for _ in prompts]
        for index, generation in enumerate(out):
            on_finish(index, generation)
        return out


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """Two tasks, the same but for a factor."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "single.py").write_text(TASK.replace("SCALE", "1.0"))
    (folder / "double.py").write_text(TASK.replace("SCALE", "2.0"))
    (folder / "splits.toml").write_text('train = []\nheldout = ["single", "double"]\n')
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, and a chat template that adds nothing but a line end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}\n"
    return fast


def test_scripted_answers_give_the_metrics_worked_out_by_hand(
    task_folder, tokenizer, tmp_path, monkeypatch
):
    """Turn 1 junk, turn 2 right for task single, turn 3 right for task double, speed fixed at 2."""
    turns = ["no code", answer("std::tanh(in[i])"), answer("2.0f * std::tanh(in[i])")]
    tasks = rollout.load_tasks(str(task_folder), "cpp", split="heldout")
    monkeypatch.setattr(ev, "SAMPLES_AT_ONCE", 2)  # one task at a time
    options: dict[str, Any] = dict(trajectories=2, turns=3, seed=0, temperature=0.9)
    options |= dict(max_new_tokens=100, prompt_budget=50_000, progress=False, folder=tmp_path)
    with kernel_sandbox.Sandbox("cpp", fixed_speedup=2.0, reuse_verdicts=True) as sandbox:
        stopped = Script(*turns, fails_at=4)  # in the middle of the second task
        with pytest.raises(KeyboardInterrupt):
            ev.evaluate_policy(stopped, tokenizer, tasks, sandbox, **options)
        with open(tmp_path / "turns.jsonl", "a") as file:
            file.write('{"task": "double", "traj')  # what a kill leaves
        resumed = Script(*turns)
        found = ev.evaluate_policy(resumed, tokenizer, tasks, sandbox, **options)
        assert resumed.calls == 3  # the first task was read back
        with pytest.raises(UserError, match="other settings .temperature."):
            ev.evaluate_policy(resumed, tokenizer, tasks, sandbox, **options | {"temperature": 1.0})
    assert found.tasks == ("single", "double") and found.correct.shape == (2, 2, 3)
    assert found.status is not None and found.status[:, 0].tolist() == [
        ["FORMAT_ERROR", "CORRECT", "INCORRECT"],
        ["FORMAT_ERROR", "INCORRECT", "CORRECT"],
    ]
    by_turn = metrics.metrics_by_turn(found, draws=50)
    assert [x.value for x in by_turn["correct"]["avg"]] == [0, 0.5, 1]
    assert [x.value for x in by_turn["speedup"]["best"]] == [0, 1, 2]
    assert [x.value for x in by_turn["score"]["avg"]] == pytest.approx([0, 1.15, 2.3])
    rows = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    assert len(rows) == 12 and rows[1]["summary"] == "A plain loop."
    assert "no code" not in rows[2]["prompt"] and rows[1]["feedback"] in rows[2]["prompt"]


def test_command_line_from_a_model_folder_to_the_report(
    task_folder, tokenizer, tmp_path, capsys, monkeypatch
):
    """A Llama with random weights writes junk; the harness must make a full report of it."""
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16384,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = f"--model {tmp_path}/model --tasks {task_folder} --target cpp --trajectories 2"
    words += f" --turns 2 --max-new-tokens 4 --prompt-budget 16000 --out {tmp_path}/out"
    assert ev.main(words.split()) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "out"
    assert (out / "table.txt").read_text().strip() in printed
    found = json.loads((out / "results.json").read_text())
    assert found["counts"]["kernels"] == 8 and found["status_at_turn"] == {"FORMAT_ERROR": [1, 1]}
    assert found["by_turn"]["score"]["avg"] == [[0, 0, 0]] * 2
    assert found["meta"]["versions"]["torch"] and "--turns 2" in found["meta"]["command"]
    assert (out / "report.html").exists() and (out / "figures" / "fast_p.svg").exists()
    before = (out / "turns.jsonl").read_text()
    monkeypatch.setattr(rollout, "rollout", None)  # a second call has nothing left to run
    assert ev.main(words.split()) == 0 and (out / "turns.jsonl").read_text() == before
