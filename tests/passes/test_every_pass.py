"""Every pass of the pipeline has a picture here, in the file of its name, and leaves a plain model alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxgrad.compile.pipeline import LAST, ONE, PASSES, SINGLE, WHOLE, Pass
from fxgrad.passes.attach_taps import attach_taps
from fxgrad.passes.infer_samples import infer_samples
from fxgrad.passes.propagate_shapes import propagate_shapes
from tests.passes.pictures import Small, X, around

NAMES = sorted({run.__name__ for run in (*PASSES, *ONE, *SINGLE, *LAST, *WHOLE)})
ALWAYS = (propagate_shapes, infer_samples, attach_taps)
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_has_a_picture(name: str) -> None:
    assert re.search(rf"assert_expected_inline\(\s*around\({name}, ", (HERE / f"test_{name}.py").read_text())


def test_a_pass_of_the_folder_is_in_the_pipeline() -> None:
    assert sorted(path.stem for path in (HERE.parents[1] / "passes").glob("[!_]*.py")) == NAMES


@pytest.mark.parametrize("run", [run for run in (*PASSES, *LAST) if run not in ALWAYS], ids=lambda run: run.__name__)
def test_a_plain_model_stays_as_it_is(run: Pass) -> None:
    assert around(run, Small(), X).endswith(f"after {run.__name__}:\nthe same graph\n")
