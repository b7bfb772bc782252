"""Skeletons: architectures without weights, and the places of their tensors.

The places are the containers that hold a tensor: a module's parameters and buffers, lists and dictionaries among
its attributes. Tensors are put there for as long as a `with` block lasts; what a forward pass leaves in other
places is put back.
"""

from purecompose.nn.skeleton import checks
from purecompose.nn.skeleton.binding import Skeleton, replay
from purecompose.nn.skeleton.places import OWN, places
from purecompose.nn.skeleton.sharing import Member, Sharing


__all__ = ["OWN", "Member", "Sharing", "Skeleton", "checks", "places", "replay"]
