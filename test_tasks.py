"""The task files: they load, follow the grammar and the split rule, and no lazy answer comes near.

The audit measures a relative error: RMS of the difference over RMS of the reference, in float64.
An honest fp32 kernel is within 2e-5 of the float64 result on every task; each lazy answer (zeros,
best constant, copy of an input, half the work, stale memory, bf16 rounding) must be at least 20
times further away than that.
"""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernel_sandbox import load_task
from tasks import generate
from tasks.generate import OPS, Spec, name, problem, random_spec, read_spec, source

FOLDER = Path(__file__).resolve().parent / "tasks"
FILES = sorted(path for path in FOLDER.glob("*.py") if generate.is_task_file(path))
SPLITS = tomllib.loads((FOLDER / "splits.toml").read_text())
NAMES = [path.stem for path in FILES]
HONEST = 2e-5  # an fp32 result is this close to the float64 one
LAZY = 20 * HONEST  # and a lazy one at least this far

by_file = pytest.mark.parametrize("file", FILES, ids=NAMES)


@cache
def spec_of(task: str) -> Spec | None:
    return read_spec((FOLDER / f"{task}.py").read_text())


# ---------------------------------------------------------------------------------- grammar, split


def test_the_folder_holds_what_the_grammar_writes(tmp_path: Path) -> None:
    assert generate.main(tmp_path) == 0
    for written in tmp_path.iterdir():
        assert (FOLDER / written.name).read_text() == written.read_text(), written.name
    by_hand = {path.name for path in FILES} - {path.name for path in tmp_path.iterdir()}
    assert by_hand == {f"{task}.py" for task in generate.EXTRA}


def test_split_covers_every_file_once() -> None:
    listed = [*SPLITS["train"], *SPLITS["heldout"], *SPLITS["extra"]]
    assert sorted(listed) == NAMES and len(set(listed)) == len(listed)
    assert len(SPLITS["train"]) >= 18 and len(SPLITS["heldout"]) >= 10


def test_split_rule() -> None:
    """Held-out: new compositions of cores and operations of training; all families in both."""
    train = [spec_of(task) for task in SPLITS["train"]]
    heldout = [spec_of(task) for task in SPLITS["heldout"]]
    assert None not in train and None not in heldout
    assert not set(train) & set(heldout)
    assert set(train) == set(generate.TRAIN) and set(heldout) == set(generate.HELDOUT)
    for what in (_families, _cores, _ops):
        assert set(what(heldout)) <= set(what(train))
    assert set(_families(heldout)) == set(generate.FAMILIES)


def _families(specs: list[Any]) -> Iterator[str]:
    return (spec.family for spec in specs)


def _cores(specs: list[Any]) -> Iterator[str]:
    return (spec.core for spec in specs)


def _ops(specs: list[Any]) -> Iterator[str]:
    return itertools.chain.from_iterable((*spec.pre, *spec.post) for spec in specs)


def test_random_specs_are_never_held_out() -> None:
    rng = random.Random(3)
    drawn = [random_spec(rng, exclude=generate.HELDOUT) for _ in range(600)]
    assert not set(drawn) & set(generate.HELDOUT)
    assert set(_families(drawn)) == set(generate.FAMILIES)
    assert set(_cores(drawn)) == set(generate.CORES)
    assert set(_ops(drawn)) == set(OPS)
    again = random.Random(3)
    assert drawn[:50] == [random_spec(again, exclude=generate.HELDOUT) for _ in range(50)]


def test_specs_survive_the_round_trip_for_both_targets(tmp_path: Path) -> None:
    rng = random.Random(5)
    specs = {*generate.TRAIN, *generate.HELDOUT, *(random_spec(rng) for _ in range(300))}
    for spec in specs:
        assert read_spec(source(spec)) == spec
    for spec in list(specs)[:60]:
        path = tmp_path / f"{name(spec)}.py"
        path.write_text(source(spec))
        for target in ("cuda", "cpp"):
            assert read_spec(load_task(path, target).source) == spec


def test_names_are_unique() -> None:
    rng = random.Random(9)
    specs = {*generate.TRAIN, *generate.HELDOUT, *(random_spec(rng) for _ in range(300))}
    specs |= set(itertools.islice(generate.all_specs(max_pre=0), 100))
    assert len({name(spec) for spec in specs}) == len(specs) > 300


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.relu(x)", "torch.relu(y)"),
        ("dim=1", "dim=0"),
        ("1e-5", "1e-6"),
        ("return x", "return x, x"),
        ("return x", "x = x + 1\n        return x"),
        ("0.3 * torch.randn", "0.0 * torch.randn"),
        ("def forward(self, x)", "def forward(self, x, y)"),
        ("class Model(", "class Other("),
        ("return [COLS]", "return [2 * COLS]"),
        ("return x", "return ("),
    ],
)
def test_read_spec_accepts_only_what_source_writes(old: str, new: str) -> None:
    text = source(Spec("norm", (), "layernorm", ("relu",))) + source(Spec("reduce", (), "sum", ()))
    text = text[: text.index("# Row sums")]
    assert read_spec(text) == Spec("norm", (), "layernorm", ("relu",))
    text = text if old in text else source(Spec("softmax", (), "softmax", ()))
    assert read_spec(text.replace(old, new)) is None


