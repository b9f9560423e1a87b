"""`Explanation`: the result of `fxgrad.explain`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fxgrad.explanation.drawing import page
from fxgrad.explanation.findings import Findings
from fxgrad.explanation.text import as_text


@dataclass(frozen=True, repr=False)
class Explanation(Findings):
    """The treatment of a model by fxgrad, as returned by `fxgrad.explain`.

    ``str()`` is a table, `to_dict` gives data for JSON, `to_html` a page.

    Attributes:
        model: the name of the model's class.
        batch_size: the number of samples in the batch.
        sizes: the size of each symbol, such as ``{"B": 5}``.
        parameters: one `Explained` for each parameter, with its uses.
        totals: flops and bytes of the plain step and of the transformed model's.
        notes: sentences about the samples, such as ops that you registered.
        values: the values of the rewritten graph, in its order.
        quantities: the names of the quantities.
        machine: the machine that milliseconds are estimated for; empty without estimates.

    >>> import torch, fxgrad
    >>> explanation = fxgrad.explain(torch.nn.Linear(3, 2), torch.randn(5, 3))
    >>> [parameter.name for parameter in explanation.parameters]
    ['weight', 'bias']
    """

    def to_html(self, path: str | Path | None = None) -> str:
        """Return a self-contained page with the table and the graph; also write it to ``path`` if set."""
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__
