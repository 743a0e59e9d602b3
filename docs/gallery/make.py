"""Make the pictures of this folder with Chromium: python docs/gallery/make.py [name …]."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

import autoshard
from autoshard import models

FOLDER = Path(__file__).parent
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=5000 --window-size=1600,1000"
).split()

# picture → (model, mesh, example sizes, what to look at in the open picture)
MODELS = {
    "mlp": ("mlp:large", {"dp": 2, "tp": 4}, {}, "blocks.1.down linear"),
    "llama": ("llama:8b", {"dp": 2, "tp": 4}, {"batch": 8, "seq": 2048}, "blocks.1.feed_forward.down linear"),
    "moe": ("moe:8x7b", {"dp": 4, "ep": 8}, {"batch": 8, "seq": 1024}, "blocks.1.feed_forward autoshard.experts"),
    "dlrm": ("dlrm:terabyte", {"dp": 8}, {"batch": 16384}, "tables.2 embedding"),
    "vit": ("vit:large", {"dp": 2, "tp": 4}, {"batch": 64}, "blocks.1.down linear"),
}

# picture → what stands after the # of the page's address
VIEWS = {
    "": "",
    "_open": "find={0}",
    "_dark": "theme=dark&find={0}",
    "_collectives": "tab=Collectives",
    "_cost": "tab=Memory and cost&theme=dark",
    "_compared": "tab=Compared",
}


def plan(name: str) -> autoshard.Plan:
    """The plan of a gallery model on H100s, from a model without memory."""
    model, mesh, sizes, _ = MODELS[name]
    reference = models.get(model)
    with torch.device("meta"):
        module = reference.model().bfloat16()
    inputs = reference.inputs(**sizes)
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, inputs)
    return autoshard.plan(module, autoshard.Mesh(mesh, "h100"), args, kwargs)


def shoot(page: Path, address: str, picture: Path) -> None:
    """One screenshot of ``page``."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        where = [
            f"--user-data-dir={profile}",
            f"--screenshot={picture}",
            f"{page.as_uri()}#{address.replace(' ', '%20')}",
        ]
        subprocess.run([browser, *FLAGS, *where], check=True, capture_output=True, timeout=120)


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in names or list(MODELS):
            page = Path(folder) / f"{name}.html"
            found = plan(name)
            print(f"{name}: {len(found.compared)} plans compared")
            found.visualize(page)
            for suffix, address in VIEWS.items():
                shoot(page, address.format(MODELS[name][3]), FOLDER / f"{name}{suffix}.png")
            print(f"{name}: {len(VIEWS)} pictures")


if __name__ == "__main__":
    main(sys.argv[1:])
