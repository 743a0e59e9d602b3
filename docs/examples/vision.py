"""Train a convolutional network on augmented images, a part of the batch per rank; python or torchrun.

python docs/examples/vision.py out.pt
torchrun --nproc-per-node 2 docs/examples/vision.py out.pt
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import autoshard

CLASSES, SIZE, BATCH = 4, 16, 16


class Stripes(Dataset):
    """Noisy stripes, whose direction is the class; mirrored and shifted at random where they are for training."""

    def __init__(self, count: int, augment: bool) -> None:
        self.count, self.augment = count, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        label, noise = i % CLASSES, torch.Generator().manual_seed(i)
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        place = (rows, columns, rows + columns, rows - columns)[label]
        image = torch.sin(place * 1.5) + 0.3 * torch.randn(3, SIZE, SIZE, generator=noise)
        if self.augment:
            if label < 2 and torch.rand(()) < 0.5:
                image = image.flip(-1)
            top, left = torch.randint(0, 5, (2,)).tolist()
            image = F.pad(image, (2, 2, 2, 2))[:, top : top + SIZE, left : left + SIZE]
        return image, label


class Block(nn.Module):
    """Two convolutions with batch norm beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class Classifier(nn.Module):
    """The mean loss of a batch, and how many it gets right: over all ranks, since they are made in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, CLASSES))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(images))
        return F.cross_entropy(logits, labels), (logits.argmax(-1) == labels).sum()


def loader(data: Dataset, ranks: int) -> DataLoader:
    """Batches of ``BATCH`` over all ranks."""
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    return DataLoader(data, BATCH // ranks, shuffle=sampler is None, sampler=sampler, drop_last=True)


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")  # "nccl" on GPUs
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    train, test = loader(Stripes(96, augment=True), ranks), loader(Stripes(32, augment=False), ranks)
    mesh = autoshard.Mesh({"dp": max(2, ranks)}, hardware="ideal_network")  # "h100", …: of what the ranks really are
    sharded = autoshard.compile(Classifier(), mesh, next(iter(train)), inputs="local")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    if dist.is_initialized():
        torch.manual_seed(1 + dist.get_rank())  # of the augmentation: every rank its own
    for epoch in range(6):
        sharded.train()
        if isinstance(train.sampler, DistributedSampler):
            train.sampler.set_epoch(epoch)
        for batch in train:
            sharded(*batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    sharded.eval()
    with torch.no_grad():
        right = sum(sharded(*batch)[1].item() for batch in test)
    print(f"evaluation: {right / 32:.2f}")
    state = sharded.full_state_dict()  # collective; plain tensors under the original names
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, sys.argv[1] if len(sys.argv) > 1 else "out.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
