"""The suite, by name. Weights are random; only torch is needed."""

from benchmarks.models.convolutional import CONVOLUTIONAL
from benchmarks.models.layers import LAYERS
from benchmarks.models.perceptrons import PERCEPTRONS
from benchmarks.models.sequences import SEQUENCES
from benchmarks.models.transformers import TRANSFORMERS
from benchmarks.tasks import Spec

MODELS: dict[str, Spec] = dict(sorted((PERCEPTRONS | CONVOLUTIONAL | SEQUENCES | TRANSFORMERS | LAYERS).items()))


def find_models(patterns: list[str]) -> list[str]:
    """The models whose name is one of `patterns` or begins with one, in the suite's order."""
    for pattern in patterns:
        if not any(name.startswith(pattern) for name in MODELS):
            raise ValueError(f"no model {pattern!r}; there are {', '.join(MODELS)}")
    return [name for name in MODELS if name.startswith(tuple(patterns))]
