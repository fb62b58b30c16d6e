"""Checkpoints that are whole or absent: written while training goes on, verified, continued from.

    epoch-0003.tmp-<attempt>/        everything is written, synced and counted here ...
    epoch-0003/                      ... and appears under this name by one rename
        dcp/                         weights and moments, in the format of torch.distributed.checkpoint
        manifest.json                step, settings, and size and CRC-32 of every file
    latest -> epoch-0003   best -> epoch-0002

Ranks hold the same model, so rank 0 writes, for all: one writer is one commit, with nothing to
agree upon (`saver`). Checkpoints of slurm-ddp 0.1 before November 2026 have `rank-0000/model.pt`
and `optimizer.pt` instead of `dcp/`.
"""
