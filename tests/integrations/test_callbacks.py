"""The callbacks of Lightning and of Hugging Face's Trainer: against a plain loop and a step, and resumed."""

import pathlib
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import purecompose as pc
from purecompose import algorithms as alg
from purecompose.errors import UnsupportedError
from purecompose.integrations import lightning_callback, trainer_callback
from tests.integrations.test_methods import by_step, close, make_batches, new_net


def methods() -> list[pc.Algorithm]:
    return [alg.mixup(), alg.label_smoothing(0.1), alg.gradient_clipping("norm", 0.05), alg.ema("2ba"), alg.blurpool()]


def loader(number: int = 5) -> DataLoader[Any]:
    return DataLoader(make_batches(number), batch_size=None)  # pyright: ignore[reportArgumentType]


def lightning_module() -> Any:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = new_net()
            self.seen = list[Any]()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            return F.cross_entropy(self.net(inputs), targets)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(self.net[-1].weight.detach().clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def trainer_of(folder: pathlib.Path, callback: Any, epochs: int = 1) -> Any:
    import lightning

    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[callback],
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_as_a_step_and_validates_averages(tmp_path: pathlib.Path) -> None:
    module = lightning_module()
    callback = lightning_callback(methods(), key=3, num_classes=4)
    trainer_of(tmp_path, callback).fit(module, loader(), loader(1))
    state = by_step(methods())
    close(dict(module.net.named_parameters()), state.params)
    averages = pc.surgery.with_weights(state, "ema").params
    torch.testing.assert_close(module.seen[-1], averages["5.weight"])
    assert not torch.allclose(module.seen[-1], module.net[-1].weight)
    torch.testing.assert_close(callback.methods.weights("ema")["net.5.weight"], averages["5.weight"])


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_to_the_same_bits(tmp_path: pathlib.Path) -> None:
    whole = lightning_module()
    trainer_of(tmp_path, lightning_callback(methods(), key=3, num_classes=4), 2).fit(whole, loader())
    first = trainer_of(tmp_path, lightning_callback(methods(), key=3, num_classes=4))
    first.fit(lightning_module(), loader())
    first.save_checkpoint(tmp_path / "half.ckpt")
    second, callback = lightning_module(), lightning_callback(methods(), key=8, num_classes=4)
    trainer_of(tmp_path, callback, 2).fit(second, loader(), ckpt_path=str(tmp_path / "half.ckpt"))
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in second.state_dict().items())
    assert callback.methods.state.timestamp.batch == 10


@pytest.mark.filterwarnings("ignore")
def test_lightning_refuses_methods_and_batches_that_it_cannot_change(tmp_path: pathlib.Path) -> None:
    module = lightning_module()
    with pytest.raises(UnsupportedError, match="^sam: not in another loop"):
        lightning_callback([alg.sam()])
    callback = lightning_callback([alg.cutout()])
    changed = callback.methods
    changed.start(module)
    with pytest.raises(TypeError, match="expected batches that are lists or dictionaries, got tuple"):
        callback.on_train_batch_start(None, module, tuple(make_batches(1)[0]), 0)


@pytest.mark.filterwarnings("ignore")
def test_lightning_counts_updates_and_clips_the_gradients_of_each_optimizer(tmp_path: pathlib.Path) -> None:
    kind: Any = type(lightning_module())

    class Two(kind):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            F.cross_entropy(self.net(batch[0]), batch[1]).backward()
            for optimizer in self.optimizers():
                optimizer.step()
                own = optimizer.optimizer.param_groups[0]["params"]
                self.seen.append(torch.cat([param.grad.flatten() for param in own]).norm().item())
            self.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[:3], self.net[3:])]

    module = Two()
    trainer_of(tmp_path, lightning_callback([alg.gradient_clipping("norm", 1e-3)])).fit(module, loader())
    assert module.seen == pytest.approx([1e-3] * 10, rel=1e-3)
    callback = lightning_callback([alg.ema("2up")])
    trainer = trainer_of(tmp_path, callback, 2)
    trainer.accumulate_grad_batches = 5
    trainer.fit(lightning_module(), loader())
    time = callback.methods.state.timestamp
    assert (time.batch, time.update) == (10, 2)


class Small(nn.Module):
    """A network as those of transformers are called: with labels, it returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = new_net()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.net(inputs)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def huggingface_run(folder: pathlib.Path, callback: Any, steps: int = 6, **resume: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    samples = [
        {"inputs": image, "labels": label}
        for images, labels in make_batches()
        for image, label in zip(images, labels, strict=True)
    ]
    live = list[dict[str, torch.Tensor]]()

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            live.append({name: one.detach().clone() for name, one in others["model"].named_parameters()})

    settings = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=6,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        report_to=[],
        use_cpu=True,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        disable_tqdm=True,
        seed=0,
    )
    net = Small()
    trainer = transformers.Trainer(
        net, settings, train_dataset=samples, eval_dataset=samples[:6], callbacks=[callback, Watch()]
    )
    trainer.train(**resume)
    live.append({name: one.detach().clone() for name, one in net.named_parameters()})
    return net, live, trainer


@pytest.mark.filterwarnings("ignore")
def test_huggingface_clips_and_averages_and_resumes(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    chosen = [alg.gradient_clipping("norm", 0.01), alg.ema(smoothing=0.5)]
    callback = trainer_callback(chosen)
    net, live, trainer = huggingface_run(tmp_path / "whole", callback)
    average = live[1]
    for before, after in zip(live[:-1], live[1:], strict=True):
        moved = torch.cat([(after[name] - before[name]).flatten() for name in after]).norm().item()
        assert moved == pytest.approx(0.1 * 0.01, rel=1e-3)  # the rate times the bound of the norm
        average = {name: 0.5 * average[name] + 0.5 * after[name] for name in after} if before is not live[0] else after
    close({name: callback.methods.weights("ema")[name] for name in average}, average)
    again = trainer_callback(chosen)
    resumed, _, _ = huggingface_run(
        tmp_path / "whole", again, resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3")
    )
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in resumed.state_dict().items())
    close(again.methods.weights("ema"), callback.methods.weights("ema"))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    net.load_state_dict(callback.methods.weights("ema"), strict=False)
    expected = net.eval()(*make_batches(1)[0])["loss"].item()
    assert losses[-1] == pytest.approx(expected, rel=1e-5)


def test_huggingface_refuses_methods_on_batches() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with pytest.raises(UnsupportedError, match="^mixup: not in another loop, because it acts at .*AFTER_DATALOADER"):
        trainer_callback([alg.mixup()])


def test_huggingface_refuses_scaled_gradients() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    args = types.SimpleNamespace(fp16=True, max_grad_norm=0.0)
    clipping = trainer_callback([alg.gradient_clipping("norm", 1.0)])
    with pytest.raises(ValueError, match="unscales gradients only for its own clipping: instead of max_grad_norm=0"):
        clipping.on_train_begin(args, types.SimpleNamespace(global_step=0), None)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        trainer_callback([])
