"""A classifier of images, in the manner of torchvision's references: `images.py --epochs N [--resume FILE]`.

Plain torch: DistributedSampler, a checkpoint every few epochs and on SIGUSR1, and the references' lines.
"""

import argparse
import os
import pathlib
import signal
import time
import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

CLASSES = 4
asked: list[int] = []  # the signals that came


def note(number: int, _: types.FrameType | None) -> None:
    """Remember that a signal asks to save and end."""
    asked.append(number)


def main() -> None:
    """Train, and save every few epochs."""
    args = _arguments()
    signal.signal(signal.SIGUSR1, note)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    images = data.TensorDataset(*draw(64))
    sampler = data.distributed.DistributedSampler(images)
    loader = data.DataLoader(images, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)

    first = 0
    if args.resume:
        held = torch.load(args.resume, map_location=device)
        model.module.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        scheduler.load_state_dict(held["lr_scheduler"])
        first = held["epoch"] + 1
        say(f"resumed at epoch {first}")
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, device, epoch)
        scheduler.step()
        held = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": scheduler.state_dict(),
            "epoch": epoch,
        }
        is_last = is_any_asked(device)
        if dist.get_rank() == 0 and (is_last or epoch % args.save_every == 0):
            save(held, pathlib.Path(args.output_dir, f"model_{epoch:06}.pth"))
        if is_last:
            say(f"saved on a signal after epoch {epoch}")
            break
    dist.destroy_process_group()


def is_any_asked(device: torch.device) -> bool:
    """Return on all ranks whether any of them is asked to save and end."""
    flag = torch.tensor(len(asked), device=device)
    dist.all_reduce(flag)
    return flag.item() > 0


def train(
    model: nn.Module,
    loader: data.DataLoader,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    epoch: int,
) -> None:
    """Train for an epoch, and print the mean loss."""
    total = 0.0
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        time.sleep(0.05)
    say(f"Epoch: {epoch} lr: {optimizer.param_groups[0]['lr']} loss: {total / len(loader):.4f}")


def network() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with one bright quarter (N, 3, 16, 16), and the number of that quarter (N)."""
    labels = torch.arange(count) % CLASSES
    images = torch.randn(count, 3, 16, 16)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1
    return images, labels


def save(held: dict[str, object], path: pathlib.Path) -> None:
    """Save a checkpoint, which appears whole."""
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    torch.save(held, draft)
    draft.replace(path)


def say(text: str) -> None:
    """Print a line on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--output-dir", default="out-images")
    parser.add_argument("--resume")
    return parser.parse_args()


if __name__ == "__main__":
    main()
