"""Elastic training: a process is killed, and the others go on as a smaller world.

python docs/examples/elastic.py --folder F --kill 3           # from memory: a replica of each shard is left
python docs/examples/elastic.py --folder F --kill 1 3         # no replica is left: from the last checkpoint
python docs/examples/elastic.py --folder G --ranks 3 --start F/step000004          # undisturbed, for comparison
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import autoshard

STEPS, EVERY, DEATH = 7, 2, 4
"""steps in all, between checkpoints, and before the death"""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.GELU(), torch.nn.Linear(48, 16), Loss())


class Loss(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def batch(step: int) -> tuple[torch.Tensor]:
    return (torch.randn(12, 16, generator=torch.Generator().manual_seed(step)),)


def build(folder: Path, world: int) -> tuple[Any, torch.optim.Optimizer]:
    """Module and optimizer on the ranks that are here. Rank 0 plans; the others read its plan."""
    ranks, file = dist.get_world_size(), folder / f"plan{world}.json"
    replicas = 2 if ranks > 2 and ranks % 2 == 0 else 1
    mesh = autoshard.Mesh({"replica": 2, "dp": ranks // 2} if replicas == 2 else {"dp": ranks})
    began = time.perf_counter()
    if dist.get_rank() == 0:
        like = {"replica": "ddp", "dp": "fsdp"} if replicas == 2 else "fsdp"
        file.write_text(autoshard.plan(model(), mesh, batch(0), like=like).to_json())
        print(f"planned in {time.perf_counter() - began:.2f} s", flush=True)
    dist.barrier()
    sharded = autoshard.compile(model(), mesh, batch(0), plan=autoshard.Plan.from_json(file.read_text()))
    return sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-2)


def resume(sharded: Any, optimizer: Any, kept: Any, done: int, saved: list[Path]) -> int:
    """Fill the module from the memory of the ranks that are left, or from the last checkpoint. The step to go on at."""
    steps: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(steps, -1 if kept is None else done)
    said = ""
    if min(steps) >= 0:
        try:
            if min(steps) != max(steps):
                raise autoshard.PlanError(f"the ranks ended after different steps: {steps}")
            autoshard.transfer(kept, sharded, optimizer=(None, optimizer))
            said = "from memory"
        except autoshard.PlanError as error:
            print(error, flush=True)
    if not said and saved:
        autoshard.transfer(saved[-1], sharded, optimizer=(None, optimizer))
        done, said = int(saved[-1].name.removeprefix("step")), f"from {saved[-1].name}"
    if dist.get_rank() == 0 and said:
        print(f"{dist.get_world_size()} ranks resume {said} at step {done}", flush=True)
    return done


def train(options: argparse.Namespace) -> None:
    """One process, through all worlds that it is in."""
    folder, members, world, done, kept = options.folder, list(range(options.ranks)), 0, 0, None
    while True:
        store = dist.FileStore(str(folder / f"store{world}"), len(members))
        at = members.index(options.rank)
        dist.init_process_group("gloo", store=store, rank=at, world_size=len(members), timeout=timedelta(seconds=60))
        sharded, optimizer = build(folder, world)
        finished = sorted(p.parent for p in folder.glob("step*/.metadata"))  # a killed save leaves no .metadata
        done = resume(sharded, optimizer, kept, done, finished if options.start is None else [options.start])
        try:
            for step in range(done, STEPS):
                if step == DEATH and world == 0 and options.rank in options.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = sharded(*batch(step))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done = step + 1
                if at == 0:
                    print(f"step {step}: loss {float(loss.detach())!r}", flush=True)
                if done % EVERY == 0 and options.start is None:
                    parts = get_state_dict(sharded, optimizer)
                    state = {"model": parts[0], "optimizer": parts[1]}
                    dcp.save(state, checkpoint_id=folder / f"step{done:06}")
            dist.destroy_process_group()
            return
        except autoshard.CommunicationError:  # names the cause: another rank is gone
            kept, world = autoshard.keep(sharded, optimizer), world + 1
            dist.destroy_process_group()
            while not (folder / f"world{world}").exists():
                time.sleep(0.05)
            members = json.loads((folder / f"world{world}").read_text())


def supervise(options: argparse.Namespace) -> None:
    """Start the processes; when some are killed, tell the others who is left. A cluster's agent does this."""
    options.folder.mkdir(parents=True, exist_ok=True)
    each = {n: subprocess.Popen([sys.executable, *sys.argv, "--rank", str(n)]) for n in range(options.ranks)}
    world, left = 0, set(each)
    while any(each[n].poll() is None for n in left):
        time.sleep(0.1)
        if any(each[n].poll() not in (None, 0) for n in left):
            time.sleep(1)  # for others that die with it
            left, world = {n for n in left if each[n].poll() is None}, world + 1
            (folder := options.folder / "told").write_text(json.dumps(sorted(left)))
            folder.rename(options.folder / f"world{world}")
    sys.exit(0 if left else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kill", type=int, nargs="*", default=[])
    parser.add_argument("--start", type=Path, help="a checkpoint")
    parser.add_argument("--rank", type=int)
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
    arguments = parser.parse_args()
    supervise(arguments) if arguments.rank is None else train(arguments)
