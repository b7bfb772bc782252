"""Messages in compiled steps of several processes: what is sent, in which order, and whether all agree."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purecompose import tree
from purecompose.core.ranks import Ranks
from purecompose.testing.process import in_process_group
from purecompose.transforms.compilation.updates import described, drop_unread, write_early
from tests.transforms.compilation.message_scenarios import SAME_BITS, results


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Return the results of each of several processes."""
    return in_process_group(results, request.param, "eager")


@pytest.fixture(scope="module")
def inductor_ranks() -> list[dict[str, Any]]:
    """Return the results of two processes whose steps Inductor has compiled."""
    return in_process_group(results, 2, "inductor")


@pytest.mark.parametrize("name", SAME_BITS)
def test_a_traced_step_has_the_bits_of_the_composed_one(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        composed, traced = found[name]
        assert tree.equal(traced, composed) and tree.equal(traced, ranks[0][name][0])


def test_messages_are_sent_while_the_backward_pass_goes_on(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        sends, products = _check_order(found["order"])
        # The last layer's gradient is known after five products, and each other after two more at most.
        assert all(send < products[5 + 2 * turn] for turn, send in enumerate(sends[:-1]))


@pytest.mark.slow
def test_inductor_sends_only_the_last_gradient_after_the_backward_pass(inductor_ranks: list[dict[str, Any]]) -> None:
    # Its scheduler may compute gradients later, to save memory, and sends each when it is computed.
    for found in inductor_ranks:
        _check_order(found["order"])
        _check_sent_once(found["clipping"])


def _check_order(found: list[str]) -> tuple[list[int], list[int]]:
    """Return the places of messages with gradients, and of products, between which all but the last are sent."""
    sends = [place for place, one in enumerate(found) if one == "send 4096"]
    products = [place for place, one in enumerate(found) if one == "product"]
    assert len(sends) == 4 and len(products) == 4 + 4 + 3
    assert [one for one in found[products[-1] :] if one != "product"] == ["send 4096"]
    assert all(
        any(send < product < later for product in products) for send, later in zip(sends, sends[1:], strict=False)
    )
    return sends, products


def test_gradients_that_are_replaced_are_not_sent(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        _check_sent_once(found["clipping"])


def _check_sent_once(found: list[str]) -> None:
    assert sum(int(one.split()[1]) for one in found if one.startswith("send")) - 4 * 4096 < 8


WORDS = {"messages": "would wait for each other: message ", "coupled": "as the mean over 2 slices"}


def test_processes_with_different_graphs_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["refusals"].keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in found["refusals"][name]


def test_processes_trace_a_batch_of_another_size_together(ranks: list[dict[str, Any]]) -> None:
    """Parts of other sizes may fit a graph of one process, and not that of another."""
    for found in ranks:
        composed, traced = found["all sizes"]
        assert tree.equal(traced, composed)


def test_a_part_that_fails_to_compile_in_one_process_fails_in_all(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        words = "no kernel" if rank == len(ranks) - 1 else f"rank {len(ranks) - 1} failed to compile"
        assert words in found["failures"]["no fallback"]
        (warning,), is_as_composed = found["failures"]["fallback"]
        assert words in warning and "run eagerly" in warning and is_as_composed


def test_a_step_does_not_copy_a_state_in_its_own_buffers(ranks: list[dict[str, Any]]) -> None:
    assert not any(found["has read"] for found in ranks)


# Graphs that are traced but not run


RANKS = Ranks("a group", 0, 2)


def traced(fn: Any, *shapes: tuple[int, ...]) -> torch.fx.GraphModule:
    return make_fx(fn, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes))


def test_what_only_an_unread_message_needs_is_removed() -> None:
    def sums(one: Tensor, other: Tensor) -> list[Tensor]:
        RANKS.reduced([one @ other], "sum")
        return RANKS.reduced([one + 1], "sum")

    module = traced(sums, (2, 2), (2, 2))
    drop_unread(module.graph)
    assert described(module.graph) == ["all_reduce of float32[4] (sum, group 0)"]
    assert not module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)


def test_a_graph_that_writes_nothing_does_not_keep_all_messages_on_their_way() -> None:
    def sums(one: Tensor) -> list[Tensor]:
        return [RANKS.scatter_sum(one @ one) for _ in range(8)]

    module = traced(sums, (2, 2))
    write_early(module)
    names = [str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function"]
    changes = [(name == "reduce_scatter_tensor") - (name == "wait_tensor") for name in names]
    assert max(itertools.accumulate(changes)) == 3 and names[-3:] == ["wait_tensor"] * 3


def test_sums_of_one_layer_are_waited_for_before_the_next_one_is_gathered() -> None:
    def layers(one: Tensor) -> list[Tensor]:
        return [RANKS.scatter_sum((one + turn) @ RANKS.gather(one).t()) for turn in range(4)]

    module = traced(layers, (2, 2))
    write_early(module)
    names = [str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function"]
    sent = [name.partition("_")[0] for name in names if name not in ("add", "mm", "t")]
    assert sent == ["all", "wait", "reduce", "wait"] * 4


def test_messages_keep_their_order_where_graphs_differ_in_other_operations() -> None:
    def sums(extra: int) -> Any:
        def run(one: Tensor, other: Tensor) -> list[Tensor]:
            for _ in range(extra):
                one = one + 1
            return [*RANKS.reduced([one], "sum"), *RANKS.reduced([other], "max")]

        return run

    modules = [traced(sums(extra), (2,), (2,)) for extra in (0, 3)]
    for module in modules:
        write_early(module, ())
    first, second = (described(module.graph) for module in modules)
    assert first == second and len(first) == 2
