"""Implementation of checkpoints; the public names are in `purecompose.saving`."""
