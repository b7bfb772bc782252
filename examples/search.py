"""Search for settings with Optuna: each trial is a run, and an observer prunes trials with a bad metric.

The settings of a trial are named scalars in the state, so all trials share one step, and with a compiled step also its
graphs. To train a few settings at once, use `pc.analysis.sweep`.
"""

import argparse
import sys

import torch
from torch import nn

import purecompose as pc
from purecompose import Evaluator, Event, State, algorithms as alg, compose, data, hparam, loop_events, optim


try:
    import optuna  # pyright: ignore[reportMissingImports]
except ImportError:
    print("skipped: it needs optuna, pip install 'purecompose[optuna]'")
    sys.exit()


class Pruning:
    """An observer that reports a metric after each evaluation, and ends the run if Optuna prunes the trial."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial, self.metric, self.last = trial, metric, float("nan")

    def __call__(self, event: Event, state: State) -> None:
        if event is Event.EVAL_END and self.metric in state.metrics:
            self.last = state.metrics[self.metric].item()
            self.trial.report(self.last, state.timestamp.batch)
            if self.trial.should_prune():
                raise optuna.TrialPruned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="10 trials instead of 40")
    num_trials = 10 if parser.parse_args().short else 40
    torch.set_num_threads(1)  # for a network of this size, several threads are slower

    inputs = pc.random.normal(pc.random.key(0), (640, 16))
    targets = (inputs[:, :4].argmax(1) + (inputs[:, 4] > 0)) % 4
    train = data.arrays(inputs[:384], targets[:384], batch_size=32)
    evaluator = Evaluator(data.arrays(inputs[384:], targets[384:], batch_size=256), {"loss": pc.metrics.mean_loss()})

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = optim.adamw(hparam("lr", 1e-3) * pc.schedule.cosine(), weight_decay=hparam("decay", 0.1))
    start = State.create(net, loss=pc.losses.cross_entropy, optimizer=optimizer, duration="8ep")
    step = compose(loop_events, [alg.label_smoothing(hparam("smoothing", 0.1))])

    def objective(trial: optuna.Trial) -> float:
        settings = {
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "decay": trial.suggest_float("decay", 1e-3, 1.0, log=True),
            "smoothing": trial.suggest_float("smoothing", 0.01, 0.3),
        }
        pruning = Pruning(trial, "eval/loss")
        pc.fit(step, step.init(start).replace(hparams=settings), train, evaluate=evaluator, observers=pruning)
        return pruning.last

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=4)
    )
    study.optimize(objective, n_trials=num_trials)
    pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    first = study.trials[0].value
    print(f"{num_trials} trials, {pruned} of them pruned; eval/loss: first {first:.4f}, best {study.best_value:.4f}")
    print(", ".join(f"{name}={value:.3g}" for name, value in study.best_params.items()))
    assert first is not None and study.best_value <= first


if __name__ == "__main__":
    main()
