"""The HTML report: what it says is worked out by hand, and the page needs nothing but itself."""

# ruff: noqa: RUF001 - the signs are those of the report
import base64
import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from terapipe_ds.bench import run
from terapipe_ds.bench.report import ReportError, load_result, plots, render_page, write_report
from terapipe_ds.bench.report.data import read_result
from terapipe_ds.bench.report.page import SETTINGS, timeline_pair
from terapipe_ds.bench.report.text import headline, notes
from terapipe_ds.cli import main
from terapipe_ds.plan import SlicePlan
from terapipe_ds.schedule import build
from terapipe_ds.simulator import UnitCosts, simulate
from terapipe_ds.timeline import Timeline, TimelineError, interactive
from tests.unit.timeline.drawn_texts import overlaps

LENGTH = 2048
KEPT = load_result(Path(__file__).parents[3] / "docs/results/2026-11-22-bench-cpu-2stage-epyc.json")


def row(system: str = "terapipe", schedule: str = "1f1b", accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """A hand-made run with every required key."""
    figures = {
        "system": system, "schedule": schedule, "slices": [LENGTH], "accumulation": accumulation, "stages": 2,
        "step_s": 2.0, "step_s_all": [1.9, 2.0, 2.1], "tokens_per_s": 1024.0, "bound_s": 1.8, "predicted_s": None,
        "bubble": 0.25, "peak_bytes": [3 * 2**30, 2 * 2**30], "exposed_comm_s": 0.01, "loss": 10.5,
    }  # fmt: skip
    return figures | changes


def failed(why: str, system: str = "torch", schedule: str = "zbv") -> dict[str, Any]:
    return {"system": system, "schedule": schedule, "slices": [LENGTH], "accumulation": 1, "stages": 2, "error": why}


def result(*runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"machine": {"cpu": "Example"}, "preset": "cpu-2stage", "runs": list(runs), **changes}


def with_timeline(run: dict[str, Any], stages: int = 2) -> dict[str, Any]:
    slices = len(run["slices"])
    simulated = simulate(build(run["schedule"], stages, 1, slices), SlicePlan((8,) * slices), UnitCosts(8 * slices))
    return run | {"timeline": Timeline(stages, simulated.events).to_json()}


VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps attributes, ids and the texts of table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.data: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in {tag}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.data.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def row(self, start: str) -> list[str]:
        found = [cells for cells in self.rows if cells[0].startswith(start)]
        assert len(found) == 1, found
        return found[0]


def page_of(data: dict[str, Any]) -> Page:
    return Page(render_page(data))


@pytest.fixture(scope="module")
def large() -> str:
    """The page of a real run."""
    return render_page(KEPT)


STOCK = row("deepspeed", step_s=2.0, step_s_all=[1.9, 2.0, 2.2])
SLICED = row(
    schedule="seq1f1b", slices=[512] * 4, step_s=1.25, step_s_all=[1.2, 1.25, 1.3], bound_s=1.2, predicted_s=1.3,
    tokens_per_s=1638.4, bubble=0.125, peak_bytes=[1.5 * 2**30, 2**30],
)  # fmt: skip


def test_flops_stand_in_the_table_and_mfu_in_the_picture_too() -> None:
    rated = SLICED | {"model_flops_per_s": 412.3e12, "mfu": 0.4167}
    text = render_page(result(STOCK, rated))
    assert "<td>412 (41.7 %)</td>" in text and "<td>–</td>" in text
    picture = plots.step_times(read_result(result(STOCK, rated)))
    assert picture is not None
    texts = [text.get_text() for axes in picture.axes for text in axes.texts]
    assert "× stock  MFU" in texts and "1.60×  41.7 %" in texts
    for axes in picture.axes:  # no dot, median or bound is cut off
        drawn = [x for line in axes.lines for x in line.get_xdata()] + [bar.get_width() for bar in axes.patches]
        assert 2.2 <= max(drawn) < axes.get_xlim()[1]


def test_the_headline_is_worked_out_per_accumulation() -> None:
    slower = row(accumulation=4, step_s=4.0, step_s_all=[3.9, 4.0, 4.1])
    stock_4 = row("deepspeed", accumulation=4, step_s=3.8, step_s_all=[3.7, 3.8, 3.85])
    assert headline(read_result(result(STOCK, SLICED, stock_4, slower))) == (
        "Per training step against DeepSpeed’s stock 1F1B, terapipe is 1.60× as fast at accumulation 1 (1.25 s instead "
        "of 2.00 s); and 0.95× as fast (slower) at accumulation 4 (4.00 s instead of 3.80 s)."
    )


def test_titles_name_the_stages_where_they_differ() -> None:
    four = row(stages=4, peak_bytes=None)
    titles = [[group.title for group in read_result(result(*runs)).groups] for runs in ((STOCK,), (four, STOCK))]
    assert titles == [["accumulation 1"], ["accumulation 1, 2 stages", "accumulation 1, 4 stages"]]


@pytest.mark.parametrize(("runs", "expected"), [
    ([SLICED], "at 1.25 s a step at accumulation 1, without a stock run"),
    ([STOCK, failed("no", "terapipe", "seq1f1b")], "not measured at accumulation 1 (none of its runs"),
    ([STOCK, failed("no", "torch", "1f1b")], "not measured at accumulation 1 (it has no run there)"),
    ([STOCK, row(step_s=2.005)], "as fast (1.00×)"),
    ([STOCK, row(step_s=1.95, step_s_all=[1.95])], "(1.95 s instead of 2.00 s, single steps overlap)"),
    ([STOCK, SLICED | {"replayed": True}], "1.25 s a step at accumulation 1, without a stock run"),
    ([run | {"replayed": True} for run in (STOCK, SLICED)], "(1.25 s instead of 2.00 s, replayed)"),
    ([STOCK | {"schedule": "dualpipev"}, SLICED], "without a stock run"),
    ([STOCK, row("torch", step_s=0.5)], "not measured"),
])  # fmt: skip
def test_the_headline_does_not_flatter(runs: list[dict[str, Any]], expected: str) -> None:
    assert expected in headline(read_result(result(*runs)))


def test_the_table_has_the_figures() -> None:
    page = page_of(result(STOCK, SLICED, failed("too few layers")))
    assert page.row("terapipe seq1f1b") == [
        "terapipe seq1f1bfastest", "4 × 512", "1.250", "1.200 – 1.300", "1.60", "96.0 %", "1.300 (+4.0 %)", "1,638.4",
        "–", "12.5 %", "1.50 / 1.00", "0.0100", "10.5",
    ]  # fmt: skip
    assert page.row("deepspeed 1f1b")[4] == "1.00"
    assert page.row("torch zbv") == ["torch zbvfailed", f"1 × {LENGTH}", "too few layers"]
    heads = page.row("run")
    assert len(heads) == 13
    (span,) = [attributes["colspan"] for tag, attributes in page.tags if tag == "td" and "colspan" in attributes]
    assert 2 + int(span or 0) == len(heads)
    assert sum(attributes.get("class") == "best" for tag, attributes in page.tags if tag == "tr") == 1


def test_ratios_are_those_of_the_turns_where_the_result_has_them() -> None:
    stock, sliced = STOCK | {"ratio_to_stock": 1.0}, SLICED | {"ratio_to_stock": 1.75}
    assert "terapipe is 1.75× as fast" in headline(read_result(result(stock, sliced)))
    assert page_of(result(stock, sliced)).row("terapipe seq1f1b")[4] == "1.75"
    assert "terapipe is 1.60× as fast" in headline(read_result(result(STOCK, SLICED))), "in older results: 2.0 / 1.25"
    with pytest.raises(ReportError, match=r"ratio_to_stock = -1: expected greater than 0"):
        read_result(result(STOCK | {"ratio_to_stock": -1}))


def test_activations_are_a_share_of_the_stock_engines() -> None:
    """By hand: stock keeps 900 - 100 = 800 on stage 0, slices 400 - 100 = 300 on stage 1; predicted 840 and 294."""
    memory = {"peak_bytes": [900, 500], "static_bytes": [100, None], "predicted_peak_bytes": [940, 460]}
    less = {"peak_bytes": [300, 400], "static_bytes": [100, 100], "predicted_peak_bytes": [350, 394]}
    page = page_of(result(STOCK | memory, SLICED | less, row("torch", "gpipe")))
    own = [cells for cells in page.rows if cells[:1] == ["terapipe seq1f1b"]]
    assert own[-1][3:] == ["0.375", "0.350", "−6.7 %"]
    assert "Activations" in page.data
    for runs in (
        (STOCK, SLICED),
        (STOCK | memory, SLICED),
        (STOCK | memory | {"peak_bytes": [100, 100]}, SLICED | less),
    ):
        assert "Activations" not in page_of(result(*runs)).data


def test_planned_and_replayed_rows_are_labelled() -> None:
    runs = [row(slices=[1000, 600, 448], planned=True, replayed=True, step_s=1.9), row("deepspeed", replayed=True)]
    page = page_of(result(*runs))
    assert page.row("terapipe")[:2] == ["terapipe 1f1bplannedfastestreplayed", "3: 1000, 600, 448"]
    text = " ".join(page.data)  # of the notes, and of the axis of a plot
    assert "not timed by the wall clock" in text and "terapipe 1f1b, 3 slices, planned (replayed)" in text


def test_what_is_not_known_is_a_dash_and_small_figures_have_small_units() -> None:
    unknown = dict.fromkeys(("tokens_per_s", "bound_s", "predicted_s", "bubble", "exposed_comm_s", "loss"))
    small = {"step_s": 0.01234, "step_s_all": [0.01234], "peak_bytes": [5 * 2**20, None]}
    page = page_of(result(row("torch", **unknown, **small)))
    assert page.row("torch")[2:] == ["12.34", "12.34 – 12.34", *["–"] * 6, "5.00 / –", "–", "–"]
    assert (page.row("run")[2], page.row("run")[10]) == ("stepms", "peakMiB")


@pytest.mark.parametrize(("changes", "told"), [
    ({"loss": 10.7}, ["do not agree (from 10.5 to 10.7)"]), ({"loss": float("nan")}, ["not all finite"]),
    ({"off_core_s": 0.125, "drift": 1.04}, ["Busy: other programs had a core for up to 10.0% of a step", "1.040 with"]),
    ({}, []), ({"off_core_s": 0.01, "drift": 0.99}, []),
])  # fmt: skip
def test_notes_tell_of_losses_and_of_a_busy_machine(changes: dict[str, Any], told: list[str]) -> None:
    said = notes(read_result(result(STOCK, SLICED | changes)))
    assert all(text in " ".join(said) for text in told) and bool(said) == bool(told)


def test_timelines_that_can_be_zoomed_are_below_their_pictures(large: str) -> None:
    pytest.importorskip("plotly", reason="needs the extra plot")
    page = render_page(KEPT, interactive=True)
    policies = [re.search(r'Policy" content="([^"]*)"', text) for text in (large, page)]
    assert [policy is not None and "script-src" in policy[1] for policy in policies] == [False, True]
    assert policies[1] is not None and "default-src 'none'" in html.unescape(policies[1][1])
    pictures = large.count("<details") - 1  # the last one is the data
    assert page.count('class="interactive"') == pictures > 0
    assert page.count('role="img"') == large.count('role="img"')
    assert "--interactive adds timelines" in large and "--interactive adds timelines" not in page
    assert not re.search(r"[0-9] times as long", page), "the timelines of two systems are not of one schedule"


def test_a_report_is_written_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise TimelineError("needs plotly: pip install 'terapipe_ds[plot]'")

    monkeypatch.setattr(interactive, "plotly_script", missing)
    page = render_page(result(with_timeline(SLICED)), interactive=True)
    assert "<script" not in page and "<svg" in page
    assert "The timelines are pictures alone: needs plotly: pip install" in page


def test_the_page_is_whole_and_needs_nothing_else(large: str) -> None:
    page = Page(large)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name.endswith("href") or name in ("src", "action", "data"):
                assert (value or "").startswith(("#", "data:"))
                assert not (value or "").startswith("#") or (value or "")[1:] in ids
    for inner in re.findall(r"url\(([^)]*)\)", large):
        assert inner.startswith("#") and inner[1:] in ids
    assert "http" not in re.sub(r'http-equiv|href="data:[^"]*"', "", large) and "@import" not in large
    assert len(large.encode()) < 1_500_000


def test_every_plot_is_there_with_words_for_it(large: str) -> None:
    page = Page(large)
    pictures = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(pictures) == 3 + 2  # a timeline per accumulation
    assert all(attributes.get("aria-label") and attributes.get("role") == "img" for attributes in pictures)
    assert sum(tag == "details" and "open" in attributes for tag, attributes in page.tags) == 1
    for colour in ("#1f2933", "#0068b5", "#c2610c", "#00806a"):  # outside the style sheet the theme decides
        assert colour not in large[large.index("</style>") :]
    for theme in ("prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert theme in large


def test_a_timeline_of_many_boxes_becomes_a_png(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terapipe_ds.bench.report.page._MOST_BOXES", 15)
    assert 'src="data:image/png' in render_page(result(with_timeline(SLICED)))


def test_the_timelines_are_of_stock_and_the_best() -> None:
    sliced, plain, stock = map(with_timeline, (SLICED, row(), STOCK))

    def drawn(*runs: dict[str, Any]) -> list[str]:
        return [run.label for run in timeline_pair(read_result(result(*runs)).groups[0])]

    assert drawn(sliced, plain, stock) == ["deepspeed 1f1b", "terapipe seq1f1b, 4 slices"]
    assert drawn(sliced, plain, stock | {"timeline": None}) == ["terapipe 1f1b, 1 slice", "terapipe seq1f1b, 4 slices"]
    assert drawn(sliced) == ["terapipe seq1f1b, 4 slices"]
    assert drawn(row()) == []
    as_object = sliced | {"timeline": json.loads(sliced["timeline"])}
    assert read_result(result(as_object)).runs[0].timeline == read_result(result(sliced)).runs[0].timeline


def test_texts_are_escaped() -> None:
    evil = '<script>alert("x")</script>&'
    runs = [row(schedule=f"a$b$<i>{evil}"), failed(evil), STOCK]
    data = result(*runs, preset=evil, command=evil, machine={evil: {"deep": [evil]}}, date=evil)
    text = render_page(data)
    page = Page(text)
    assert "<script" not in text and "<i>" not in text
    assert page.row("torch zbv")[2] == evil
    assert [evil + ".deep", evil] in page.rows
    assert any("a$b$<i>" in data for data in page.data)


def test_the_data_come_back_from_the_page_and_give_it_again(tmp_path: Path) -> None:
    data = json.loads(json.dumps(result(with_timeline(SLICED), STOCK)))
    write_report(data, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    link = re.search(r'href="data:application/gzip;base64,([^"]*)"', text)
    assert link is not None
    (tmp_path / "bench.json.gz").write_bytes(base64.b64decode(link[1]))
    assert load_result(tmp_path / "bench.json.gz") == data
    assert render_page(data) == text


def test_a_required_key_that_is_absent_is_named() -> None:
    for key in row():
        runs = [STOCK, {name: value for name, value in row().items() if name != key}]
        with pytest.raises(ReportError, match=rf"runs\[1\] lacks {key}"):
            read_result(result(*runs))
    for key in result():
        with pytest.raises(ReportError, match=rf"the file lacks {key}; give a file of `terapipe bench --json`"):
            read_result({name: value for name, value in result(STOCK).items() if name != key})


@pytest.mark.parametrize(("change", "expected"), [
    ({"system": "jax"}, "system = 'jax': expected 'deepspeed', 'terapipe' or 'torch'"),
    ({"step_s": 0}, r"runs\[0\].step_s = 0: expected greater than 0"),
    ({"step_s": float("nan")}, "step_s = nan"),
    ({"step_s_all": []}, r"step_s_all = \[\]: expected at least 1 item"),
    ({"slices": [5, 0]}, r"slices\[1\] = 0: expected greater than or equal to 1"),
    ({"predicted_peak_bytes": [1]}, "1 predicted_peak_bytes for 2 stages"),
    ({"peak_bytes": [1, 2, 3]}, "3 peak_bytes for 2 stages"),
    ({"timeline": "{}"}, r"timeline: not a timeline: the file lacks format"),
])  # fmt: skip
def test_wrong_values_are_named(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ReportError, match=expected):
        read_result(result(row(**change)))


def test_nothing_but_failures_makes_a_report_too() -> None:
    bare = {"system": "terapipe", "schedule": "seq1f1b", "accumulation": 1, "stages": 2, "error": "no plan"}
    bare |= {"planned": True}
    page = page_of(result(bare))
    assert page.row("terapipe seq1f1b") == ["terapipe seq1f1bplannedfailed", "–", "no plan"]
    assert not any(tag == "svg" for tag, _ in page.tags)


def test_a_report_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_report(result(STOCK), path)
    old = path.read_bytes()
    with pytest.raises(ReportError):
        write_report({"runs": []}, path)

    def full(_: Path, *__: Any, **___: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_report(result(SLICED), path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_the_command_makes_a_report_of_a_kept_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, out = tmp_path / "result.json", tmp_path / "report.html"
    kept.write_text(json.dumps(result(STOCK, SLICED)))
    words = ["bench", "--from", str(kept), "--html"]
    assert main([*words, str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert "1.60×" in out.read_text(encoding="utf-8")
    refused: list[tuple[bytes, list[str], str]] = [
        (b"{}", [*words, str(kept)], "is the result itself"),
        (b"{}", words[:3], "--from needs --html"),
        (b"{}", [*words, str(out), "--full", "--stages", "4"], "does not use --full, --stages: give --from"),
        (b"{}", [*words, str(out), "cpu-8stage"], "does not use PRESET"),
        (b"nonsense", [*words, str(out)], "no JSON"),
        (b"[]", [*words, str(out)], "holds no object"),
        (b"\x1f\x8bxx", [*words, str(out)], "no JSON"),
        (b"{}", ["bench", "--from", str(tmp_path / "none"), "--html", str(out)], "No such file"),
    ]
    for content, arguments, expected in refused:
        kept.write_bytes(content)
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1


def eight_stages() -> dict[str, Any]:
    """The first accumulation of the kept result as if replayed on eight stages, with more numbers of slices."""
    runs = [run for run in KEPT["runs"] if run["accumulation"] == 1]
    runs += [runs[2] | {"slices": [LENGTH // n] * n} for n in (2, 4, 16)]
    by_stage = ("peak_bytes", "predicted_peak_bytes", "static_bytes")
    eight = [{key: run[key] and run[key] * 4 for key in by_stage} for run in runs]
    changes = {"stages": 8, "replayed": True, "timeline": None}
    return KEPT | {"runs": [run | more | changes for run, more in zip(runs, eight, strict=True)]}


@pytest.mark.parametrize("data", [KEPT, eight_stages()], ids=["2 stages", "8 stages, replayed"])
@pytest.mark.parametrize("name", ["step_times", "prediction_errors", "memory"])
def test_no_text_of_a_plot_runs_into_another_or_out_of_the_picture(name: str, data: dict[str, Any]) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context(SETTINGS):
        assert not overlaps(getattr(plots, name)(read_result(data)))


@pytest.mark.parametrize("words", [[], ["--from", "docs/results/2026-11-22-bench-cpu-2stage-epyc.json"]])
def test_a_broken_package_is_found_before_the_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('no numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jinja2", raising=False)
    monkeypatch.setattr(run, "run_benchmark", lambda *_: pytest.fail("it must not run"))
    assert main(["bench", *words, "--html", str(tmp_path / "report.html")]) == 2
    assert "the report needs matplotlib and jinja2 (no numpy): pip install" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
