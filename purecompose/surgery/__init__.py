"""Surgery: replace modules in a network and keep weights and fitting optimizer state.

`replace` goes through a network and hands each module to the rule for its type; what a rule returns takes its place. A
rule is written as for any `nn.Module`:

    def smooth(conv, site):
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv) if max(conv.stride) > 1 else None

    state, report = surgery.operate(state, {nn.Conv2d: smooth}, name="smooth")

A parameter that is found again is kept, under its new name: the very tensor, and what the optimizer remembers of it.
One that is not is dropped, one that was not there is made. Modules that a rule builds draw their first weights from a
seed that the run's key and their place decide, whatever was drawn elsewhere. Nothing is changed in place: the old
model, its tensors and its state are what they were. What a rule is given is a copy on the same tensors, whose settings
it may change, and whose tensors it may not write into.
"""

from purecompose.surgery.operation import Report, Surgery, operate, replace
from purecompose.surgery.summary import summary
from purecompose.surgery.visiting import Rule, Rules, Site
from purecompose.surgery.weights import to_module, with_statistics, with_weights


__all__ = [
    "Report",
    "Rule",
    "Rules",
    "Site",
    "Surgery",
    "operate",
    "replace",
    "summary",
    "to_module",
    "with_statistics",
    "with_weights",
]
