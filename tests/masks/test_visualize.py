"""Pictures, terminal text and page of a report: what they show is what the report holds."""

import base64
import builtins
import itertools
import json
import os
import shutil
import subprocess
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from csa2_compiled.masks import visualize
from csa2_compiled.masks.page import MAX_HEADS, pack_sets
from csa2_compiled.masks.view_data import BlockOccupancy, LayerView, Lineage, MaskReport, ScoreHistogram
from csa2_compiled.masks.visualize import (
    CANDIDATE,
    FIGURES,
    IN_BOTH,
    IN_WINDOW,
    IS_SELECTED,
    NO_CANDIDATE,
    NOT_VISIBLE,
    VisualizationError,
    byte_labels,
    categories,
    filled,
    make_page,
    page_data,
    render_ascii,
    runs,
    to_dict,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH")


def make_view(layer, role, ratio, tokens, queries, heads=3, window=4, topk=5, by=None):
    """A view with random selections among random candidates (a reindex layer's) or all visible positions."""
    generator = torch.Generator().manual_seed(10 * (layer if by is None else by))
    query = torch.tensor(queries).unsqueeze(-1)
    recent = query - torch.arange(window)
    mass = torch.rand(heads, len(queries), 3, generator=torch.Generator().manual_seed(layer))
    blocks = BlockOccupancy("dense", 128, 128, torch.tensor([[0, 1, 2]], dtype=torch.int8), 2, (("tokens", 0),))
    selected = allowed = visible = scores = None
    if ratio:
        positions = tokens // ratio
        visible = ((query + 1) // ratio).flatten().int()
        allowed = torch.arange(positions) < visible.unsqueeze(-1)
        if role == "reindex" or by == 3:
            allowed &= torch.rand(allowed.shape, generator=generator) < 0.5
        values = torch.where(allowed, torch.rand(allowed.shape, generator=generator), float("-inf"))
        best = values.topk(min(topk, positions)).indices
        best = torch.where(allowed.gather(1, best), best, positions).sort().values
        selected = torch.where(best < positions, best, -1).int()
        threshold = torch.where(selected >= 0, values.gather(1, selected.clamp(min=0).long()), torch.inf).amin(-1)
        threshold = threshold.nan_to_num(posinf=float("nan"))
        counts = torch.randint(1, 9, (len(queries), 8), generator=generator, dtype=torch.int32)
        if role != "reuse":
            scores = ScoreHistogram(counts, threshold - 0.2, threshold + 0.3, threshold)
    else:
        mass[..., 2] = 0
    by = layer if by is None and ratio else by
    return LayerView(
        layer=layer,
        role=role,
        ratio=ratio,
        window=torch.where(recent >= 0, recent, -1).int(),
        selected=selected,
        allowed=allowed,
        visible=visible,
        mass=mass / mass.sum(-1, keepdim=True),
        scores=scores,
        lineage=Lineage(2, by, None, 2, 0.4, 0.1) if role == "reindex" else Lineage(by and 2, by),
        blocks=(blocks,),
    )


def make_report(text=b"Look: <b>\n</script> \xc3\xa9 and \t\x1b\xff back", queries=None, heads=3):
    """Four layers: window, full of ratio 2, reindex, and a reuse of that."""
    tokens = len(text)
    queries = range(tokens) if queries is None else queries
    schedule = [(0, "window", 0, None), (2, "full", 2, None), (3, "reindex", 2, None), (4, "reuse", 2, 3)]
    views = tuple(make_view(i, role, ratio, tokens, queries, heads, by=by) for i, role, ratio, by in schedule)
    return MaskReport("a <text>", {"weights": "made up"}, byte_labels(text), queries.start, len(queries), views)


def make_report_of_a_state(**options):
    """The same without attention and scores."""
    report = make_report(**options)
    views = tuple(replace(view, mass=None, scores=None) for view in report.layers)
    return replace(report, layers=views, absent="Not shown: attention mass and index scores, because of <reasons>.")


def test_labels_keep_a_label_a_byte():
    text = b"a\n\xc3\xa9\xe2\x82\xac\xff\x1b\t\xf0\x9f\x98\x80\xc3"
    labels = byte_labels(text)
    assert labels == ("a", "\n", "é", "·", "€", "·", "·", "\\xff", "\\x1b", "\t", "😀", "·", "·", "·", "\\xc3")
    assert len(labels) == len(text)


def test_runs_and_filled():
    assert runs(torch.tensor([True, True, False, True, False, False, True])) == [(0, 2), (3, 4), (6, 7)]
    assert runs(torch.zeros(3, dtype=torch.bool)) == runs(torch.zeros(0, dtype=torch.bool)) == []
    assert filled(torch.tensor([4, 2, -1])) == [2, 4]


def test_categories_stand_over_the_tokens_a_position_covers():
    report = make_report(queries=range(9, 20))
    for view in report.layers:
        kinds = categories(report, view)
        for row, query in enumerate(report.queries):
            window = set(filled(view.window[row]))
            covered = candidates = set()
            if view.ratio:
                covered = {2 * t + i for t in filled(view.selected[row]) for i in (0, 1)}
                candidates = {2 * t + i for t in view.allowed[row].nonzero().flatten().tolist() for i in (0, 1)}
            for token in range(len(report.tokens)):
                expected = NO_CANDIDATE if view.ratio and token <= query else NOT_VISIBLE
                expected = CANDIDATE if token in candidates else expected
                expected = IS_SELECTED if token in covered else expected
                expected = IN_WINDOW if token in window else expected
                expected = IN_BOTH if token in window & covered else expected
                assert kinds[row, token] == expected, (view.layer, query, token)


@pytest.mark.parametrize(("queries", "head"), [(range(5, 6), None), (range(0, 33), 1)])
@pytest.mark.parametrize("name", FIGURES)
def test_figures_render_without_warnings(name, queries, head, tmp_path):
    report = make_report(b"$x_1^2$ " + b"plain text \n" * 2 + "漢字 😀 é\n".encode(), queries=queries)
    report = replace(report, title="$a 漢$")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = FIGURES[name](report, head=head)
        figure.savefig(tmp_path / "figure.png", dpi=60)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert figure.legends or name == "lineage"


@pytest.mark.parametrize("name", FIGURES)
def test_figures_say_what_is_absent_and_why(name, tmp_path):
    report = make_report_of_a_state()
    if name in ("mass", "scores"):
        with pytest.raises(VisualizationError, match=r"to draw. Not shown: .* because of <reasons>"):
            FIGURES[name](report)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = FIGURES[name](report)
        figure.savefig(tmp_path / "figure.png", dpi=60)
    assert "because of <reasons>." in " ".join(figure.get_suptitle().split())
    assert "attention (" not in figure.get_suptitle()


@pytest.mark.parametrize("name", FIGURES)
def test_titles_stay_within_the_figure(name):
    report = replace(make_report(), title="a long name of a file " * 12)
    figure = FIGURES[name](report)
    figure.canvas.draw()
    box, (width, height) = figure._suptitle.get_window_extent(), figure.get_size_inches() * figure.dpi
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height


# What dichromats see of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
DICHROMACY = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def seen_in_lab(colour, kind):
    """A colour "#rrggbb" as CIE L*a*b* (D65), seen with that kind of colour vision."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(DICHROMACY[kind]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / (to_xyz @ np.ones(3))
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", DICHROMACY)
def test_colours_are_apart_for_every_kind_of_colour_vision(kind):
    legends = ([colour for _, colour in visualize.CATEGORIES.values()], visualize.MASS_COLOURS, visualize.BLOCK_KINDS)
    for legend in legends:
        colours = legend if isinstance(legend, list) else legend.values()
        for one, other in itertools.combinations([seen_in_lab(colour, kind) for colour in colours], 2):
            assert np.linalg.norm(one - other) > 20  # about 2 is just noticeable


def test_large_maps_keep_every_selected_cell():
    cells = torch.zeros(1500, 1030, dtype=torch.int8)
    cells[1499, 1029] = cells[7, 0] = IS_SELECTED
    joined = visualize._join_cells(cells)
    assert max(joined.shape) <= 512
    assert (joined == IS_SELECTED).sum() == 2


def test_figures_without_matplotlib_name_the_extra(monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    for draw in FIGURES.values():
        with pytest.raises(VisualizationError, match=r"csa2-compiled\[viz\]"):
            draw(make_report())
    assert render_ascii(make_report(), 8)


def test_a_query_that_was_not_recorded_is_refused():
    report = make_report(queries=range(4, 9))
    for show in (render_ascii, visualize.draw_scores, visualize.draw_text):
        with pytest.raises(VisualizationError, match="query 9 was not recorded; 4 to 8 were"):
            show(report, 9)


def test_ascii_marks_what_the_query_sees():
    report = make_report(b"0123456789abcdefghijABCDEFGHIJ")
    shown = render_ascii(report, 25, width=40).splitlines()
    at = [i for i, line in enumerate(shown) if line == "0123456789abcdefghijABCDEF"]
    assert len(at) == len(report.layers)
    signs = {NO_CANDIDATE: " ", NOT_VISIBLE: " ", CANDIDATE: ".", IN_WINDOW: "-", IS_SELECTED: "#", IN_BOTH: "="}
    for view, line in zip(report.layers, at, strict=True):
        expected = "".join(signs[kind] for kind in categories(report, view)[25, :25].tolist()) + "^"
        assert shown[line + 1] == expected
    assert all(len(line) <= 40 for line in shown if line.startswith("    "))
    assert "\x1b" not in render_ascii(make_report(), 30)


def test_text_and_data_say_what_is_absent_and_why():
    report = make_report_of_a_state()
    shown = render_ascii(report, 25, width=200).splitlines()
    assert shown[1] == report.absent
    assert not any("attention (" in line for line in shown)
    values = json.loads(json.dumps(to_dict(report), allow_nan=False))
    assert values["absent"] == report.absent
    for layer in values["layers"]:
        assert all(query["mass"] is query["scores"] is None for query in layer["queries"])
    data = page_data(report)
    assert data["absent"] == report.absent
    assert all((layer["mass"], layer["scores"], layer["heads"]) == (None, None, []) for layer in data["layers"])
    assert to_dict(make_report())["absent"] is page_data(make_report())["absent"] is None


class Page(HTMLParser):
    """The parts of a page that tests look at: scripts by type, ids, references to anything outside."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.ids, self.references, self.current = {}, [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.references += [values[name] for name in ("src", "href") if name in values]
        self.current = values.get("type", "code") if tag == "script" else None

    def handle_endtag(self, tag):
        self.current = None

    def handle_data(self, data):
        if self.current is not None:
            self.scripts[self.current] = self.scripts.get(self.current, "") + data


def unpack_sets(text: str) -> list[list[int]]:
    packed, sets, at = base64.b64decode(text), [], 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = packed[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(packed):
        members, end = [], 0
        for _ in range(number()):
            first = end + number()
            end = first + number()
            members += range(first, end)
        sets.append(members)
    return sets


def test_sets_survive_packing():
    sets = [[], [(0, 1)], [(3, 4), (4, 5), (200, 201)], [(0, 4096)], [(5, 300), (100000, 100001)]]
    expected = [[i for first, stop in members for i in range(first, stop)] for members in sets]
    assert unpack_sets(pack_sets(sets)) == expected


def test_the_page_holds_the_data_and_nothing_from_outside():
    report = make_report(queries=range(3, 20))
    text = make_page(report, head=2)
    page = Page(text)
    assert page.references == ["data:,"]
    assert "http:" not in text
    assert "https:" not in text
    assert len(page.ids) == len(set(page.ids))
    data = json.loads(page.scripts["application/json"])
    assert data == json.loads(json.dumps(page_data(report, 2)))
    assert data["tokens"] == list(report.tokens)
    assert (data["firstQuery"], data["numQueries"], data["head"]) == (3, 17, 2)
    for view, layer in zip(report.layers, data["layers"], strict=True):
        window = np.frombuffer(base64.b64decode(layer["window"]), np.int32)
        assert window.tolist() == [len(filled(row)) for row in view.window]
        shares = np.frombuffer(base64.b64decode(layer["mass"]), np.uint16).reshape(-1, 17, 2) / 65535
        np.testing.assert_allclose(shares[1:], view.mass[..., :2].numpy(), atol=1e-5)
        np.testing.assert_allclose(shares[0], view.mass.mean(0)[:, :2].numpy(), atol=1e-5)
        if view.ratio == 0:
            assert layer["selection"] is None
            continue
        stored = data["selections"][layer["selection"]]
        assert unpack_sets(stored["selected"]) == [filled(row) for row in view.selected]
        assert unpack_sets(stored["allowed"]) == [row.nonzero().flatten().tolist() for row in view.allowed]
    assert data["layers"][2]["selection"] == data["layers"][3]["selection"] == "3"  # stored once
    for control in ("layer", "query", "head", "text"):
        assert control in page.ids


def test_a_page_with_many_heads_keeps_the_chosen_one():
    data = page_data(make_report(heads=MAX_HEADS + 4), head=MAX_HEADS + 1)
    assert data["layers"][0]["heads"] == [*range(MAX_HEADS - 1), MAX_HEADS + 1]


def test_the_dictionary_is_json_and_says_the_same():
    report = make_report(queries=range(3, 20))
    values = json.loads(json.dumps(to_dict(report), allow_nan=False))
    for view, layer in zip(report.layers, values["layers"], strict=True):
        assert (layer["layer"], layer["role"], layer["ratio"]) == (view.layer, view.role, view.ratio)
        for row, query in enumerate(layer["queries"]):
            first, stop = query["window"]
            assert list(range(first, stop)) == filled(view.window[row])
            assert query["selected"] == ([] if view.selected is None else filled(view.selected[row]))
            assert sum(query["mass"]["mean"]) == pytest.approx(1, abs=1e-4)
    assert values["layers"][1]["position_text"][0] == "Lo"
    assert values["layers"][0]["blocks"][0]["saved"] == pytest.approx(1 / 3, abs=1e-5)


def run_in_chromium(page, script, tmp_path):
    """Run a script at the end of a page in headless Chromium; returns what it leaves in `result`."""
    code = f"<script>const result = {{}};\n{script}\nconst out = document.createElement('pre');out.id = 'result';"
    code += "out.textContent = JSON.stringify(result);document.body.append(out);</script></body>"
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", code), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1200,800", "--dump-dom", path.as_uri()]
    home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=home)
    _, _, found = done.stdout.rpartition('<pre id="result">')
    assert found, done.stdout[-500:] + done.stderr[-500:]

    class Unescape(HTMLParser):
        text = ""

        def handle_data(self, data):
            self.text += data

    parser = Unescape()
    parser.feed(found.partition("</pre>")[0])
    return json.loads(parser.text)


CLASSES_OF = """
const having = (name) => csa2.spans.flatMap((span, i) => span.classList.contains(name) ? [i] : []);
const lit = () => ({q: having("q"), w: having("w"), s: having("s"), c: having("c"), f: having("f")});
"""


def expected_classes(report, layer, query):
    """What must light up, from the JSON."""
    values = layer["queries"][query - report.first_query]
    ratio = max(layer["ratio"], 1)
    over = [ratio * t + i for t in values["selected"] for i in range(ratio)]
    candidates = [i for first, stop in values["candidates"] for i in range(first * ratio, stop * ratio)]
    first, stop = values["window"]
    after = list(range(query + 1, len(report.tokens)))
    return {"q": [query], "w": list(range(first, stop)), "s": over, "c": candidates, "f": after}


@needs_chromium
def test_hover_lights_up_exactly_the_indices_of_the_json(tmp_path):
    report = make_report()
    wanted = [(layer, query) for layer in range(4) for query in (0, 1, 13, 30)]
    script = CLASSES_OF + f"result.seen = {json.dumps(wanted)}.map(([layer, query]) => {{"
    script += """
      document.getElementById("layer").value = layer;
      document.getElementById("layer").dispatchEvent(new Event("input"));
      csa2.spans[query].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      return lit();
    });"""
    seen = run_in_chromium(make_page(report), script, tmp_path)["seen"]
    layers = to_dict(report)["layers"]
    for (layer, query), lit in zip(wanted, seen, strict=True):
        assert lit == expected_classes(report, layers[layer], query), (layer, query)


@needs_chromium
def test_a_page_without_attention_says_so_and_lights_up_the_same(tmp_path):
    report = make_report_of_a_state()
    script = (
        CLASSES_OF
        + """
    const read = (id) => document.getElementById(id).textContent;
    result.hidden = ["of-head", "mass", "mass-text", "heads"].filter(
      (id) => document.getElementById(id).getClientRects().length === 0);
    result.absent = read("absent");
    result.layers = [1, 2, 0].map((layer) => {
      csa2.setLayer(layer);
      csa2.setQuery(25);
      return [read("score-text"), lit()];
    });
    """
    )
    result = run_in_chromium(make_page(report), script, tmp_path)
    assert result["hidden"] == ["of-head", "mass", "mass-text", "heads"]
    assert result["absent"] == report.absent
    layers = to_dict(report)["layers"]
    for layer, (words, lit) in zip((1, 2, 0), result["layers"], strict=True):
        assert words.startswith("Absent" if layer else "A window layer")
        assert lit == expected_classes(report, layers[layer], 25)


@needs_chromium
def test_keys_move_the_query_and_the_layer(tmp_path):
    report = make_report(queries=range(2, 30))
    script = (
        CLASSES_OF
        + """
    const text = document.getElementById("text"), press = (key) =>
      text.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    text.focus();
    result.focused = document.activeElement === text;
    result.moves = ["Home", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "PageUp", "ArrowDown"].map(
      (key) => { press(key); return having("q")[0]; });
    press("ArrowUp");
    const names = () => document.getElementById("layer-name").textContent;
    result.layers = ["[", "[", "[", "[", "]"].map((key) => { press(key); return names(); });
    result.status = document.getElementById("status").textContent;
    csa2.spans[9].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    result.held = having("q")[0];  // keys hold the query
    press("Enter");
    csa2.spans[9].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    csa2.spans[0].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));  // not recorded
    result.released = having("q")[0];
    result.classes = lit();
    """
    )
    result = run_in_chromium(make_page(report), script, tmp_path)
    assert result["focused"]
    assert result["moves"][:7] == [2, 3, 4, 3, 29, 29, 2]
    assert result["moves"][7] > 9  # the line below
    names = [view.name for view in report.layers]
    assert result["layers"] == [names[2], names[1], names[0], names[0], names[1]]
    assert names[1] in result["status"]
    assert result["held"] == 2
    assert result["released"] == 9
    assert result["classes"] == expected_classes(report, to_dict(report)["layers"][1], 9)


@needs_chromium
def test_a_long_text_opens_and_moves_quickly(tmp_path):
    page = make_page(make_report(b"some words to read, line by line\n" * 125))
    script = """
    result.opened = performance.now();
    const begun = performance.now();
    for (let i = 0; i < 200; i++) { csa2.setQuery((i * 997) % csa2.spans.length); document.body.offsetHeight; }
    result.move = (performance.now() - begun) / 200;
    result.spans = csa2.spans.length;
    """
    result = run_in_chromium(page, script, tmp_path)
    assert result["spans"] == 4125
    assert result["opened"] < 2000
    assert result["move"] < 100  # milliseconds, layout included; about 10 where nothing else runs
