"""Is the configuration that is predicted best the best one? ``python benchmarks/choice.py [BILLIONS ...] [--rows]``.

Groups of configurations of one model on the same GPUs, all measured by one team: GPT of 3.6, 18.4, 39.1 and 175 billion
parameters with Megatron-LM on A100s (VIA-Research/vTrain, data/ground_truth_multi.csv; Bang et al., MICRO 2024). As in its
config/validation, blocks are recomputed in full, a rank has one stage, and gradients are summed after the last backward. Per
group: the measured time of the configuration predicted best over that of the best one, Kendall's tau over all pairs, and the
median error of a step.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import logging
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from pipeline import Row, predicted
from planner import plain_gpt, whole

from autoshard.hardware import PRESETS

A100 = PRESETS["a100"]
FOUR_CARDS = replace(A100, network=replace(A100.network, bandwidth=A100.network.bandwidth / 2, rates=tuple(
    r._replace(bandwidth=r.bandwidth / 2) for r in A100.network.rates
)))  # fmt: skip
"""800 Gb/s per server (``inter_node_bandwidth`` of their config/validation), where the preset has a card for each GPU"""
TABLE = Path(__file__).with_name("measured_choices.csv")
VOCABULARY = 51200


def configuration(row: dict[str, str]) -> Row:
    n = {name: int(value) for name, value in row.items() if name not in ("billions", "step_s")}
    along = {axis: kind for axis, kind in (("dp", "ddp"), ("tp", "megatron")) if n[axis] > 1}
    return Row(
        f"TP {n['tp']} DP {n['dp']} PP {n['pp']}, micro-batches of {n['micro_batch']}", FOUR_CARDS, n["pp"], (1,),
        {axis: n[axis] for axis in along}, along, plain_gpt(n["width"], VOCABULARY, n["length"], n["heads"]), n["width"],
        n["layers"], n["rows"], (n["micro_batch"],), n["length"], float(row["step_s"]), whole, torch.float16,
        summed_after=True,
    )  # fmt: skip


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Agreement of two orders: pairs in the same order less those in the other, over all."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("billions", nargs="*", help="groups: 3.6, 18.4, 39.1, 175")
    parser.add_argument("--rows", action="store_true", help="a line per configuration")
    options = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    groups: dict[str, list[Row]] = {}
    for row in csv.DictReader(TABLE.open()):
        groups.setdefault(row["billions"], []).append(configuration(row))
    print(
        f"{'group':>10} {'rows':>5} {'best measured':>14} {'predicted best':>15} {'over best':>10} {'tau':>6} {'error':>8}"
    )
    for billions, rows in groups.items():
        if options.billions and billions not in options.billions:
            continue
        steps = []
        for row in rows:
            steps.append(next(predicted(row, row.batches[0]))[0])
            if options.rows:
                print(
                    f"  {row.name:45} {row.seconds:8.3f}s {steps[-1]:8.3f}s {steps[-1] / row.seconds - 1:+7.1%}",
                    flush=True,
                )
        measured = [row.seconds for row in rows]
        chosen = measured[steps.index(min(steps))]
        error = statistics.median(a / b - 1 for a, b in zip(steps, measured, strict=True))
        print(
            f"{billions + 'B':>10} {len(rows):5} {min(measured):13.3f}s {chosen:14.3f}s {chosen / min(measured):10.3f}"
            f" {kendall([*zip(steps, measured, strict=True)]):6.2f} {error:+8.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
