"""Figures and the report page of an evaluation, made from its results.json alone.

`figures` writes PNG and SVG files; `page` returns one HTML file with every table and figure inside
it (no server, no network, no scripts), for narrow and wide screens, light and dark. Both read the
object that evaluate.results makes, so a page can be drawn again from a stored results.json:

    python report.py FOLDER
"""

from __future__ import annotations

import base64
import html
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = Mapping[str, Any]  # what evaluate.results returns

METRIC_TEXT = {
    "correct": "correct",
    "speedup": "speedup over eager",
    "fast_1": "fast_1",
    "fast_1.5": "fast_1.5",
    "score": "score of the best turn",
}
SIZE_INCHES = (4.6, 3.2)  # one panel a figure, so that a phone shows each at full width
# text and lines, behind the axes, first model, second model
COLOURS = {
    "light": ("#20242b", "#ffffff", "#1f63c4", "#c2571a"),
    "dark": ("#dfe3ea", "#171a20", "#7fb2ff", "#ffa866"),
}


def figures(results: Results, baseline: Results | None, folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg of every figure below `folder`; returns the PNG paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, _, figure in drawings(results, baseline, "light"):
        for ending in ("png", "svg"):
            (folder / f"{name}.{ending}").write_bytes(rendered(figure, ending))
        paths.append(folder / f"{name}.png")
    return paths


def drawings(
    results: Results, baseline: Results | None, mode: str
) -> Iterator[tuple[str, str, Figure]]:
    """(file name, caption, figure) of every figure, in the order of the page."""
    sides = [results] if baseline is None else [baseline, results]
    turns = list(range(1, results["counts"]["turns"] + 1))
    for metric in ("score", "correct", "speedup"):
        figure, axes = blank(mode, "turns", METRIC_TEXT[metric])
        for number, side in enumerate(sides):
            # The baseline gets the second colour, so that the model keeps the first.
            colour = len(sides) - 1 - number
            for kind, dashes in (("avg", "-"), ("best", "--")):
                rows = side["by_turn"][metric][kind][: len(turns)]
                band(
                    axes, turns[: len(rows)], rows, legend(side, kind, sides), colour, dashes, mode
                )
        finish(axes, turns)
        yield f"{metric}_by_turn", f"{METRIC_TEXT[metric]} after each turn (best so far)", figure
    for metric in ("score", "speedup"):
        figure, axes = blank(mode, "trajectories m", f"best@m {METRIC_TEXT[metric]}")
        for number, side in enumerate(sides):
            rows = side["best_by_m"][metric]
            colour = len(sides) - 1 - number
            every_m = list(range(1, len(rows) + 1))
            band(axes, every_m, rows, legend(side, "best@m", sides), colour, "-", mode)
        finish(axes, None)
        yield (
            f"{metric}_by_trajectories",
            "best of m parallel trajectories, after all turns",
            figure,
        )
    figure, axes = blank(mode, "speedup threshold p", "fast_p: share with speedup >= p")
    for number, side in enumerate(sides):
        colour = len(sides) - 1 - number
        for kind, dashes in (("avg", "-"), ("best", "--")):
            rows, p = side["fast_p"][kind], side["fast_p"]["p"]
            band(axes, p, rows, legend(side, kind, sides), colour, dashes, mode)
    finish(axes, None)
    axes.set_ylim(0, 1.02)
    yield "fast_p", "correct and at least p times as fast as eager, after all turns", figure


def legend(side: Results, kind: str, sides: Sequence[Results]) -> str:
    """avg@16, best@16 or the given words, with the model's name where there are two."""
    text = f"{kind}@{side['counts']['trajectories']}" if kind in ("avg", "best") else kind
    return text if len(sides) == 1 else f"{short(side['meta']['model'])} {text}"


def short(name: str, limit: int = 22) -> str:
    return name if len(name) <= limit else "..." + name[-limit + 3 :]


def blank(mode: str, x: str, y: str) -> tuple[Figure, Axes]:
    ink, paper = COLOURS[mode][:2]
    figure = Figure(figsize=SIZE_INCHES, layout="constrained", facecolor=paper)
    axes = figure.add_subplot(facecolor=paper)
    axes.set_xlabel(x, color=ink)
    axes.set_ylabel(y, color=ink)
    axes.tick_params(colors=ink)
    axes.grid(color=ink, alpha=0.12)
    for side, spine in axes.spines.items():
        spine.set_color(ink)
        spine.set_visible(side in ("left", "bottom"))
    return figure, axes


def band(
    axes: Axes,
    x: Sequence[float],
    rows: Sequence[Sequence[float | None]],
    label: str,
    colour: int,
    dashes: str,
    mode: str,
) -> None:
    """A line with its interval as a band; rows are (value, low, high), None = not known."""
    shade = COLOURS[mode][2 + colour]
    value, low, high = (
        [float("nan") if row[i] is None else float(row[i] or 0.0) for row in rows] for i in range(3)
    )
    mark = "o" if len(x) <= 16 else None
    axes.plot(x, value, dashes, color=shade, label=label, marker=mark, markersize=3.5)
    axes.fill_between(x, low, high, color=shade, alpha=0.16, linewidth=0)


def finish(axes: Axes, ticks: Sequence[int] | None) -> None:
    if ticks is not None:
        axes.set_xticks(list(ticks))
    axes.set_ylim(bottom=0)
    box = axes.legend(
        frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )
    for text in box.get_texts():
        text.set_color(axes.xaxis.label.get_color())


def rendered(figure: Figure, ending: str) -> bytes:
    """The file's bytes; the same figure gives the same bytes (no date, fixed ids)."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kevin"}):
        metadata = {"Date": None} if ending == "svg" else {"Software": None}
        figure.savefig(buffer, format=ending, dpi=160, metadata=metadata)
    return buffer.getvalue()


# ------------------------------------------------------------------------------------------------
# The page
# ------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --ink: #20242b; --paper: #ffffff; --soft: #5c6470;
  --line: #d9dde3; --stripe: #f5f6f8; --accent: #1f63c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #dfe3ea; --paper: #171a20; --soft: #9aa3b0;
  --line: #343a45; --stripe: #1e222a; --accent: #7fb2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; border-left: .25rem solid var(--accent); padding-left: .8rem; }
.soft { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); }
thead th { border-bottom: 2px solid var(--line); }
tbody tr { border-bottom: 1px solid var(--line); }
td span { color: var(--soft); font-size: .85em; margin-left: .35rem; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; }
code { overflow-wrap: anywhere; }
"""  # noqa: E501 (one CSS rule a line)


def page(results: Results, baseline: Results | None = None) -> str:
    """The whole report as one HTML text."""
    n, meta = results["counts"], results["meta"]
    title = f"{meta['model']}: {n['tasks']} {meta['split_label']} tasks"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if results.get("comparison"):
        parts.append(f'<p class="lead">{html.escape(results["comparison"]["text"])}</p>')
    parts.append(f"<p>{html.escape(protocol(results))}</p>")
    parts.append(omissions(n))
    parts.append(f'<h2>Curves</h2><div class="figures">{embedded(results, baseline)}</div>')
    sides = [results] if baseline is None else [results, baseline]
    for side in sides:
        name = "" if baseline is None else f"{side['meta']['model']}, "
        for kind, words in (("avg", "mean over trajectories"), ("best", "best trajectory")):
            size = side["counts"]["trajectories"]
            head = f"{name}{kind}@{size} after each turn ({words})"
            parts += [f"<h2>{html.escape(head)}</h2>", turn_intervals(side, kind)]
    parts += ["<h2>Each turn by itself</h2>", verdicts(results)]
    parts += ["<h2>Tasks</h2>", task_rows(results)]
    settings = {key: value for key, value in meta.items() if key != "split_label"}
    rows = [[key, plain(value)] for key, value in settings.items()]
    parts += ["<h2>Settings</h2>", grid(["setting", "value"], rows)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def protocol(results: Results) -> str:
    n = results["counts"]
    return (
        f"{n['trajectories']} parallel trajectories of {n['turns']} turns on each of {n['tasks']} "
        "tasks. A trajectory counts with its best kernel so far, an unsolved one with 0; speedup "
        "is against eager PyTorch. Brackets and bands: 95 % bootstrap intervals over tasks and "
        "trajectories."
    )


def omissions(n: Mapping[str, int]) -> str:
    if not n["harness_errors"]:
        return '<p class="soft">Every kernel was judged.</p>'
    return (
        f'<p class="soft">{n["harness_errors"]} of {n["kernels"]} kernels could not be judged '
        f"(harness errors) and are left out; {n['dropped_trajectories']} trajectories and "
        f"{n['dropped_tasks']} tasks dropped.</p>"
    )


def embedded(results: Results, baseline: Results | None) -> str:
    """Every figure as SVG inside the page, once for each colour scheme."""
    dark = {name: figure for name, _, figure in drawings(results, baseline, "dark")}
    parts = []
    for name, caption, figure in drawings(results, baseline, "light"):
        parts.append(
            "<figure><picture>"
            f'<source media="(prefers-color-scheme: dark)" srcset="{data_url(dark[name])}">'
            f'<img src="{data_url(figure)}" alt="{html.escape(caption)}"></picture>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    return "".join(parts)


def data_url(figure: Figure) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(rendered(figure, "svg")).decode()


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells that start with '<' are markup already, others are escaped."""

    def cell(text: str) -> str:
        return text if text.startswith("<") else f"<td>{html.escape(text)}</td>"

    top = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(cell(text) for text in row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def turn_intervals(side: Results, kind: str) -> str:
    rows = []
    for k in range(side["counts"]["turns"]):
        cells = [interval_cell(side["by_turn"][metric][kind][k]) for metric in METRIC_TEXT]
        rows.append([str(k + 1), *cells])
    return grid(["turns", *METRIC_TEXT.values()], rows)


def interval_cell(row: Sequence[float | None]) -> str:
    if any(value is None for value in row):
        return "<td>not judged</td>"
    return f"<td>{row[0]:.2f}<span>{row[1]:.2f} .. {row[2]:.2f}</span></td>"


def verdicts(side: Results) -> str:
    turns = [str(k + 1) for k in range(side["counts"]["turns"])]
    rows = [["mean score", *(plain(value) for value in side["score_at_turn"])]]
    for name, shares in side["status_at_turn"].items():
        rows.append([name, *(f"{100 * share:.0f} %" for share in shares)])
    return grid(["turn", *turns], rows)


def task_rows(side: Results) -> str:
    rows = [
        [row["task"], *(plain(row[key]) for key in ("correct", "speedup", "best", "score"))]
        for row in side["per_task"]
    ]
    return grid(["task", "correct", "speedup (mean)", "speedup (best)", "score (mean)"], rows)


def plain(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write(folder: Path, results: Results, baseline: Results | None = None) -> None:
    """figures/*.png, figures/*.svg and report.html below `folder`."""
    figures(results, baseline, folder / "figures")
    (folder / "report.html").write_text(page(results, baseline), encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("error: give one folder that holds a results.json", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        print(f"error: no readable results.json in {folder}: {problem}", file=sys.stderr)
        return 2
    write(folder, results, results.get("baseline"))
    print(folder / "report.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
