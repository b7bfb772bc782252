"""Learning rates that fall from the head of a network to its first layers."""

from typing import Any

from torch import nn

from purecompose._support.checks import check_number, suggests_keywords
from purecompose.optim.checks import checked_scalar
from purecompose.schedule import Scalar


@suggests_keywords()
def layerwise(net: nn.Module, lr: Scalar, decay: float, *, blocks: str | None = None) -> dict[str, dict[str, Any]]:
    """Return groups for fine-tuning, whose learning rates fall by a factor with every block from the head to the input.

    With L blocks, block i (from 0) has the learning rate lr * decay^(L - i). Parameters defined before the blocks
    (embeddings) have lr * decay^(L + 1). Those defined after them (the head) have no group: they train with the
    optimizer's own learning rate, which should be `lr`.

    Args:
        net: The network; only its names are read.
        lr: The learning rate of the head; it may be a schedule or an hparam.
        decay: The factor, in (0, 1]; 0.65 to 0.9 are common.
        blocks: The name of the module that contains the blocks, in order, such as "encoder.layer"; by default the
            `nn.ModuleList` or `nn.Sequential` with the most members.

    Returns:
        Groups for an optimizer, to which others may be added: `optim.adamw(lr, groups=layerwise(net, lr, 0.75))`.

    Raises:
        TypeError, ValueError: A setting is of the wrong kind or out of range, or the network has no such list.

    Example:
        >>> blocks = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net = nn.ModuleDict({"embed": nn.Embedding(5, 2), "blocks": blocks})
        >>> layerwise(net, 1.0, 0.5)
        {'embed.weight': {'lr': 0.125}, 'blocks.0.*': {'lr': 0.25}, 'blocks.1.*': {'lr': 0.5}}

    References:
        Jeremy Howard, Sebastian Ruder: Universal Language Model Fine-tuning for Text Classification. ACL 2018.
        https://arxiv.org/abs/1801.06146
    """
    lr = checked_scalar(lr, "layerwise: lr")
    decay = check_number(decay, "layerwise: decay", 0, 1, above=True)
    where = _blocks_of(net) if blocks is None else blocks
    num = len(list(net.get_submodule(where).children()))
    if num == 0:
        raise ValueError(f"layerwise: blocks={where!r}: expected a module that holds blocks, got one without children")
    prefix = f"{where}." if where else ""
    children = [name for name, _ in net.get_submodule(where).named_children()]
    before = []
    for name, _ in net.named_parameters():
        if name.startswith(prefix):
            break
        before.append(name)
    groups: dict[str, dict[str, Any]] = {name: {"lr": lr * decay ** (num + 1)} for name in before}
    return groups | {f"{prefix}{child}.*": {"lr": lr * decay ** (num - i)} for i, child in enumerate(children)}


def _blocks_of(net: nn.Module) -> str:
    lists = {
        name: len(module)
        for name, module in net.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and any(True for _ in module.parameters())
    }
    if not lists:
        raise ValueError(
            "layerwise: the network has no nn.ModuleList or nn.Sequential of blocks; name the module that holds them, "
            'as in blocks="encoder.layer"'
        )
    return max(lists, key=lambda name: lists[name])
