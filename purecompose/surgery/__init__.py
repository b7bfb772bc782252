"""Surgery: replace modules in a network and keep its weights and the matching optimizer state.

`operate` passes each module of a network to the rule for its type, and replaces it by the result:

    def smooth(conv, site):
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv) if max(conv.stride) > 1 else None

    state, report = surgery.operate(state, {nn.Conv2d: smooth}, name="smooth")

A parameter that is also in the new network is kept under its new name, with its part of the optimizer's state. The
initial weights of modules that a rule builds are drawn by the run's key and the place in the network. The old model and
state are not modified: a rule is given a copy of the module that shares its tensors, and must not write into these.
"""

from purecompose._support import publish
from purecompose.surgery.operation import (
    Report as Report,
    Rule as Rule,
    Rules as Rules,
    Site as Site,
    operate as operate,
)
from purecompose.surgery.weights import (
    summary as summary,
    to_module as to_module,
    with_statistics as with_statistics,
    with_weights as with_weights,
)


publish(__name__)
