"""Tools of the laws: stages that are inserted into a program."""

from purecompose import State, compose, loop
from purecompose.testing.record import inserted
from purecompose.testing.tasks import TASKS


class Repeated(loop.Scope):
    times: int

    def around(self, body, state):
        for _ in range(self.times):
            state = body(state)
        return state


def test_a_stage_is_inserted_into_every_scope_and_scopes_keep_their_settings() -> None:
    seen: list[int] = []

    def look(state: State) -> State:
        seen.append(state.num_examples)
        return state

    gradient = loop.Grad(loop.forward, loop.loss, wrt="0.*")
    program = Repeated(loop.Microbatches(gradient, microbatch_size=2), times=3), loop.update, loop.advance
    new = inserted(program, lambda node: look if node is loop.forward else None)
    assert [repr(node).replace("forward, look", "forward") for node in new] == list(map(repr, program))
    step, task = compose(new), TASKS["vectors"]
    step.fold(step.init(task.make_state(0)), task.make_batch(0, 6))
    assert seen[:9] == [2] * 9  # then come examples that the first run compares with halves of them
