"""Pure transforms for training neural networks on PyTorch's torch.func."""
