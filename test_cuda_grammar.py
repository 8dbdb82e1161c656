"""Tests of cuda_grammar.py: every answer keeps the rules, some compile, on a GPU they are right."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace

import pytest

import cuda_grammar
import trace_grammar as grammar
from kernel_build import Builder, extract_requests
from static_checks import check
from tasks import generate
from tasks.generate import Spec


def spec_of(core: str) -> Spec:
    """A task with this core, with something to do before and after it where there is one."""
    known = [s for s in (*generate.HELDOUT, *generate.TRAIN) if s.core == core]
    rng = random.Random(0)
    while not known:
        spec = generate.random_spec(rng, families=[generate.CORES[core].family])
        known += [spec] * (spec.core == core)
    return known[0]


@pytest.mark.parametrize("core", generate.CORES)
def test_every_variant_keeps_the_rules(core: str) -> None:
    answers = set()
    for variant in cuda_grammar.variants(core):
        code = grammar.text(cuda_grammar.kernel(spec_of(core), variant))
        assert check(code, "cuda") == []
        requests = extract_requests(code)
        assert requests is not None and len(requests) == 1 and requests[0].with_cuda
        answers.add(code)
    assert len(answers) == len(cuda_grammar.variants(core))  # each field changes the text


@pytest.mark.parametrize("core", generate.CORES)
def test_every_fault_changes_the_text_and_has_a_verdict(core: str) -> None:
    for variant in cuda_grammar.variants(core):
        for line in cuda_grammar.kernel(spec_of(core), variant):
            for kind, other in line.faults:
                assert other != line.text
                assert kind in grammar.STATUS
                assert other is None or "\n" not in other


@pytest.mark.parametrize("core", generate.CORES)
def test_the_last_variant_has_the_best_of_every_field(core: str) -> None:
    every = cuda_grammar.variants(core)
    best = every[-1]
    assert best.loop in ("block", "float4", "tile")
    assert (best.build, best.passes) == ("256", "fused")
    assert len(set(every)) == len(every)
    for variant in every:  # what an improvement in one field leads to can be written
        for field in ("loop", "build", "passes"):
            assert replace(variant, **{field: getattr(best, field)}) in every


def test_operations_stand_in_order_in_every_variant() -> None:
    spec = Spec("softmax", ("silu", "scale"), "softmax", ("sqrt",))
    wanted = [f"    {grammar.C_LINE[op]}" for op in ("silu", "scale", "sqrt")]
    for variant in cuda_grammar.variants("softmax"):
        texts = [line.text for line in cuda_grammar.kernel(spec, variant)]
        assert [text for text in texts if text in wanted] == wanted


def test_few_different_lines() -> None:
    """A small model knows every line as one token: cores and variants share most of them."""
    used = [
        line.text
        for core in generate.CORES
        for variant in cuda_grammar.variants(core)
        for line in cuda_grammar.kernel(spec_of(core), variant)
    ]
    assert len(set(used)) < 600 < len(used) / 10


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_answers_compile_and_broken_ones_do_not() -> None:
    picked = {"layernorm": "", "rcumsum": "", "conv2d": "semicolon"}
    with Builder("cuda") as builder:
        builder.prepare()
        for core, kind in picked.items():
            lines = cuda_grammar.kernel(spec_of(core), cuda_grammar.variants(core)[-1])
            if kind:
                lines, _ = grammar.broken(lines, random.Random(0), kind)
            requests = extract_requests(grammar.text(lines))
            assert requests is not None
            result = builder.build(requests[0])
            assert not result.harness_error
            assert result.ok == (not kind), (core, result.error)


@pytest.mark.gpu
@pytest.mark.slow
def test_fastest_variants_are_correct_on_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from kernel_sandbox import Sandbox, Task, resolve_sizes

    with Sandbox("cuda", fixed_speedup=1.0) as box:
        futures = {}
        for core in generate.CORES:
            spec = spec_of(core)
            source = resolve_sizes(generate.source(spec), "cuda")
            code = grammar.text(cuda_grammar.kernel(spec, cuda_grammar.variants(core)[-1]))
            futures[core] = box.submit(Task(generate.name(spec), 0, source, "cuda"), code)
        results = {core: future.result() for core, future in futures.items()}
    assert {core: r.reason for core, r in results.items() if not r.correct} == {}
