"""The HTML page in a real Chromium: what a user does, checked against the plan."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import chromium, open_page
from picture_samples import ODD_NAMES, chain, deep_llama, planned

from autoshard import Mesh
from autoshard.compiler import capture_graph, compile_graph
from autoshard.models import Gpt, GptConfig
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan

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
    tab(driver, "Memory and cost")
    chart = css(driver, "#pipeline")[0]
    assert len(chart.find_elements("css selector", "svg .p-forward")) == 2 * 4 + 1  # and the legend
    first = chart.find_elements("css selector", "svg .p-backward")[0]
    driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('mouseenter'))", first)
    assert "rank 0, stage 0: backward of micro-batch 0" in chart.text
