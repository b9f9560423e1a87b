"""Mistakes made on purpose: each is caught by the tests named beside it.

    python -m tests.mutations              makes every mistake in turn, in a copy of the project
    python -m tests.mutations clip norms   those whose names contain one of the words

A mistake that no test catches is a line of the product that nothing checks. Exit code 1 where one survives.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """A piece of source text that occurs once, what stands there instead, and the tests that notice."""

    name: str
    file: str
    text: str
    instead: str
    tests: str  # arguments of pytest


def rule(name: str, file: str, text: str, instead: str, ops: str) -> Mutation:
    return Mutation(f"rule: {name}", f"fxgrad/rules/{file}.py", text, instead, f"tests/test_rules.py -k '{ops}'")


def of_pass(name: str, file: str, text: str, instead: str, tests: str) -> Mutation:
    return Mutation(f"pass: {name}", f"passes/{file}.py", text, instead, tests)


def clipping(name: str, text: str, instead: str, tests: str = "tests/test_clipping.py") -> Mutation:
    return Mutation(f"clip: {name}", "fxgrad/quantities/clipping.py", text, instead, tests)


MUTATIONS = [
    rule(
        "linear's bias takes one position",
        "linear",
        '"bias": summed_to(g, ())',
        '"bias": summed_to(g[:1], ())',
        "linear",
    ),
    rule(
        "bilinear swaps its inputs",
        "linear",
        '"n...o,n...i,n...j->noij", g, input1, input2',
        '"n...o,n...i,n...j->noij", g, input2, input1',
        "bilinear",
    ),
    rule(
        "matmul takes x for g",
        "linear",
        'return Term("n...o,n...i->noi", x, g)',
        'return Term("n...o,n...i->noi", g, x)',
        "matmul",
    ),
    rule(
        "layer_norm forgets eps",
        "norm",
        "F.layer_norm(computable(input), normalized_shape, eps=eps)",
        "F.layer_norm(computable(input), normalized_shape)",
        "layer_norm",
    ),
    rule(
        "rms_norm takes the input as it is",
        "norm",
        "x_hat = F.rms_norm(computable(input), normalized_shape, eps=eps)",
        "x_hat = computable(input)",
        "rms_norm",
    ),
    rule(
        "group_norm forgets the mean",
        "norm",
        "_per_channel(g, ((rows - mean) * rstd).view_as(input))",
        "_per_channel(g, (rows * rstd).view_as(input))",
        "group_norm",
    ),
    rule(
        "embedding forgets its padding",
        "lookup",
        "OneHot(input, weight.shape[0], padding_idx), g)}\n\n\ndef _has_rows_of_ids",
        "OneHot(input, weight.shape[0]), g)}\n\n\ndef _has_rows_of_ids",
        "embedding",
    ),
    rule(
        "embedding_bag's mean counts padding",
        "lookup",
        "g = g / counted.sum(-1)[..., None, None].clamp(min=1)",
        "g = g / input.shape[-1]",
        "embedding_bag",
    ),
    rule(
        "padding='same' puts the odd one left",
        "conv",
        "for side in (total // 2, total - total // 2)]",
        "for side in (total - total // 2, total // 2)]",
        "conv",
    ),
    rule(
        "a convolution forgets its dilation",
        "conv",
        "Settings(stride, padding, dilation, False, (0,) * spatial, groups)",
        "Settings(stride, padding, (1,) * spatial, False, (0,) * spatial, groups)",
        "conv",
    ),
    rule(
        "a transposed convolution forgets output_padding",
        "conv",
        "Settings(stride, padding, dilation, True, extra, groups)",
        "Settings(stride, padding, dilation, True, (0,) * spatial, groups)",
        "conv_transpose",
    ),
    clipping(
        "C is a tenth too large", "(c / (norms + EPSILON)).clamp(max=1)", "(1.1 * c / (norms + EPSILON)).clamp(max=1)"
    ),
    clipping("small gradients are scaled up", "(c / (norms + EPSILON)).clamp(max=1)", "c / (norms + EPSILON)"),
    clipping(
        "the norm, and no bound of it",
        "norms, most = torch.stack(of_groups, 1)",
        "norms = most = torch.stack(of_groups, 1)[0]",
        "tests/test_bound.py",
    ),
    clipping("a group's weights are another's", "rows[of[g.name]]", "rows[0]"),
    clipping("NaN counts", "weight = torch.where(finite, weight, 0)\n", "pass\n"),
    clipping("a sample of weight 0 counts", "finite | (given[0] == 0)", "finite"),
    clipping("gamma is left out", "c / (norms + self.gamma)", "c / norms"),
    clipping(
        "groups may name a parameter twice", "if sorted(listed) != sorted(names):", "if not set(listed) >= set(names):"
    ),
    of_pass(
        "a tap may read another value",
        "prove_coverage",
        "value is arg or key in",
        "True or key in",
        "tests/passes/test_prove_coverage.py",
    ),
    of_pass(
        "a tap may name another parameter",
        "prove_coverage",
        "key not in self.keys[arg]",
        "key is None",
        "tests/passes/test_prove_coverage.py",
    ),
    of_pass(
        "dropout draws again",
        "separate_draws",
        "ones = make(graph, ctx, torch.ones_like, (source,), beside=node)",
        "ones = make(graph, ctx, torch.zeros_like, (source,), beside=node)",
        "tests/test_draws.py",
    ),
    of_pass(
        "attention's mask is shared",
        "separate_draws",
        "_hand_out(node, operand, samples.layout, ctx)",
        "pass",
        "tests/test_draws.py",
    ),
    of_pass(
        "a foreach op takes the first element",
        "split_foreach",
        "return arg[i] if isinstance(arg, list | tuple) else arg",
        "return arg[0] if isinstance(arg, list | tuple) else arg",
        "tests/test_foreach.py",
    ),
    of_pass(
        "a write is put to other places",
        "separate_writes",
        "self._places(view, node), node)",
        "self._places(self.root, node), node)",
        "tests/test_passes.py tests/test_changed_in_place.py",
    ),
    of_pass(
        "views are simplified in the wrong order",
        "simplify_views",
        "split.index(dim[0]) for dim in result",
        "split.index(dim[0]) for dim in result[::-1]",
        "tests/test_simplify_views.py",
    ),
    of_pass(
        "a batch of one has statistics",
        "count_one_sample",
        'call.get("training") is True and',
        "False and",
        "tests/test_bound.py -k statistics",
    ),
    of_pass(
        "a checkpoint keeps its values", "inline_regions", "copy.meta.update(tags)", "None", "tests/test_checkpoint.py"
    ),
    of_pass(
        "the reverse direction runs forward",
        "decompose_recurrent",
        "directions = (False, True) if layers.bidirectional else (False,)",
        "directions = (False, False) if layers.bidirectional else (False,)",
        "tests/test_recurrent.py",
    ),
    of_pass(
        "a recurrent layer's last state is its first",
        "decompose_recurrent",
        "hs, 0 if reverse else -1)",
        "hs, -1 if reverse else 0)",
        "tests/test_recurrent.py",
    ),
    of_pass(
        "pieces in another order are joined",
        "join_pieces",
        "for other, region in zip(results, regions, strict=True))",
        "for other, region in zip(results, regions[::-1], strict=True))",
        "tests/test_odd_forwards.py -k pieces",
    ),
    of_pass(
        "the proof finds nothing",
        "prove_independence",
        "raise refusal from None",
        "pass",
        "tests/test_longest.py tests/attacks -k packed",
    ),
    of_pass(
        "what is returned may be mixed",
        "infer_samples",
        "samples.kind is Kind.MIXED and samples.traced and fake.dim():",
        "False:",
        "tests/test_token_losses.py",
    ),
]


@contextlib.contextmanager
def copy_of_the_project() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "project"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
        yield root


Edit = tuple[str, str, str]  # a file, a text that occurs once, and what stands in its place


@contextlib.contextmanager
def edited(root: Path, name: str, *edits: Edit) -> Iterator[None]:
    """Change files of a copy of the project; they are as before in the end."""
    before: dict[Path, str] = {}
    try:
        for file, text, instead in edits:
            path = root / file
            source = path.read_text()
            assert source.count(text) == 1, f"{name}: its text occurs {source.count(text)} times in {file}"
            before.setdefault(path, source)
            path.write_text(source.replace(text, instead))
        yield
    finally:
        for path, source in before.items():
            path.write_text(source)


def survives(mutation: Mutation, root: Path) -> bool:
    """Make the mistake in a copy of the project, run the tests, and undo it."""
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider {mutation.tests}"
    with edited(root, mutation.name, (mutation.file, mutation.text, mutation.instead)):
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, shell=True, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode in (0, 1), f"{mutation.name}: the tests did not run\n{run.stdout[-2000:]}"
    return run.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [one for one in MUTATIONS if not words or any(word in one.name for word in words)]
    survivors = 0
    with copy_of_the_project() as root:
        for mutation in chosen:
            survived = survives(mutation, root)
            survivors += survived
            print(f"{'SURVIVES' if survived else 'caught'}  {mutation.name}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
