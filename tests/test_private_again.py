"""A private training that goes on from a checkpoint: its history, and its random generators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxgrad.opacus
from fxgrad.errors import OptionError
from fxgrad.opacus import PrivacyEngine
from fxgrad.opacus.checkpoints import draw_anew

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
DATA = TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))


class Script:
    """What a script does, each time it runs."""

    def __init__(self, noise: float = 1.0, seeded: bool = True) -> None:
        torch.manual_seed(0)
        self.plain, self.engine = nn.Linear(3, 2), PrivacyEngine(accountant="rdp")
        self.noise = torch.Generator().manual_seed(5) if seeded else None
        self.batches = torch.Generator().manual_seed(6) if seeded else None
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.plain,
            optimizer=torch.optim.SGD(self.plain.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, 4, generator=self.batches),
            noise_multiplier=noise,
            max_grad_norm=1.0,
            noise_generator=self.noise,
            backend="eager",
        )

    def steps(self, count: int) -> Script:
        x, y = DATA.tensors
        for _ in range(count):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return self

    def save(self, folder: Path) -> Path:
        self.engine.save_checkpoint(path=folder / "it.pt", module=self.model, optimizer=self.optimizer)
        return folder / "it.pt"

    def load(self, path: Path, **options: Any) -> Script:
        self.engine.load_checkpoint(path=path, module=self.model, **{"optimizer": self.optimizer, **options})
        return self

    def history(self) -> list[Any]:
        return [*self.engine.accountant.history]

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.plain.parameters()]


def test_an_engine_keeps_the_steps_behind_a_checkpoint(tmp_path: Path) -> None:
    script = Script().steps(3)
    saved = script.values()
    path = script.save(tmp_path)
    script.steps(5).load(path)
    assert script.history() == [(1.0, 0.25, 8)]
    assert all(a.equal(b) for a, b in zip(script.values(), saved, strict=True))
    assert Script().steps(2).load(path).history() == [(1.0, 0.25, 3)]
    assert Script().load(path).history() == [(1.0, 0.25, 3)]
    assert type(script.engine.accountant) is type(Script().engine.accountant)


def test_an_engine_with_other_steps(tmp_path: Path) -> None:
    path = Script().steps(3).save(tmp_path)
    other = Script(noise=2.0).steps(1)
    before = other.values()
    with pytest.raises(OptionError, match="counted other steps than the checkpoint's training") as caught:
        other.load(path)
    assert caught.value.where and caught.value.path and caught.value.advice
    assert other.history() == [(2.0, 0.25, 1)]
    assert all(a.equal(b) for a, b in zip(other.values(), before, strict=True))


def test_a_checkpoint_s_training_draws_noise_and_batches_of_its_own(tmp_path: Path) -> None:
    path = Script().steps(3).save(tmp_path)
    first = Script().noise
    assert first is not None
    for options in {}, {"optimizer": None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)  # of Opacus: there is no optimizer
            script = Script().load(path, **options)
        assert script.noise is not None and script.batches is not None
        assert not script.noise.get_state().equal(first.get_state())
        assert not script.batches.get_state().equal(torch.Generator().manual_seed(6).get_state())
        assert script.loader.batch_sampler.generator is script.batches
    empty = Script()
    path = empty.save(tmp_path)
    unspent = Script().load(path)
    assert unspent.noise is not None and unspent.noise.get_state().equal(first.get_state())  # nothing was drawn
    Script(seeded=False).steps(1).load(path)


@pytest.mark.parametrize("how", ["load_checkpoint", "state_dict"])
def test_a_checkpoint_that_is_loaded_before_make_private(how: str, tmp_path: Path) -> None:
    """The script's seeds would bring back the noise and the batches of the first steps."""
    path = Script().steps(3).save(tmp_path)
    engine, plain = PrivacyEngine(accountant="rdp"), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    if how == "load_checkpoint":
        engine.load_checkpoint(path=path, module=plain, optimizer=optimizer)
    else:
        engine.accountant.load_state_dict(Script().load(path).engine.accountant.state_dict())
    noise, batches = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    before = noise.get_state(), batches.get_state()

    engine.make_private(
        module=plain,
        optimizer=optimizer,
        data_loader=DataLoader(DATA, 4, generator=batches),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=noise,
        backend="eager",
    )
    assert not noise.get_state().equal(before[0]) and not batches.get_state().equal(before[1])
    assert engine.accountant.history == [(1.0, 0.25, 3)]


def test_an_engine_that_has_made_steps_itself_keeps_the_generators() -> None:
    script = Script().steps(2)
    noise = torch.Generator().manual_seed(5)
    before = noise.get_state()
    script.engine.make_private(
        module=script.plain,
        optimizer=torch.optim.SGD(script.plain.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, 4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=noise,
        backend="eager",
    )
    assert noise.get_state().equal(before)


def test_an_optimizer_by_the_function(tmp_path: Path) -> None:
    path = Script().steps(3).save(tmp_path)
    engine, plain, noise = PrivacyEngine(accountant="rdp"), nn.Linear(3, 2), torch.Generator().manual_seed(5)
    model, optimizer, loader = fxgrad.opacus.make_private(
        engine,
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, 4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=noise,
        backend="eager",
    )
    assert optimizer.accountant is engine.accountant and optimizer.loader() is loader
    engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    assert not noise.get_state().equal(torch.Generator().manual_seed(5).get_state())


def test_a_generator_that_cannot_be_seeded() -> None:
    class Fixed:
        def seed(self) -> int:
            raise RuntimeError("not implemented")

    script = Script()
    script.optimizer.generator = Fixed()
    with pytest.raises(OptionError, match="cannot be seeded anew") as caught:
        draw_anew(script.optimizer, script.loader)
    assert caught.value.where and caught.value.path and caught.value.advice
    script.optimizer.secure_mode = True
    draw_anew(script.optimizer, script.loader)
