"""A whole farm on this machine: `dataloader up`."""
