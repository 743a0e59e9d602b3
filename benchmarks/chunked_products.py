"""Whether a row-parallel product pays in chunks, each all-reduced while the next is computed (asynchronous tensor parallelism).

    python benchmarks/chunked_products.py --ranks 2

Whole: the product, then its all-reduce. In 2 and 4 chunks of rows: all but the last reduction run beside a product. The ways
take turns; the least of several rounds of the slowest rank, in ms, and the ratio to the whole.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import worlds

SIZES = ((256, 256, 256), (512, 384, 256), (512, 1024, 512), (2048, 512, 512), (2048, 2048, 1024))
"""rows, the part of the sum on this rank, columns"""
CHUNKS = (1, 2, 4)


def product(x: torch.Tensor, weight: torch.Tensor, chunks: int) -> Callable[[], object]:
    """The product and its sum over all ranks, in chunks."""

    def run() -> torch.Tensor:
        out, works = x.new_empty(len(x), weight.shape[1]), []
        for rows, part in zip(x.chunk(chunks), out.chunk(chunks), strict=True):
            torch.mm(rows, weight, out=part)
            works.append(dist.all_reduce(part, async_op=True))
        for work in works:
            work.wait()
        return out

    return run


def work(options: argparse.Namespace) -> None:
    """One rank; the first prints."""
    worlds.join(options.rank, options.ranks, options.rendezvous)
    if options.rank == 0:
        print(f"{options.ranks} gloo ranks{'':12}" + "".join(f"{f'{n} chunks':>18}" for n in CHUNKS))
    for rows, inner, columns in SIZES:
        x, weight = torch.rand(rows, inner), torch.rand(inner, columns)
        ways = [product(x, weight, n) for n in CHUNKS]
        taken: list[list[float]] = [[] for _ in ways]
        for _ in range(options.rounds):
            for way, times in zip(ways, taken, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                way()
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times.append(float(took))
        if options.rank == 0:
            least = [min(times) for times in taken]
            cells = "".join(f"{t * 1e3:>11.2f} ({t / least[0]:.2f})" for t in least)
            print(f"{rows} × {inner} × {columns}".ljust(24) + cells, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    sys.exit(worlds.launch(__file__, ["--ranks", str(options.ranks), "--rounds", str(options.rounds)], options.ranks))


if __name__ == "__main__":
    main()
