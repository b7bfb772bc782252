"""Functional cores in Lightning: RandAugment, MixUp, label smoothing and adaptive clipping in a LightningModule.

Lightning owns the loop, torch.optim the update. The draws follow from a seed, the epoch and the number of the batch.
"""

import sys
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import purecompose as pc
from purecompose import functional as cores


SEED = 0


def mixed_loss(net: nn.Module, images: Tensor, targets: Tensor, epoch: int, number: int) -> Tensor:
    """Return the loss of augmented and mixed images (N, 1, H, W) with smoothed targets, 0-d."""
    key = pc.random.fold_in(pc.random.fold_in(pc.random.key(SEED), epoch), number)
    augment_key, mix_key = pc.random.split(key)
    images = cores.randaugment_batch(augment_key, images, severity=1, depth=1, value_range=(0.0, 1.0))
    images, mixture = cores.mixup_batch(mix_key, images, targets, alpha=0.2)
    outputs = net(images)
    return F.cross_entropy(outputs, cores.smooth_labels(outputs, mixture.soft(outputs), 0.1))


def make_module() -> Any:
    import lightning  # pyright: ignore[reportMissingImports]

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = pc.nn.models.build("cnn", in_shape=(1, 8, 8), num_classes=10, seed=SEED)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, targets = batch
            return mixed_loss(self.net, images, targets, self.current_epoch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            params = dict(self.net.named_parameters())
            grads = {name: param.grad for name, param in params.items() if param.grad is not None}
            for name, grad in cores.clip_adaptively(grads, params, threshold=0.1).items():
                params[name].grad = grad.detach()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            images, targets = batch
            outputs = self.net(images)
            self.log("loss", F.cross_entropy(outputs, targets))
            self.log("accuracy", (outputs.argmax(1) == targets).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    return Digits()


def main(epochs: int) -> None:
    if find_spec("lightning") is None:
        return print("skipped: lightning is not installed")
    import lightning  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the images are in memory
    digits = pc.data.load("digits")
    order = torch.Generator().manual_seed(SEED)
    train = DataLoader(TensorDataset(digits.train_inputs, digits.train_targets), 64, shuffle=True, generator=order)
    test = DataLoader(TensorDataset(digits.test_inputs, digits.test_targets), 256)
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)
    module = make_module()
    (before,) = trainer.validate(module, test, verbose=False)
    trainer.fit(module, train)
    (after,) = trainer.validate(module, test, verbose=False)
    print(f"loss {before['loss']:.2f} -> {after['loss']:.2f}, accuracy {after['accuracy']:.2f}")


if __name__ == "__main__":
    main(2 if "--short" in sys.argv else 10)
