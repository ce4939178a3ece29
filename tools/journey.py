"""Draw docs/journey.svg: a bucket of gradients on its way through two ranks."""

from __future__ import annotations

from pathlib import Path

STAGES = (
    ("gradients", "a DDP bucket,\n3 layers, fp32"),
    ("encode", "a message\nfor each owner"),
    ("exchange", "4 bits cross\nthe slow link"),
    ("reduce", "the owner adds up\nand encodes the mean"),
    ("gather", "4 bits cross\nthe slow link"),
    ("decode", "the mean,\nthe same on all ranks"),
)
COLORS = {"exchange": "#d98a00", "gather": "#d98a00", "reduce": "#0a7d4f"}
JOURNEY = Path(__file__).resolve().parents[1] / "docs" / "journey.svg"
RANKS, WIDTH, HEIGHT, GAP = 2, 1.7, 0.9, 0.45


def main() -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    figure = Figure(figsize=(11, 3.3), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    step = WIDTH + GAP
    for rank in range(RANKS):
        y = -rank * 1.7
        axes.text(-0.25, y + HEIGHT / 2, f"rank {rank}", ha="right", va="center", fontsize=11, color="#333333")
        for i, (name, about) in enumerate(STAGES):
            color = COLORS.get(name, "#2a6fdb")
            box = FancyBboxPatch((i * step, y), WIDTH, HEIGHT, boxstyle="round,pad=0.02", lw=1.5, ec=color, fc="white")
            axes.add_patch(box)
            axes.text(
                i * step + WIDTH / 2, y + 0.72 * HEIGHT, name, ha="center", va="center", weight="bold", color=color
            )
            axes.text(
                i * step + WIDTH / 2, y + 0.32 * HEIGHT, about, ha="center", va="center", fontsize=7.5, color="#333333"
            )
            if i + 1 < len(STAGES):
                ends = [(i * step + WIDTH + 0.03, y + HEIGHT / 2), ((i + 1) * step - 0.03, y + HEIGHT / 2)]
                axes.add_patch(FancyArrowPatch(*ends, arrowstyle="->", mutation_scale=12, color="#888888"))
    for i, (name, _) in enumerate(STAGES):
        if name in ("exchange", "gather"):
            x = i * step + WIDTH / 2
            arrow = FancyArrowPatch((x, -0.04), (x, -1.7 + HEIGHT + 0.04), arrowstyle="<->", mutation_scale=14, lw=2)
            arrow.set_color("#d98a00")
            axes.add_patch(arrow)
    axes.set_xlim(-1.1, len(STAGES) * step)
    axes.set_ylim(-1.9, 1.15)
    axes.set_axis_off()
    with matplotlib.rc_context({"svg.hashsalt": "thinwire"}):
        figure.savefig(JOURNEY, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
