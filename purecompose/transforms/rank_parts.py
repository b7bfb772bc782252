"""The part of a step that each of several ranks runs on its own part of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from purecompose.core.divided import sharing
from purecompose.core.means import denominators, part_of
from purecompose.core.operation import NO_PURPOSE, Carry, Operation, Purpose
from purecompose.core.program import matching_params
from purecompose.core.ranks import Ranks, Share
from purecompose.core.sealed import SealedOutputs
from purecompose.core.separable import check_halves
from purecompose.core.shared_part import Shard, SharedPart
from purecompose.core.slices import check_rows
from purecompose.core.state import State
from purecompose.transforms.rank_results import (
    SumGradients,
    averaged,
    warn_of_different_buffers,
    with_buffers,
    with_slots,
)
from purecompose.transforms.sharding.gathering import Placing


__all__ = ["OnPart", "check_part"]


@dataclass(frozen=True, eq=False)
class OnPart:
    """An operation that runs another one on this rank's part of the batch, and combines the results of all ranks."""

    operation: Operation
    """The operation for a part of the batch."""
    ranks: Ranks
    wrt: Sequence[str | None]
    """The patterns of the gradients that the operation computes."""
    is_checked: bool
    """True to compare the loss of this rank's part with the mean over its halves in a first run."""
    is_whole: bool
    """True if the part is not cut into slices. Then all ranks run the network equally often, and batch normalisation
    may use the statistics of the whole batch."""
    is_by_layer: bool
    """True if results of slices are means over the ranks already; see `by_layer`."""

    def __call__(self, carry: Carry, purpose: Purpose, sum_gradients: SumGradients | None = None) -> Carry:
        """Run the operation.

        Args:
            carry: Input of the operation, the same on all ranks.
            purpose: The purpose of the run.
            sum_gradients: See `averaged`.
        """
        if purpose.sharing == "none":
            return self.operation(carry, purpose)
        state, ranks = carry.state, self.ranks
        if purpose.is_first:
            check_rows(state)
        share, end = self._run(carry, purpose)
        if purpose.sharing == "own":
            return end._replace(terms=carry.terms)
        after, used, terms = end
        _check_kept(state, after)
        own = None if after.grads is None else dict(after.grads)
        del end  # so that each gradient is freed when it has been sent
        if not self.is_by_layer:
            after = after.replace(grads=None)
            names = [name for pattern in self.wrt for name in matching_params(state.context.trainable, pattern)]
            has_shared = self.is_whole and share.num_examples > 0 and state.model.skeleton(train=True).has_batch_norms
            sum_gradients = dict if purpose.replaces_gradients else sum_gradients
            weight = _weight(share, terms)
            after = averaged(state, after, own, names, weight, ranks, sum_gradients, shares_statistics=has_shared)
        if not purpose.is_again:
            if purpose.watch is not None:
                warn_of_different_buffers(state, after, ranks)
            after = after.replace(
                buffers=with_buffers(ranks, state.buffers, after.buffers, share.num_examples),
                slots=with_slots(ranks, state.slots, after.slots, counts=share.num_examples > 0),
            )
        return Carry(after, used, carry.terms)

    def _run(self, carry: Carry, purpose: Purpose) -> tuple[Share, Carry]:
        """Return this rank's share of the batch, and the end of its part, where the batch is whole again."""
        state, ranks = carry.state, self.ranks
        share, start = _start_of_part(state, ranks)
        if purpose.sharing == "all":
            sizes = share.first_example, share.num_examples, state.num_examples
            shard = Shard(ranks, *sizes, is_cut_alike=self.is_by_layer)
            part = SharedPart(ranks, share.num_examples, state.device)
            with sharing(part if self.is_whole else None, part if self.is_whole or self.is_by_layer else None):
                end = self.operation(Carry(start, carry.used), purpose._replace(shard=shard))
        else:
            end = self.operation(Carry(start.replace(denominators=state.denominators), carry.used), purpose)
        if self.is_checked and purpose.is_first and start.whole_loss is None:
            check_halves(end.state.replace(batch=share.batch, first_example=start.first_example))
        after = end.state.replace(batch=state.batch, first_example=state.first_example, denominators=state.denominators)
        if after.outputs is not state.outputs:
            after = after.replace(outputs=SealedOutputs(ranks.size))
        return share, end._replace(state=after)


def check_part(to_loss: Operation, ranks: Ranks, placing: Placing | None, carry: Carry) -> None:
    """Check loss and buffers of this rank's part by their values, which a traced step does not have.

    Args:
        to_loss: The part of a step before its loss.
        ranks: The processes.
        placing: How parameters are divided among them.
        carry: Input of the part of the step that the processes share.
    """
    state = carry.state
    share, start = _start_of_part(state, ranks)
    is_by_layer = placing is not None and placing.is_by_layer
    if placing is not None and not is_by_layer:
        start = start.replace(params=placing.gathered(state.params))
    part = SharedPart(ranks, share.num_examples, state.device)
    with sharing(part, part):
        end = to_loss(Carry(start, carry.used), NO_PURPOSE).state
    if not is_by_layer:  # where a process with one example, which has no halves, would not gather the loss's parameters
        check_halves(end.replace(batch=start.batch, first_example=start.first_example))
    warn_of_different_buffers(state, end, ranks)


def _start_of_part(state: State, ranks: Ranks) -> tuple[Share, State]:
    """Return this rank's share of the batch, and the state at the start of its part."""
    share = ranks.share(state.batch, state.context.layout)
    first = share.first_example if state.first_example is None else state.first_example + share.first_example
    own = part_of(denominators(state), max(share.num_examples, 1), state.num_examples)
    return share, state.replace(batch=share.batch, first_example=first, denominators=own)


def _check_kept(before: State, after: State) -> None:
    for name in ("params", "opt_state", "hparams", "key"):
        if getattr(after, name) is not getattr(before, name):
            raise RuntimeError(
                f"data_parallel: {name} changed between BEFORE_FORWARD and AFTER_BACKWARD, where each process sees its "
                "own part of the batch, and states would come apart: change it at AFTER_TRAIN_BATCH or later; an "
                "update belongs after Microbatches"
            )


def _weight(share: Share, terms: int | Tensor | None) -> int | Tensor:
    """Return the weight of a part of the batch: its number of terms of the loss, or of examples."""
    if isinstance(terms, Tensor):  # counted even without a share, so that all ranks have the same graph
        return terms * min(share.num_examples, 1)
    return share.num_examples if terms is None or not share.num_examples else terms
