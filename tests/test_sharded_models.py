"""Models of several kinds under FSDP2, ten steps beside the loop over single samples; see tests/sharded_models.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import findings
from tests.sharded_models import LAYOUTS, MODELS

pytestmark = pytest.mark.timeout(1500)

ALL = tuple(MODELS)
LONG = [
    *((world, layout, "aot_eager", "float64", ALL) for world in (2, 4) for layout in LAYOUTS),
    (2, "root", "inductor", "float32", ("mlp", "moe")),
    (2, "blocks", "inductor", "float32", ("cnn", "gpt", "lstm")),
    (2, "hybrid", "inductor", "float32", ("llama",)),
    (2, "blocks", "aot_eager", "bfloat16", ALL),
]
TABLE = [
    (2, "blocks", "aot_eager", "float64", ("mlp", "moe")),
    *(pytest.param(*row, marks=pytest.mark.long) for row in LONG),
]


@pytest.mark.parametrize(("world", "layout", "backend", "dtype", "names"), TABLE)
def test_sharded_models(
    tmp_path: Path, world: int, layout: str, backend: str, dtype: str, names: tuple[str, ...]
) -> None:
    cases = [f"{name} {layout} {backend} {dtype}" for name in names]
    found = findings("tests.sharded_models", tmp_path, str(world), *cases, world=world)
    assert found == [dict.fromkeys(cases, "")] * world
