"""A module for DL_PIPELINES: its worker claims 1, 2, 4, 8 ... jobs at once, however slow this machine runs them."""

from dataloader.farm import batch

batch.size_after = lambda size, _seconds, _runs: min(2 * size, batch.SIZE_MOST)