def test_read_spec_does_not_know_tasks_written_by_hand() -> None:
    assert all(spec_of(task) is None for task in SPLITS["extra"])


# ---------------------------------------------------------------------------------- sense of specs


@pytest.mark.parametrize("op", OPS)
def test_scalar_operations_match_their_torch_lines(op: str) -> None:
    x = torch.linspace(0.01 if op == "sqrt" else -6, 6, 101, dtype=torch.float64)
    space = {"torch": torch, "F": torch.nn.functional, "x": x}
    exec(OPS[op], space)
    expected = torch.tensor([generate.SCALAR[op](v) for v in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(space["x"], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pre", "core", "post"),
    [
        ("sigmoid relu", "map", ""),  # relu of something positive
        ("relu leaky_relu", "map", ""),
        ("square abs", "map", ""),
        ("scale affine", "map", ""),
        ("relu relu", "map", ""),
        ("sqrt tanh", "map", ""),  # root of a signed value
        ("relu", "map", ""),  # too short
        ("sigmoid", "sum", "sigmoid"),  # sigmoid of a sum over a long row
        ("", "softmax", "relu"),
        ("", "softmax", "affine"),
        ("", "softmax", "tanh"),
        ("scale", "layernorm", ""),
        ("tanh", "amax", ""),  # the maximum of a long row of tanh is 1
        ("relu", "amax", ""),
        ("", "l2norm", "relu"),
        ("exp square", "cumsum", "tanh"),
        ("exp", "softmax", ""),  # one-hot
        ("", "log_softmax", "relu"),  # all zero
        ("affine", "softmax", ""),
    ],
)
def test_senseless_compositions_are_refused(pre: str, core: str, post: str) -> None:
    spec = Spec(generate.CORES[core].family, tuple(pre.split()), core, tuple(post.split()))
    assert problem(spec)


# ------------------------------------------------------------------------------------------- sizes


def _program(file: Path, target: str) -> dict[str, Any]:
    task = load_task(file, target)
    assert task.name == file.stem and task.target == target and "sizes[" not in task.source
    space: dict[str, Any] = {}
    exec(compile(task.source, file.name, "exec"), space)
    return space


def _outputs(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@by_file
def test_sizes_of_both_targets(file: Path) -> None:
    """By shapes alone: cuda tasks hold 8-128 million elements, cpp tasks 0.3-8 million."""
    for target, low, high in (("cuda", 8e6, 128e6), ("cpp", 0.3e6, 8e6)):
        program = _program(file, target)
        with torch.device("meta"):
            model = program["Model"](*program["get_init_inputs"]())
            inputs = program["get_inputs"]()
            outputs = _outputs(model(*inputs))
        assert low <= sum(t.numel() for t in [*inputs, *outputs]) <= high
    assert len(file.read_text().splitlines()) <= 45


# ------------------------------------------------------------------------------------------- audit


def distance(one: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference; for integers the share that differs.

    Over every 7th element: a prime step meets all rows and columns.
    """
    one, reference = one.reshape(-1)[::7], reference.reshape(-1)[::7]
    if not reference.is_floating_point():
        return (one != reference).double().mean().item()
    difference = (one.double() - reference.double()).square().mean().sqrt()
    return (difference / reference.double().square().mean().sqrt()).item()


def furthest(one: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest distance over a task's outputs: an answer is wrong if one output is."""
    return max(distance(a, b) for a, b in zip(one, reference, strict=True))


class Audited:
    """A task at cpp sizes with two draws of inputs and of parameters."""

    def __init__(self, file: Path) -> None:
        self.program = _program(file, "cpp")
        torch.manual_seed(11)
        self.model, self.other = (
            self.program["Model"](*self.program["get_init_inputs"]()).eval() for _ in range(2)
        )
        self.inputs, self.fresh = (self.program["get_inputs"]() for _ in range(2))
        self.reference = self.run(self.inputs)

    @torch.no_grad()
    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return _outputs(self.model(*inputs))

    @torch.no_grad()
    def changed_parameter(self, key: str) -> list[torch.Tensor]:
        """The outputs with one parameter drawn anew."""
        parameter = dict(self.model.named_parameters())[key]
        kept = parameter.clone()
        parameter.copy_(dict(self.other.named_parameters())[key])
        outputs = self.run(self.inputs)
        parameter.copy_(kept)
        return outputs


@pytest.fixture(scope="module", params=FILES, ids=NAMES)
def audited(request: pytest.FixtureRequest) -> Audited:
    return Audited(request.param)


def _constants(reference: torch.Tensor) -> Iterator[torch.Tensor]:
    """The best constant, and the best constant per row and per column."""
    wide = reference.double()
    yield wide.mean().expand_as(wide)
    for dim in range(wide.dim() if wide.dim() > 1 else 0):
        yield wide.mean(dim=dim, keepdim=True).expand_as(wide)


def _half(reference: torch.Tensor, dim: int) -> torch.Tensor:
    """Only the first half along a dimension; the rest is left at zero."""
    lazy = reference.clone()
    size = lazy.shape[dim]
    lazy.narrow(dim, size - size // 2, size // 2).zero_()
    return lazy


def audit_outputs(audited: Audited) -> None:
    """Zeros, constants, copies, half the outputs, bf16 rounding: all far from the reference."""
    for reference in audited.reference:
        assert torch.isfinite(reference.double()).all()
        assert (reference != 0).double().mean() > 0.3
        assert distance(torch.zeros_like(reference), reference) > 0.5
        for dim in range(reference.dim()):
            assert distance(_half(reference, dim), reference) > 0.05
        for given in audited.inputs:
            if given.shape == reference.shape:
                assert distance(given, reference) > 0.03
        if reference.is_floating_point():
            assert all(distance(lazy, reference) > 0.05 for lazy in _constants(reference))
            assert distance(reference.bfloat16(), reference) > LAZY


def audit_honest_error(audited: Audited) -> None:
    """The fp32 result is close to float64's, so that a tolerance between the two can exist."""
    exact = audited.program["Model"](*audited.program["get_init_inputs"]()).double()
    exact.load_state_dict({k: v.double() for k, v in audited.model.state_dict().items()})
    with torch.no_grad():
        outputs = _outputs(exact(*[given.double() for given in audited.inputs]))
    assert furthest(audited.reference, outputs) < HONEST


def audit_inputs(audited: Audited) -> None:
    """New contents, and contents read only in half, of each single input change every output that
    the input feeds by a clear amount; all inputs anew (stale memory) change every output."""
    stale = audited.run(audited.fresh)
    assert all(distance(a, b) > 0.05 for a, b in zip(stale, audited.reference, strict=True))
    for place, given in enumerate(audited.inputs):
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t, place=place: audited.fresh[place],  # type: ignore[misc]
            *(lambda t, dim=dim: _half(t, dim) for dim in range(given.dim())),  # type: ignore[misc]
        ]
        for change in changes:
            inputs = list(audited.inputs)
            inputs[place] = change(given)
            assert furthest(audited.run(inputs), audited.reference) > 0.02


def audit_parameters(audited: Audited) -> None:
    for key, _ in audited.model.named_parameters():
        assert furthest(audited.changed_parameter(key), audited.reference) > 0.02, key
    assert len(audited.model.state_dict()) == len(list(audited.model.parameters()))


AUDITS = [audit_outputs, audit_honest_error, audit_inputs, audit_parameters]


@pytest.mark.parametrize("audit", AUDITS)
def test_audit(audited: Audited, audit: Callable[[Audited], None]) -> None:
    audit(audited)


# What some of KernelBench's tasks get wrong, as small tasks: (audit that objects, forward, inputs).
FLAWED = {
    "zeros pass": (audit_outputs, "x * 0", "torch.randn(64, 64)"),
    "constant passes": (audit_outputs, "torch.sigmoid(x * 0.01)", "torch.randn(64, 64)"),
    "long sum": (audit_outputs, "x.sum(dim=1)", "torch.rand(64, 8192)"),
    "identity on the test range": (audit_outputs, "torch.relu(x)", "torch.rand(64, 64)"),
    "integers, exact in bf16": (audit_outputs, "torch.sign(x) * 3", "torch.randn(64, 64)"),
    "one column for all": (audit_outputs, "x.mean(0, keepdim=True) + 0 * x", "torch.randn(64, 64)"),
    "input forgotten": (audit_inputs, "self.w * 2 + 0 * x", "torch.randn(64, 64)"),
    "saturated": (audit_inputs, "torch.sign(x.sum(dim=1) + 9e3)", "torch.randn(64, 64)"),
    "parameter forgotten": (audit_parameters, "x + 1e-3 * self.w", "torch.randn(64, 64)"),
    "ill-conditioned": (audit_honest_error, "torch.sin(x * 1e4)", "torch.randn(64, 64)"),
}


@pytest.mark.parametrize("flaw", FLAWED)
def test_audit_finds_flaws(flaw: str, tmp_path: Path) -> None:
    audit, forward, inputs = FLAWED[flaw]
    path = tmp_path / "flawed.py"
    path.write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.w = torch.nn.Parameter(torch.randn(64))\n\n"
        f"    def forward(self, x):\n        return {forward}\n\n\n"
        f"def get_inputs():\n    return [{inputs}]\n\n\ndef get_init_inputs():\n    return []\n"
    )
    with pytest.raises(AssertionError):
        audit(Audited(path))
