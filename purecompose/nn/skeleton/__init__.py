"""Skeletons: architectures without weights, and the places of their tensors.

A place is an entry of a container that holds a tensor: a module's parameters and buffers, and lists and dictionaries
among its attributes. Tensors are put there for the duration of a `with` block; changes that a forward pass makes in
other places are undone.
"""

from purecompose.nn.skeleton import checks
from purecompose.nn.skeleton.binding import Skeleton, replay
from purecompose.nn.skeleton.places import OWN, places
from purecompose.nn.skeleton.sharing import Member, Sharing


__all__ = ["OWN", "Member", "Sharing", "Skeleton", "checks", "places", "replay"]
