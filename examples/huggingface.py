"""Fine-tuning a BERT of `transformers` by a step: layerwise learning rates, warm-up, clipping and averaged weights.

Nothing is downloaded: the encoder first learns the topics of many texts, and then, with a new head, another question
about topics from 16 texts.
"""

import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import purecompose as pc
from purecompose import State, algorithms as alg, compose, loop_events, losses, optim, schedule


WORDS, CLS = 64, 64  # the vocabulary: words of four topics, and a token for the whole text


def texts(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Return texts (number, 17), int64, in which half of the words are of one topic, and the topic of each."""
    of_topic, of_word, of_any, of_place = pc.random.split(pc.random.key(seed), 4)
    topic = pc.random.randint(of_topic, (number,), 0, 4)
    words = 16 * topic[:, None] + pc.random.randint(of_word, (number, 16), 0, 16)
    others = pc.random.randint(of_any, (number, 16), 0, WORDS)
    tokens = torch.where(pc.random.bernoulli(of_place, 0.5, (number, 16)), words, others)
    return torch.cat([torch.full((number, 1), CLS), tokens], 1), topic


def labelled(seed: int, number: int, num_labels: int) -> dict[str, Tensor]:
    """Return a batch of texts with their topics, or with 2 labels whether these are odd."""
    tokens, topics = texts(seed, number)
    return {"input_ids": tokens, "labels": topics % num_labels}


def make_net(num_labels: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore[reportMissingImports]

    torch.manual_seed(num_labels)  # for the initial weights
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    task = {"num_labels": num_labels, "problem_type": "single_label_classification", "initializer_range": 0.1}
    return BertForSequenceClassification(BertConfig(vocab_size=65, max_position_embeddings=17, **sizes, **task))


def pretrained(duration: str) -> Any:
    """Return an encoder that knows the topics; with `from_pretrained`, this is not needed."""
    optimizer = optim.adamw(4e-3 * schedule.linear(warmup="0.1dur"))
    state = State.create(make_net(4), loss=losses.model_loss, optimizer=optimizer, duration=duration)
    state = pc.fit(compose(loop_events), state, [labelled(seed, 64, 4) for seed in range(100)])
    return pc.to_module(state).bert


def tuned(encoder: Any, duration: str) -> State:
    net, lr = make_net(2), 4e-3 * schedule.linear(warmup="0.1dur")
    if encoder is not None:
        net.bert.load_state_dict(encoder.state_dict())
    optimizer = optim.adamw(lr, groups=optim.layerwise(net, lr, 0.75))
    state = State.create(net, loss=losses.model_loss, optimizer=optimizer, duration=duration)
    step = compose(loop_events, [alg.gradient_clipping("norm", 1.0), alg.ema("5ba")])
    return pc.fit(step, state, [labelled(1000, 16, 2)])


def main(first: str, duration: str) -> None:
    torch.set_num_threads(1)  # at this size more threads only wait for each other
    if find_spec("transformers") is None:
        return print("skipped: transformers is not installed")
    for name, encoder in {"from scratch": None, "fine-tuned": pretrained(first)}.items():
        state = pc.surgery.with_weights(tuned(encoder, duration), "ema")
        found = pc.evaluate(state, [labelled(2000, 512, 2)], ["accuracy"])
        print(f"{name}: accuracy {found['accuracy']:.2f}")


if __name__ == "__main__":
    main(*(("50ba", "20ba") if "--short" in sys.argv else ("200ba", "20ba")))
