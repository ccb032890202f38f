"""Draws what a query looks at, and why: figures, a text for the terminal, and (in `page`) an interactive page.

The data is a `MaskReport`, which `csa2_compiled.mask_report` collects from a model. Figures need matplotlib, the
`viz` extra; without it their functions raise VisualizationError, and the rest works.
"""

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from csa2_compiled.masks.page import make_page, page_data
from csa2_compiled.masks.view_data import (
    BlockOccupancy,
    LayerView,
    Lineage,
    MaskReport,
    ScoreHistogram,
    byte_labels,
    filled,
    runs,
    to_dict,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = [
    "FIGURES",
    "BlockOccupancy",
    "LayerView",
    "Lineage",
    "MaskReport",
    "ScoreHistogram",
    "VisualizationError",
    "byte_labels",
    "categories",
    "draw_blocks",
    "draw_lineage",
    "draw_map",
    "draw_mass",
    "draw_scores",
    "draw_text",
    "filled",
    "import_matplotlib",
    "make_page",
    "page_data",
    "render_ascii",
    "runs",
    "to_dict",
]

# What a query makes of a token, in the order in which a cell that stands for several shows the most telling one.
NOT_VISIBLE, NO_CANDIDATE, CANDIDATE, IN_WINDOW, IS_SELECTED, IN_BOTH = range(6)
# After Okabe and Ito: apart for every kind of colour vision.
CATEGORIES = {
    NOT_VISIBLE: ("not visible", "#ffffff"),
    NO_CANDIDATE: ("visible, no candidate", "#c0c0c0"),
    CANDIDATE: ("candidate", "#9fd6f7"),
    IN_WINDOW: ("window", "#0072b2"),
    IS_SELECTED: ("selected", "#e69f00"),
    IN_BOTH: ("window and selected", "#000000"),
}
MASS_COLOURS = {"sink": "#8a8a8a", "window": "#0072b2", "selected": "#e69f00"}
BLOCK_KINDS = {"empty (skipped)": "#eeeeee", "partial": "#56b4e9", "full": "#0072b2"}
ASCII_MARKS = {NOT_VISIBLE: " ", NO_CANDIDATE: " ", CANDIDATE: ".", IN_WINDOW: "-", IS_SELECTED: "#", IN_BOTH: "="}
FONT = "DejaVu Sans Mono"  # matplotlib brings it
_MAX_CELLS = 512  # a side of a drawn map; more are joined
_PANEL = 2.9  # inches
_TEXT_COLUMNS, _TEXT_LINES = 96, 40


class VisualizationError(RuntimeError):
    """A picture that cannot be drawn here; the message says what is missing."""


def categories(report: MaskReport, view: LayerView) -> Tensor:
    """What each recorded query of a layer makes of each token, int8 [Q, S]; see `CATEGORIES`.

    A compressed position stands over the tokens it covers; those of an incomplete group are visible and no candidate
    (a window layer has no candidates at all: what is outside of its window is not visible to it).
    """
    tokens, queries = len(report.tokens), report.num_queries
    kinds = torch.full((queries, tokens), NOT_VISIBLE, dtype=torch.int8)
    if view.ratio:
        kinds[torch.arange(tokens) <= torch.tensor(report.queries).unsqueeze(-1)] = NO_CANDIDATE
    selected = torch.zeros(queries, tokens, dtype=torch.bool)
    if view.selected is not None and view.allowed is not None:
        kinds[_over_tokens(view.allowed, view.ratio, tokens)] = CANDIDATE
        selected = _over_tokens(_members(view.selected, view.allowed.shape[1]), view.ratio, tokens)
    window = _members(view.window, tokens)
    kinds[selected] = IS_SELECTED
    kinds[window] = IN_WINDOW
    kinds[window & selected] = IN_BOTH
    return kinds


def render_ascii(report: MaskReport, query: int, width: int = 100, head: int | None = None) -> str:
    """What one query looks at, for a terminal: its layers' lineage and attention, then the text, each line with a
    line of marks below it. query: one of the recorded. width: columns, at least 20. head: None is the mean of all."""
    row = _row_of(report, query)
    lines = [f"{report.title}: query {query} {_quoted(report.tokens[query])}"]
    lines += [*textwrap.wrap(report.absent, max(width, 20)), ""]
    for view in report.layers:
        lines.append(f"{view.name}: {_lineage_words(view)}")
        lines += [f"  {words}" for words in _mass_words(view, row, head)]
        lines += [f"  {_block_words(blocks)}" for blocks in view.blocks]
        if view.selected is not None:
            # A position and its text stay on one line.
            texts = [f"{t} {_quoted(report.text_of(view, t))}".replace(" ", "\0") for t in filled(view.selected[row])]
            wrapper = textwrap.TextWrapper(max(width, 20), "  selected: ", "    ", break_on_hyphens=False)
            lines += [line.replace("\0", " ") for line in wrapper.wrap(", ".join(texts) or "nothing")]
        lines.append("")
        lines += _marked_text(report, categories(report, view)[row].tolist(), query, max(width, 20))
        lines.append("")
    marks = {
        "^": "the query",
        **{ASCII_MARKS[k]: CATEGORIES[k][0] for k in (IN_WINDOW, IS_SELECTED, IN_BOTH, CANDIDATE)},
    }
    return "\n".join([*lines, "Marks: " + ", ".join(f"{mark} {meaning}" for mark, meaning in marks.items())])


def draw_map(report: MaskReport, query: int | None = None, head: int | None = None) -> "Figure":
    """A panel a layer: recorded queries downwards, tokens to the right, coloured as `CATEGORIES`, one legend.

    query and head do not matter here. Raises VisualizationError, as all figures do, without matplotlib.
    """
    plotting = import_matplotlib()
    figure, panels = _panels(report, len(report.layers), height=_PANEL)
    colours = plotting.colors.ListedColormap([colour for _, colour in CATEGORIES.values()])
    extent = (0, len(report.tokens), report.queries.stop, report.first_query)
    for view, axes in zip(report.layers, panels, strict=True):
        cells = _join_cells(categories(report, view))
        axes.imshow(
            cells.numpy(), cmap=colours, vmin=0, vmax=IN_BOTH, extent=extent, interpolation="nearest", aspect="auto"
        )
        _tick_whole_numbers(axes.xaxis, axes.yaxis)
        axes.set_title(view.name, fontsize=10)
    _label_outer(panels, "token", "query")
    _legend(figure, CATEGORIES.values())
    return figure


def draw_lineage(report: MaskReport, query: int | None = None, head: int | None = None) -> "Figure":
    """A line a layer: who published its keys, who selected, how much each new selection shares with the one before."""
    import_matplotlib()
    from matplotlib.figure import Figure

    rows = len(report.layers)
    columns = {"window": 0, "full": 1, "reindex": 2, "reuse": 3}
    colours = {"window": "#8a8a8a", "full": "#0072b2", "reindex": "#e69f00", "reuse": "#56b4e9"}
    figure = Figure(figsize=(9, 1.3 + 0.46 * rows), layout="constrained")
    axes = figure.add_subplot()
    place = {view.layer: (columns[view.role], y) for y, view in enumerate(report.layers)}
    for view in report.layers:
        source = view.lineage.kv_from if view.lineage.selected_by == view.layer else view.lineage.selected_by
        if source in place and source != view.layer:
            arrow = {"arrowstyle": "->", "color": "#5d5d5d", "shrinkA": 8, "shrinkB": 8}
            axes.annotate("", place[view.layer], place[source], arrowprops=arrow)
        x, y = place[view.layer]
        axes.plot(x, y, "o", markersize=11, color=colours[view.role])
        axes.annotate(textwrap.fill(_lineage_words(view), 64), (3.35, y), va="center", fontsize=9)
    axes.set_xticks(list(columns.values()), list(columns), fontsize=10)
    axes.set_yticks(range(rows), [str(view.layer) for view in report.layers], fontsize=10)
    axes.set_ylabel("layer")
    axes.set(xlim=(-0.4, 9.2), ylim=(rows - 0.5, -0.5))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _title(figure, report, f"{report.title}: where selections come from")
    return figure


def draw_blocks(report: MaskReport, query: int | None = None, head: int | None = None) -> "Figure":
    """Two panels, dense and slots, for every layer whose blocks differ from those before: which blocks FlexAttention
    skips, and in which it visits every pair; whole sequence."""
    plotting = import_matplotlib()
    shown: list[tuple[list[int], BlockOccupancy]] = []
    for view in report.layers:
        for blocks in view.blocks:
            alike = [layers for layers, other in shown if _same_blocks(blocks, other)]
            if alike:
                alike[0].append(view.layer)
            else:
                shown.append(([view.layer], blocks))
    figure, panels = _panels(report, len(shown), height=_PANEL, columns=4)
    colours = plotting.colors.ListedColormap(list(BLOCK_KINDS.values()))
    for (layers, blocks), axes in zip(shown, panels, strict=True):
        rows, columns = blocks.kinds.shape
        extent = (0, columns, rows, 0)
        kinds = _join_cells(blocks.kinds).numpy()
        axes.imshow(kinds, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest", aspect="auto")
        for _, first in blocks.sections[1:]:
            axes.axvline(first / blocks.key_block, color="black", linewidth=1, linestyle=":")
        saved = f"{blocks.visited} of {rows * columns} blocks, {100 * blocks.saved:.0f} % saved"
        names = textwrap.shorten(", ".join(map(str, layers)), 20, placeholder=" ...")
        axes.set_title(f"layer{'s' * (len(layers) > 1)} {names}: {blocks.layout}\n{saved}", fontsize=9)
        axes.set_xlabel(f"{', '.join(name for name, _ in blocks.sections)} / {blocks.key_block}", fontsize=8)
        axes.set_ylabel("query" if blocks.layout == "slots" else f"queries / {blocks.query_block}", fontsize=8)
        axes.tick_params(labelsize=8)
        _tick_whole_numbers(axes.xaxis, axes.yaxis)
    _legend(figure, list(BLOCK_KINDS.items()))
    return figure


def draw_mass(report: MaskReport, query: int | None = None, head: int | None = None) -> "Figure":
    """A panel a layer: how each query's attention is split into sink, window and selection; one head or the mean."""
    import_matplotlib()
    if any(view.mass is None for view in report.layers):
        raise VisualizationError(f"there is no attention mass to draw. {report.absent}")
    figure, panels = _panels(report, len(report.layers), height=2.1)
    places = list(report.queries) if report.num_queries > 1 else [report.first_query, report.first_query + 1]
    for view, axes in zip(report.layers, panels, strict=True):
        mass = view.head_mass(head)
        assert mass is not None
        mass = mass if report.num_queries > 1 else mass.expand(2, -1)
        axes.stackplot(places, *mass.T.numpy(), colors=list(MASS_COLOURS.values()), linewidth=0)
        axes.set(xlim=(places[0], places[-1]), ylim=(0, 1))
        _tick_whole_numbers(axes.xaxis)
        axes.set_title(view.name, fontsize=10)
    _label_outer(panels, "query", f"attention, {_head_words(head)}")
    _legend(figure, list(MASS_COLOURS.items()))
    return figure


def draw_scores(report: MaskReport, query: int | None = None, head: int | None = None) -> "Figure":
    """A panel a layer that selects: histogram of the index scores one query had to choose among, and the threshold.

    query: one of the recorded, None for the last.
    """
    import_matplotlib()
    query = report.queries[-1] if query is None else query
    row = _row_of(report, query)
    views = [view for view in report.layers if view.scores is not None]
    if not views:
        reason = report.absent or "No recorded layer makes a selection."
        raise VisualizationError(f"there are no index scores to draw. {reason}")
    figure, panels = _panels(report, len(views), height=2.4, title=f"{report.title}, query {query}")
    for view, axes in zip(views, panels, strict=True):
        scores = view.scores
        assert scores is not None
        axes.set_title(view.name, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if torch.isnan(scores.threshold[row]):
            axes.annotate("nothing to select yet", (0.5, 0.5), xycoords="axes fraction", ha="center")
            continue
        low, high, threshold = (float(value[row]) for value in (scores.low, scores.high, scores.threshold))
        bins = scores.counts.shape[1]
        width = (high - low) / bins or 1.0
        lefts = [low + i * width for i in range(bins)]
        colours = [MASS_COLOURS["selected" if left + width > threshold else "sink"] for left in lefts]
        axes.bar(lefts, scores.counts[row].tolist(), width * 0.92, align="edge", color=colours)
        axes.axvline(threshold, color="black", linestyle="--", linewidth=1.2)
        axes.margins(y=0.1)
    _label_outer(panels, "index score", "positions")
    _legend(figure, [("holds selected positions", MASS_COLOURS["selected"]), ("not selected", MASS_COLOURS["sink"])])
    return figure


def draw_text(report: MaskReport, query: int | None = None, head: int | None = None) -> "Figure":
    """The text before one query as the last recorded layer sees it, a cell a token, and its attention in the title.

    query: one of the recorded, None for the last. At most 40 lines are drawn, the newest.
    """
    plotting = import_matplotlib()
    from matplotlib.figure import Figure

    query = report.queries[-1] if query is None else query
    view, row = report.layers[-1], _row_of(report, query)
    lines = _lay_out_text(report.tokens[: query + 1], _TEXT_COLUMNS if report.bytes_text else 24)[-_TEXT_LINES:]
    kinds = categories(report, view)[row]
    columns = max(len(line) for line in lines)
    cells = torch.zeros(len(lines), columns, dtype=torch.int8)
    width = max(8.0, 0.085 * columns)
    figure = Figure(figsize=(width, 1.1 + 0.22 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    style: dict[str, Any] = {"family": FONT, "ha": "center", "va": "center"}
    longest = max(len(report.tokens[token]) for line in lines for token in line)
    style |= {"fontsize": min(10.5, 72 * width / columns / 0.65 / longest), "parse_math": False}
    for y, line in enumerate(lines):
        for x, token in enumerate(line):
            kind = int(kinds[token])
            cells[y, x] = kind
            dark = kind in (IN_WINDOW, IN_BOTH)
            label = report.tokens[token].replace("\n", "↵").replace("\t", "→")
            axes.text(x + 0.5, y + 0.52, _drawable(label, FONT), color="white" if dark else "black", **style)
    colours = plotting.colors.ListedColormap([colour for _, colour in CATEGORIES.values()])
    extent = (0, columns, len(lines), 0)
    axes.imshow(
        cells.numpy(), cmap=colours, vmin=0, vmax=IN_BOTH, extent=extent, aspect="auto", interpolation="nearest"
    )
    axes.add_patch(plotting.patches.Rectangle((len(lines[-1]) - 1, len(lines) - 1), 1, 1, fill=False, ec="red", lw=2))
    axes.set_axis_off()
    _title(figure, report, "\n".join([f"{view.name}, query {query} (red)", *_mass_words(view, row, head)]))
    _legend(figure, list(CATEGORIES.values())[1:])
    return figure


FIGURES: dict[str, Callable[..., "Figure"]] = {
    "map": draw_map,
    "text": draw_text,
    "lineage": draw_lineage,
    "mass": draw_mass,
    "scores": draw_scores,
    "blocks": draw_blocks,
}


def import_matplotlib() -> Any:
    """The matplotlib package with what figures need of it. Raises VisualizationError where it is missing."""
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as error:
        raise VisualizationError("figures need matplotlib; pip install 'csa2-compiled[viz]' brings it") from error
    return matplotlib


def _drawable(text: str, family: str = "DejaVu Sans") -> str:
    """The text with a box for every character that the font has not, about which matplotlib would warn."""
    from matplotlib.font_manager import findfont, get_font

    glyphs = get_font(findfont(family)).get_charmap()
    return "".join(character if ord(character) in glyphs else "□" for character in text)


def _panels(
    report: MaskReport, count: int, height: float, columns: int = 3, title: str | None = None
) -> tuple["Figure", list["Axes"]]:
    """A figure with a title and `count` panels, in rows of at most `columns`."""
    from matplotlib.figure import Figure

    across = min(count, columns)
    down = -(-count // across)
    figure = Figure(figsize=(max(across * 3.4, 6.4), 1.0 + down * height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for axes in grid[count:]:
        axes.remove()
    _title(figure, report, title or report.title)
    return figure, grid[:count]


def _title(figure: "Figure", report: MaskReport, title: str) -> None:
    """A title, as many lines as the figure's width needs, and below it what is not shown and why."""
    width, height = figure.get_size_inches()
    lines = [line for part in (*title.split("\n"), report.absent) for line in textwrap.wrap(part, int(12 * width))]
    figure.set_size_inches(width, height + 0.17 * (len(lines) - 1))
    figure.suptitle("\n".join(map(_drawable, lines)), fontsize=10, parse_math=False)


def _tick_whole_numbers(*scales: "Axis") -> None:
    from matplotlib.ticker import MaxNLocator

    for scale in scales:
        scale.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _label_outer(panels: Sequence["Axes"], x: str, y: str) -> None:
    for axes in panels:
        axes.tick_params(labelsize=8)
        place = axes.get_subplotspec()
        if place is not None and place.is_first_col():
            axes.set_ylabel(y, fontsize=9)
        axes.set_xlabel(x, fontsize=9)


def _legend(figure: "Figure", entries: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, edgecolor="#5d5d5d", linewidth=0.6, label=name) for name, colour in entries]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(len(patches), 3), fontsize=9, frameon=False)


def _join_cells(cells: Tensor) -> Tensor:
    """At most `_MAX_CELLS` a side, where a joined cell shows the highest value."""
    rows, columns = (-(-size // _MAX_CELLS) for size in cells.shape)
    if rows == columns == 1:
        return cells
    padded = F.pad(cells, (0, -cells.shape[1] % columns, 0, -cells.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))


def _same_blocks(one: BlockOccupancy, other: BlockOccupancy) -> bool:
    return one.layout == other.layout and one.sections == other.sections and torch.equal(one.kinds, other.kinds)


def _members(indices: Tensor, count: int) -> Tensor:
    """bool [Q, count]: which numbers each row of an int [Q, slots] holds, -1 standing for none."""
    members = torch.zeros(indices.shape[0], count + 1, dtype=torch.bool)
    return members.scatter(1, torch.where(indices >= 0, indices, count).long(), True)[:, :-1]


def _over_tokens(positions: Tensor, ratio: int, tokens: int) -> Tensor:
    """bool [Q, T] of compressed positions as bool [Q, tokens]; the tokens of an incomplete group stay False."""
    covered = positions.repeat_interleave(ratio, dim=1)
    return F.pad(covered, (0, tokens - covered.shape[1]))


def _row_of(report: MaskReport, query: int) -> int:
    if query not in report.queries:
        recorded = f"{report.queries.start} to {report.queries.stop - 1}"
        raise VisualizationError(f"query {query} was not recorded; {recorded} were")
    return query - report.first_query


def _quoted(text: str) -> str:
    return "'" + text.replace("\n", "\\n").replace("\t", "\\t") + "'"


def _mass_words(view: LayerView, row: int, head: int | None) -> list[str]:
    """How the attention of one recorded query is split, in one line; none where it is not known."""
    mass = view.head_mass(head)
    if mass is None:
        return []
    sink, window, selected = (100 * share for share in mass[row].tolist())
    shares = f"sink {sink:.1f} %, window {window:.1f} %, selected {selected:.1f} %"
    return [f"attention ({_head_words(head)}): {shares}"]


def _head_words(head: int | None) -> str:
    return "mean of heads" if head is None else f"head {head}"


def _lineage_words(view: LayerView) -> str:
    lineage = view.lineage
    if lineage.selected_by is None:
        return "window only"
    if lineage.selected_by != view.layer:
        return f"reuses the selection of layer {lineage.selected_by}"
    words = "publishes its keys and selects"
    if lineage.kv_from != view.layer:
        words = f"reindexes the keys of layer {lineage.kv_from}"
    if lineage.within is not None:
        words += f" among the candidates of layer {lineage.within}"
    if lineage.overlap is not None and lineage.chance is not None:
        shared = f"{100 * lineage.overlap:.0f} % as layer {lineage.compared_with}"
        words += f"; {shared} (by chance {100 * lineage.chance:.0f} %)"
    return words


def _block_words(blocks: BlockOccupancy) -> str:
    counts = f"{blocks.count(2)} full, {blocks.count(1)} partial, {blocks.count(0)} empty"
    beyond = f"{100 * blocks.saved_beyond_causal:.1f} % beyond causality"
    return f"{blocks.layout} blocks: {counts}; {100 * blocks.saved:.1f} % saved, {beyond}"


def _lay_out_text(tokens: Sequence[str], columns: int) -> list[list[int]]:
    """Token indices in lines: a line ends with its newline or when it is full."""
    lines: list[list[int]] = [[]]
    for i, token in enumerate(tokens):
        if len(lines[-1]) == columns:
            lines.append([])
        lines[-1].append(i)
        if token == "\n" and i + 1 < len(tokens):
            lines.append([])
    return lines


def _marked_text(report: MaskReport, kinds: list[int], query: int, width: int) -> list[str]:
    """The text up to the query, each line that has a mark followed by a line of marks."""
    spacer = "" if report.bytes_text else " "
    widest = max(len(token) for token in report.tokens) if spacer else 1
    lines = []
    for line in _lay_out_text(report.tokens[: query + 1], width // (widest + len(spacer))):
        text = marks = ""
        for i in line:
            token = report.tokens[i].replace("\n", "↵").replace("\t", "→") + spacer
            text += token
            marks += ("^" if i == query else ASCII_MARKS[kinds[i]]) * (len(token) - len(spacer)) + spacer
        lines += [text, marks] if marks.strip() else [text]
    return [line.rstrip() for line in lines]
