"""The page: what was measured, in words for a reader who has not heard of per-sample gradients."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

import pictures
import torch
from claims import Claim
from influence import ALIKE, BLAMED, INFLUENCE, REMOVALS, Influence
from noise_scale import NoiseScale
from private_training import DELTA, OURS, PLAIN, PrivateTraining

FOLDER = Path(__file__).parent


def table(claims: Sequence[Claim]) -> str:
    """The claims as rows of a table, with what was measured."""
    rows = []
    for claim in claims:
        wanted = f"{'at least' if claim.relation == '>=' else 'at most'} {claim.bound:.3g}"
        verdict, kind = ("holds", "good") if claim.holds else ("fails", "bad")
        cells = f"<td>{escape(claim.text)}</td><td>{claim.value:.4g}</td><td>{wanted}</td>"
        rows.append(f'<tr>{cells}<td class="{kind}">{verdict}</td></tr>')
    head = "<tr><th>what</th><th>measured</th><th>wanted</th><th>claim</th></tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def words_of_privacy(found: PrivateTraining) -> dict[str, str]:
    return {
        "private_accuracy": f"{found.private[-1]:.1%}",
        "plain_accuracy": f"{found.plain[-1]:.1%}",
        "epsilon": f"{found.epsilon:.3f}",
        "odds": f"{2.718281828**found.epsilon:.0f}",
        "delta": f"{DELTA:g}",
        "slower": f"{found.milliseconds[OURS] / found.milliseconds[PLAIN]:.1f}",
        "ratio": f"{found.ratio:.2f}",
        "accuracies": pictures.accuracies(found),
        "step_times": pictures.step_times(found),
        "privacy_claims": table(found.claims()),
    }


def words_of_influence(found: Influence) -> dict[str, str]:
    wrong = found.data.labels != found.data.truth
    blamed = found.repair.blamed
    return {
        "images": str(len(wrong)),
        "flipped": str(int(wrong.sum())),
        "test_accuracy": f"{(found.test_answers == found.data.test_truth).float().mean().item():.1%}",
        "removals": str(REMOVALS),
        "correlation": f"{found.correlations[INFLUENCE]:.2f}",
        "slope": f"{found.slope:.2f}",
        "alike": f"{found.correlations[ALIKE]:.2f}",
        "repairs": str(len(blamed)),
        "blamed": str(BLAMED),
        "repaired": str(found.repaired(found.repair.without_blamed)),
        "repaired_by_chance": str(found.repaired(found.repair.without_random)),
        "share_wrong": f"{wrong[blamed].float().mean().item():.0%}",
        "share_by_chance": f"{wrong.float().mean().item():.0%}",
        "predictions": pictures.predictions(found),
        "correlations": pictures.correlations(found),
        "blamed_images": pictures.blamed_images(found),
        "influence_claims": table(found.claims()),
    }


def words_of_noise(found: NoiseScale) -> dict[str, str]:
    return {
        "first_scale": f"{found.exact[:3].mean().item():.0f}",
        "last_scale": f"{found.exact[-3:].mean().item():.0f}",
        "factor": f"{found.factor:.2f}",
        "noise_scales": pictures.noise_scales(found),
        "test_accuracies": pictures.test_accuracies(found),
        "noise_claims": table(found.claims()),
    }


def write(path: Path, privacy: PrivateTraining, influence: Influence, noise: NoiseScale, seconds: float) -> None:
    """Write the page into one file that needs no other."""
    claims = [*privacy.claims(), *influence.claims(), *noise.claims()]
    failed = sum(not claim.holds for claim in claims)
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}"
    words = {
        "style": (FOLDER / "page.css").read_text(),
        "verdict": f"All {len(claims)} claims hold." if not failed else f"{failed} of {len(claims)} claims fail.",
        "kind": "bad" if failed else "good",
        "machine": escape(f"{machine}, {seconds:.0f} seconds in all"),
    }
    words |= words_of_privacy(privacy) | words_of_influence(influence) | words_of_noise(noise)
    path.write_text(Template((FOLDER / "page.html").read_text()).substitute(words))
