"""The outputs of a batch that has run in parts, which cannot be read: only those of the last part are there."""

from typing import Any, NoReturn

from purecompose import tree


class SealedOutputs:
    """A placeholder for the outputs after a batch has run in several parts, of which the last part's would be left.

    It is a pytree node without leaves, so that it passes through transforms.
    """

    def __init__(self, num_parts: int) -> None:
        self.num_parts = num_parts

    def _refuse(self, *unused: Any) -> NoReturn:
        raise RuntimeError(
            f"state.outputs was read after the batch has run in {self.num_parts} parts (slices or processes), where it "
            "would be that of the last part only, beside the whole batch. Read it within each part, from AFTER_FORWARD "
            "to AFTER_BACKWARD; or run the network on the whole batch again, state.forward(state.inputs)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that NumPy, copy and others look up before they read
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise for torch functions of sealed outputs, such as `torch.any(state.outputs)`."""
        given = tree.leaves((args, kwargs or {}), is_leaf=lambda node: isinstance(node, cls))
        next(leaf for leaf in given if isinstance(leaf, cls))._refuse()

    __bool__ = __float__ = __getitem__ = __iter__ = __len__ = __array__ = __eq__ = _refuse  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __matmul__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # pyright: ignore

    def __repr__(self) -> str:
        return f"SealedOutputs(num_parts={self.num_parts})"


tree.register_node(
    SealedOutputs, lambda sealed: ((), (), sealed.num_parts), lambda names, children, static: SealedOutputs(static)
)
