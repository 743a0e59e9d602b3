"""The HTML page in a real Chromium: what a user does, checked against the plan."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import chromium, open_page
from picture_samples import ODD_NAMES, chain, deep_llama, planned

from autoshard import Mesh
from autoshard.cli import _parser
from autoshard.compiler import capture_graph, compile_graph
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan
from autoshard.report.text import parameter_rows

CHECKS = (Path(__file__).parents[1] / "support" / "page_checks.js").read_text("utf-8")
OVERLAPS, CONTRAST, COLUMN = (f"{CHECKS}\nreturn {name}(...arguments);" for name in ("overlaps", "contrast", "column"))


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(autouse=True)
def no_errors(driver: Any) -> Iterator[None]:
    yield
    assert driver.get_log("browser") == []


@pytest.fixture(scope="module")
def llama() -> Plan:
    return deep_llama()


@pytest.fixture
def page(driver: Any, llama: Plan, tmp_path: Path) -> Any:
    llama.visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    return driver


def css(driver: Any, selector: str) -> list[Any]:
    return driver.find_elements("css selector", selector)


def open_box(driver: Any, path: str) -> None:
    (head,) = css(driver, f'.box[data-path="{path}"] > .head')
    driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", head)


def tab(driver: Any, name: str) -> None:
    css(driver, f'[data-tab="{name}"]')[0].click()


def set_theme(driver: Any, name: str) -> None:
    (button,) = css(driver, "#theme")
    while button.text != f"Theme: {name}":
        button.click()
    assert driver.execute_script("return document.documentElement.dataset.theme") == name


@pytest.mark.slow_cases("dark")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_user_reads_the_plan_of_a_deep_llama(page: Any, llama: Plan, theme: str, tmp_path: Path) -> None:
    plan = json.loads(llama.to_json())
    set_theme(page, theme)
    assert css(page, "#title")[0].text == "Llama"
    assert show_seconds(plan["cost"]["total_s"]) in css(page, "#numbers")[0].text
    folded = [b.get_attribute("data-path") for b in css(page, ".box")]
    repeated = next(p for p in folded if p.startswith("blocks.") and p != "blocks.0")
    assert "×1" in css(page, f'.box[data-path="{repeated}"]')[0].text  # ×10 or ×11

    open_box(page, repeated)
    open_box(page, f"{repeated}.attention")
    comms = css(page, f'.box[data-path="{repeated}.attention"] .comm')
    assert comms
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", comms[0])
    shown = css(page, "#details dl.collective")
    assert shown
    for block in shown:
        c = plan["collectives"][int(block.get_attribute("data-collective"))]
        assert c["fqn"].startswith(f"{repeated}.attention")
        for text in (c["kind"], c["phase"], c["reason"], show_bytes(c["bytes"]), show_seconds(c["seconds"])):
            assert text in block.text
    assert page.execute_script(CONTRAST) >= 4.5
    assert page.execute_script(OVERLAPS) == []


@pytest.mark.slow
def test_the_tables_sort_and_agree_with_the_plan(page: Any, llama: Plan) -> None:
    collectives = json.loads(llama.to_json())["collectives"]
    tab(page, "Collectives")
    css(page, ".switch button")[1].click()
    rows = css(page, 'table[data-table="collectives"] tbody tr')
    assert len(rows) == len(collectives)

    def column(n: int) -> list[str]:
        found: list[str] = page.execute_script(COLUMN, "collectives", n)
        return found

    by_time = sorted(collectives, key=lambda c: -c["seconds"])
    assert column(7) == [show_seconds(c["seconds"]) for c in by_time]
    heads = css(page, 'table[data-table="collectives"] th button')
    heads[6].click()
    assert column(6) == [show_bytes(c["bytes"]) for c in sorted(collectives, key=lambda c: -c["bytes"])]
    heads[6].click()
    assert column(6) == [show_bytes(c["bytes"]) for c in sorted(collectives, key=lambda c: c["bytes"])]
    heads[0].click()
    heads[0].click()
    assert column(5) == [c["reason"] for c in collectives]

    css(page, '[aria-label="Filter collectives"]')[1].send_keys("blocks.7.attention.q")
    assert len(column(0)) == sum(c["fqn"] == "blocks.7.attention.q" for c in collectives)
    css(page, 'table[data-table="collectives"] tbody tr')[0].click()  # to the picture, where layer 7 is folded
    assert "blocks.7.attention.q" in css(page, "#details")[0].text
    assert css(page, ".comm.selected")

    tab(page, "Parameters")
    stored = [n for n, kind in llama.kinds.items() if kind != "value"]
    assert len(css(page, 'table[data-table="parameters"] tbody tr')) == len(stored)
    text = css(page, 'table[data-table="parameters"]')[0].text
    assert str(list(llama.layouts["head.weight"].max_local_shape(llama.shapes["head.weight"]))) in text


def test_search_finds_a_tensor_of_a_folded_layer(page: Any, llama: Plan) -> None:
    (box,) = css(page, "#search")
    box.send_keys("blocks.7.attention.q.weight")
    assert css(page, "#found li")[0].text.startswith("blocks.7.attention.q.weight")
    box.send_keys("\ue007")  # Enter
    assert css(page, ".tensor.selected")
    shape = str(list(llama.shapes["blocks.1.attention.q.weight"]))
    assert shape in css(page, "#details")[0].text
    box.clear()
    box.send_keys("no such thing")
    assert css(page, "#found li")[0].text == "nothing found"


def test_an_operation_shows_all_that_was_decided(page: Any, llama: Plan) -> None:
    (box,) = css(page, "#search")
    box.send_keys("blocks.0.feed_forward.down linear\ue007")
    name, choice = next((n, c) for n, c in llama.choices.items() if c.fqn == "blocks.0.feed_forward.down")
    text = css(page, "#details")[0].text
    for expected in (name, choice.op, choice.source, show_seconds(choice.seconds), *choice.inputs, "ALTERNATIVES"):
        assert expected in text
    for value in (*choice.inputs, *choice.outputs):
        assert str(list(llama.shapes[value])) in text
        assert str(list(llama.layouts[value].max_local_shape(llama.shapes[value]))) in text
    assert f"+{show_seconds(choice.alternatives[0][1])}" in text


def test_charts_show_the_peak(page: Any, llama: Plan) -> None:
    tab(page, "Memory and cost")
    assert f"Peak {show_bytes(llama.cost.memory_bytes)}" in css(page, ".card p")[0].text
    assert len(css(page, ".card svg")) == 4
    assert f"budget {show_bytes(llama.memory_budget)}" in css(page, ".card svg")[0].text
    assert css(page, "#budget")


TABS = ("Graph", "Collectives", "Parameters", "Memory and cost", "Ranks", "Compared")
TEXT = "return document.body.innerText"


def with_hidden(plan: Plan) -> Plan:
    """Of 10 ms of communication 6 are hidden behind 20 of compute; the rest and a bubble of 2 show."""
    cost = replace(plan.cost, compute_s=20e-3, comm_s=10e-3, exposed_s=4e-3, bubble_s=2e-3, total_s=26e-3)
    return replace(plan, cost=cost)


@pytest.mark.parametrize("plan", ["chain", "inference"])
def test_no_page_shows_a_missing_value(driver: Any, plan: str, tmp_path: Path) -> None:
    found = chain(("up", "down"))
    (found if plan == "chain" else replace(found, training=False)).visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    missing = r"\b(null|undefined|NaN|Infinity)\b"
    for name in TABS:
        tab(driver, name)
        assert not re.search(missing, driver.execute_script(TEXT)), name
    driver.execute_script("document.getElementById('numbers').append(null)")  # the check sees one
    assert re.search(missing, driver.execute_script(TEXT))


def test_one_bar_shows_the_step_and_what_is_hidden(driver: Any, tmp_path: Path) -> None:
    with_hidden(chain(("up", "down"))).visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    pieces = {p.get_attribute("title"): p.rect for p in css(driver, ".stack .piece")}
    assert list(pieces) == [
        "compute: 20 ms", "exposed communication: 4 ms", "pipeline bubble: 2 ms",
        "hidden behind compute: 6 ms",
    ]  # fmt: skip
    compute, exposed, bubble, hidden = pieces.values()
    whole = css(driver, ".stack")[0].rect["width"]
    assert compute["width"] + exposed["width"] + bubble["width"] == pytest.approx(whole, abs=2)
    assert exposed["width"] / compute["width"] == pytest.approx(4 / 20, rel=0.02)
    assert hidden["width"] / compute["width"] == pytest.approx(6 / 20, rel=0.02)
    assert (hidden["x"], hidden["height"] < compute["height"]) == (compute["x"], True)  # drawn over compute
    tab(driver, "Memory and cost")
    assert "Communication: 4 ms exposed + 6 ms hidden" in driver.execute_script(TEXT)  # as above the tabs


def test_shares_sum_to_no_more_than_all(driver: Any, tmp_path: Path) -> None:
    """Of a plan whose collectives take longer than its step, since most are hidden."""
    plan = chain(("up", "down"))
    slow = tuple(replace(c, seconds=1e-3) for c in plan.collectives)
    replace(with_hidden(plan), collectives=slow).visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    tab(driver, "Collectives")
    shares = [float(text.rstrip("%")) for text in driver.execute_script(COLUMN, "traffic", 8)]
    assert len(shares) == len(slow)
    assert 90 < sum(shares) <= 100


def test_ranks_show_what_they_hold_and_their_groups(page: Any, llama: Plan) -> None:
    tab(page, "Ranks")
    cells = css(page, "#ranks .rank")
    assert len(cells) == llama.mesh.size
    rows = parameter_rows(llama)
    at = next(i for i, row in enumerate(rows) if "S(0)@tp" in str(row.layout) and len(row.shape) == 2)
    select = css(page, '[aria-label="Tensor"] option')
    select[at].click()
    layout, shape = rows[at].layout, rows[at].shape
    for rank, cell in enumerate(css(page, "#ranks .rank")):
        (start, length), *_ = layout.chunks_of(0, shape[0], rank)
        assert cell.text.split()[0] == str(rank)
        assert f"[{start}:{start + length}, :]" in cell.text
    groups = css(page, '[aria-label="Groups of"] option')
    chosen = next(option for option in groups if option.text.endswith("@tp"))
    chosen.click()
    page.execute_script("arguments[0].dispatchEvent(new MouseEvent('mouseenter'))", css(page, "#ranks .rank")[5])
    together = [int(c.get_attribute("data-rank")) for c in css(page, "#ranks .together")]
    assert together == [4, 5, 6, 7]  # dp=2, tp=4
    assert "rank 5 (dp=1, tp=1)" in css(page, "#tab-Ranks")[0].text


COMPARED = (("fsdp", 2e-3, 5e6, ""), ("ddp", None, 9e6, "does not fit"), ("megatron", 1.5e-3, 7e6, ""))


def test_compared_plans_sort_and_the_next_question_is_a_command(driver: Any, tmp_path: Path) -> None:
    plan = replace(with_hidden(chain(("up", "down"))), baselines=COMPARED)
    plan.visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    tab(driver, "Compared")

    def names() -> list[str]:
        found: list[str] = driver.execute_script(COLUMN, "compared", 0)
        return found

    assert names() == ["megatron", "fsdp", "free", "ddp"]  # by time; what does not fit is last
    css(driver, 'table[data-table="compared"] th button')[3].click()
    assert names() == ["ddp", "megatron", "fsdp", "free"]  # by memory
    commands = [e.text for e in css(driver, 'table[data-table="what-if"] code')]
    assert len(commands) >= 3
    for command in commands:
        words = command.replace("MODEL", "gpt").split()
        assert words[:2] == ["autoshard", "plan"]
        assert _parser().parse_args(words[1:]).command == "plan"


@pytest.mark.slow_cases("moe")
@pytest.mark.parametrize("name", ["chain", "moe"])
def test_the_page_fits_a_phone(driver: Any, name: str, tmp_path: Path) -> None:
    plan = with_hidden(chain(ODD_NAMES[:1])) if name == "chain" else planned("moe", dp=2, tp=2)
    replace(plan, baselines=COMPARED).visualize(tmp_path / "plan.html")
    size = {"width": 420, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        open_page(driver, tmp_path / "plan.html")
        for each in TABS:
            css(driver, f'[data-tab="{each}"]')[0].click()
            wide = driver.execute_script("return document.documentElement.scrollWidth")
            assert wide <= 420, (each, wide)
            assert css(driver, f'[id="tab-{each}"]')[0].rect["width"] <= 420
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_before_and_after_stand_side_by_side(driver: Any, tmp_path: Path) -> None:
    before, after = planned("mlp", tp=2), planned("mlp", dp=2, tp=2)
    after.visualize(tmp_path / "plan.html", other=before)
    open_page(driver, tmp_path / "plan.html")
    assert [p.get_attribute("data-plan") for p in css(driver, ".pane")] == ["before", "after"]
    assert [p.text for p in css(driver, ".pane .bar strong")] == ["before", "after"]
    left, right = (p.rect for p in css(driver, ".pane"))
    assert left["x"] + left["width"] <= right["x"] + 1
    tab(driver, "Compare")
    cells = css(driver, 'table[data-table="compare"] tr')[1].text
    assert show_seconds(before.cost.total_s) in cells
    assert show_seconds(after.cost.total_s) in cells
    assert driver.execute_script(OVERLAPS) == []


@pytest.mark.slow_cases("gpt")
@pytest.mark.parametrize("name", ["mlp", "moe", "dlrm", "vit", "gpt"])
def test_nothing_overlaps_when_everything_is_open(driver: Any, name: str, tmp_path: Path) -> None:
    planned(name, dp=2, tp=2).visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    for _ in range(4):
        css(driver, ".bar button")[0].click()
    assert len(css(driver, ".leaf")) > 5
    assert driver.execute_script(OVERLAPS) == []
    # The negative control: move one shape onto its neighbour, and the check sees it.
    driver.execute_script(f"{CHECKS}\nputOneOverAnother();")
    assert driver.execute_script(OVERLAPS) != []


@pytest.mark.slow_cases("50")
@pytest.mark.parametrize("modules", [1, 50])
def test_five_thousand_nodes_open_within_three_seconds(driver: Any, modules: int, tmp_path: Path) -> None:
    plan = chain(tuple(f"part{i}" for i in range(modules)), per_module=5000 // modules)
    plan.visualize(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 5_000_000
    begin = time.perf_counter()
    open_page(driver, tmp_path / "plan.html")
    assert css(driver, ".leaf, .box")
    assert time.perf_counter() - begin < 3


def test_odd_names_are_text(driver: Any, tmp_path: Path) -> None:
    plan = chain(ODD_NAMES)
    plan.visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    css(driver, ".bar button")[0].click()
    for name in ("Collectives", "Parameters", "Memory and cost", "Graph"):
        tab(driver, name)
    css(driver, ".switch button")
    for leaf in css(driver, ".leaf")[:6]:
        driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", leaf)
    (box,) = css(driver, "#search")
    box.send_keys("script")
    assert driver.execute_script("return window.hacked") is None
    assert css(driver, "main img, main script, header img") == []
    assert css(driver, "#title")[0].text == ODD_NAMES[0]
    shown = driver.execute_script("return document.querySelector('[data-table=traffic]').textContent")
    for name in ODD_NAMES:
        assert name in shown
    assert driver.execute_script(OVERLAPS) == []


def test_a_pipeline_shows_who_works_when(driver: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        model, tokens = Gpt(GptConfig.tiny()), torch.empty(4, 16, dtype=torch.long)
    graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
    plan = compile_graph(graph, Mesh({"pp": 2}), CompileOptions(stages="pp", micro_batches=4)).plan
    plan.visualize(tmp_path / "plan.html")
    open_page(driver, tmp_path / "plan.html")
    tab(driver, "Stages")
    assert len(css(driver, 'table[data-table="stages"] tbody tr')) == 2
    chart = css(driver, "#pipeline")[0]
    assert len(chart.find_elements("css selector", "svg .p-forward")) == 2 * 4 + 1  # and the legend
    first = chart.find_elements("css selector", "svg .p-backward")[0]
    driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('mouseenter'))", first)
    assert "rank 0, stage 0: backward of micro-batch 0" in chart.text
