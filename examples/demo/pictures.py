"""The pictures of the page, each drawn twice: dark on light, and light on dark."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from influence import ALIKE, DOT, INFLUENCE, Influence
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from noise_scale import BATCH, NoiseScale
from private_training import GHOST, HOOKS, OURS, PLAIN, PrivateTraining

ROWS, BLAMED_SHOWN = 3, 5  # of the images on the page


class Theme(NamedTuple):
    ground: str
    ink: str
    faint: str
    main: str
    warm: str
    digits: str  # the colour map of images


LIGHT = Theme("#ffffff", "#1d2129", "#9aa1ad", "#0f766e", "#c2410c", "gray_r")
DARK = Theme("#1b1e24", "#e4e6eb", "#737b89", "#4fd1c0", "#f59e5b", "gray")
Draw = Callable[[Figure, Theme], None]


def picture(draw: Draw, alt: str, size: tuple[float, float]) -> str:
    """The HTML of a picture that follows the reader's colours, with its data inside."""
    light, dark = (base64.b64encode(png(draw, theme, size)).decode() for theme in (LIGHT, DARK))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img alt="{escape(alt)}" src="data:image/png;base64,{light}"></picture>'
    )


def png(draw: Draw, theme: Theme, size: tuple[float, float]) -> bytes:
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), theme.ink)
    surfaces = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.ground)
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with plt.rc_context({**style, **colors, **surfaces}):
        figure = plt.figure(figsize=size, layout="constrained")
        draw(figure, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
        plt.close(figure)
    return buffer.getvalue()


def bars(axes: Axes, values: dict[str, float], form: str, colors: list[str]) -> None:
    """Horizontal bars with their numbers, the first on top."""
    drawn = axes.barh(list(values), list(values.values()), color=colors, height=0.6)
    axes.bar_label(drawn, [format(value, form) for value in values.values()], padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.tick_params(axis="y", length=0)


def accuracies(found: PrivateTraining) -> str:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        epochs = range(1, len(found.plain) + 1)
        axes.plot(epochs, found.plain, color=theme.faint, marker="o", markersize=3, label="not private")
        label = f"private, ε = {found.epsilon:.3f} at the end"
        axes.plot(epochs, found.private, color=theme.main, marker="o", markersize=3, label=label)
        axes.set(xlabel="passes over the training images", ylabel="share of test images right", ylim=(0, 1.02))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="lower right")

    return picture(draw, "accuracy of plain and of private training over epochs", (5, 3.2))


def step_times(found: PrivateTraining) -> str:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        names = {
            PLAIN: "not private",
            OURS: "private\nfxgrad",
            HOOKS: "private\nOpacus, hooks",
            GHOST: "private\nOpacus, ghost",
        }
        values = {names[kind]: milliseconds for kind, milliseconds in found.milliseconds.items()}
        bars(axes, values, ".1f", [theme.faint, theme.main, theme.warm, theme.warm])
        axes.set(xlabel="milliseconds a training step (median)")

    return picture(draw, "time of a training step of each kind", (5, 3.2))


def predictions(found: Influence) -> str:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        x, y = found.predicted.flatten().tolist(), found.measured.flatten().tolist()
        axes.plot(x, y, ".", color=theme.main, markersize=2, alpha=0.15, rasterized=True)
        low, high = min(*x, *y), max(*x, *y)
        axes.plot([low, high], [low, high], color=theme.ink, linewidth=1, linestyle="--")
        axes.set(xlabel="predicted move of the answer's log-odds", ylabel="move after training again")
        axes.legend(["one test image, one removal", "moves just as predicted"], loc="upper left", fontsize=9)

    return picture(draw, "predicted against measured moves", (5, 3.6))


def correlations(found: Influence) -> str:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        names = {INFLUENCE: "influence", DOT: "gradients alike", ALIKE: "images alike\n(no gradients)"}
        values = {names[method]: value for method, value in found.correlations.items()}
        bars(axes, values, ".2f", [theme.main, theme.faint, theme.faint])
        axes.set(xlabel="correlation with the measured moves", xlim=(0, 1.1))

    return picture(draw, "correlations of three ways to predict", (5, 3.6))


def blamed_images(found: Influence) -> str:
    """Some wrongly answered test images, the training images blamed for it, and the answer without these."""
    rows = found.rows_to_show(ROWS)

    def draw(figure: Figure, theme: Theme) -> None:
        grid = figure.subplots(len(rows), 1 + BLAMED_SHOWN, squeeze=False)
        data, repair = found.data, found.repair
        for axes, row in zip(grid, rows, strict=True):
            test = int(repair.images[row])
            shown = [data.test_images[test, 0], *data.images[repair.blamed[row, :BLAMED_SHOWN], 0]]
            for one, image in zip(axes, shown, strict=True):
                one.imshow(image.numpy(), cmap=theme.digits)
                one.set(xticks=[], yticks=[])
                one.spines[:].set(visible=True, color=theme.faint)
            answer, again = int(found.test_answers[test]), int(repair.without_blamed[row])
            axes[0].set_title(f"answer {answer}", color=theme.warm, fontsize=10)
            axes[0].set_xlabel(f"retrained: {again}", color=theme.main, fontsize=10)
            axes[0].spines[:].set(color=theme.ink, linewidth=2)
            for one, i in zip(axes[1:], repair.blamed[row].tolist(), strict=False):
                wrong = bool(data.labels[i] != data.truth[i])
                one.set_title(f"label {int(data.labels[i])}", color=theme.warm if wrong else theme.ink, fontsize=10)

    return picture(draw, "wrongly answered test images and the training images blamed for it", (7, 1.5 * len(rows)))


def noise_scales(found: NoiseScale) -> str:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        trace, squared = found.estimates.T
        steps = [step for step in range(len(trace)) if squared[step] > 0 and trace[step] > 0]
        single = (trace / squared)[steps].tolist()
        axes.plot(steps, single, ".", color=theme.faint, markersize=3, label=f"one batch of {BATCH} images alone")
        axes.plot(
            found.steps.tolist(),
            found.exact.tolist(),
            color=theme.ink,
            linewidth=2,
            label="exact, from all training images",
        )
        axes.plot(
            found.steps.tolist(),
            found.averaged.tolist(),
            "o",
            color=theme.main,
            markersize=5,
            label="batches around, averaged",
        )
        highest = 4 * found.exact.max().item()
        axes.set(yscale="log", ylim=(10, highest), xlabel="training step", ylabel="noise scale, in images")
        axes.legend(loc="upper left", fontsize=9)

    return picture(draw, "gradient noise scale over the training", (5, 3.6))


def test_accuracies(found: NoiseScale) -> str:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.plot(found.steps.tolist(), found.accuracies.tolist(), color=theme.main, marker="o", markersize=4)
        axes.set(xlabel="training step", ylabel="share of test images right", ylim=(0, 1.02))

    return picture(draw, "accuracy on test images over the training", (5, 3.6))
