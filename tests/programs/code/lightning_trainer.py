"""Lightning's Trainer over two nodes: `lightning_trainer.py STEPS [--resume]`."""

import pathlib
import sys
import time

import lightning
import torch
from lightning.pytorch import callbacks, loggers


class Network(lightning.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """Compute the loss of a batch, slowly."""
        time.sleep(0.2)
        loss = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Choose AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, and with --resume continue from the last checkpoint."""
    steps = int(sys.argv[1])
    folder = pathlib.Path("out-lightning")
    saver = callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=20, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        callbacks=[saver],
        logger=loggers.CSVLogger(folder),
        log_every_n_steps=5,
        enable_progress_bar=False,
    )
    print("environment:", type(trainer.strategy.cluster_environment).__name__, flush=True)
    data = torch.utils.data.DataLoader(torch.randn(65536, 16), batch_size=8)
    last = folder / "last.ckpt"
    resumed = str(last) if "--resume" in sys.argv and last.exists() else None
    print("resumes from", resumed, flush=True)
    trainer.fit(Network(), data, ckpt_path=resumed)


if __name__ == "__main__":
    main()
