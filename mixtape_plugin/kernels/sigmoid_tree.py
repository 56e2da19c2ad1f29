"""The sigmoid tree, which makes priors of K components out of K−1 gates γ (Mixtape, eq. 3; any K ≥ 2 alike).

Node 0 is the root. Node j < K−1 has two children: 2j+1, which gets the share γ_j of its mass, and 2j+2, which gets
1 − γ_j. Nodes K−1 to 2K−2 are leaves: the components, which are numbered left to right, depth first. K = 3: γ_0 γ_1,
γ_0 (1 − γ_1), 1 − γ_0.

Mixing goes from the leaves up, γ_j · left + (1 − γ_j) · right, and never builds the priors. It needs one slot a
component: the value of a subtree lies in the slot of its rightmost leaf.

Shapes: K components.
"""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """A node with children: its number, which is that of its gate, and the slots of its children's values. Its own
    value goes to the right one."""

    number: int
    left: int
    right: int


def rightmost_leaves(num_components: int) -> list:
    """For each of the 2K−1 nodes the component of the rightmost leaf below it: a leaf's own, for a leaf."""
    num_gates = num_components - 1
    components = iter(range(num_components))
    rightmost = [0] * (2 * num_components - 1)

    def visit(node: int) -> int:
        if node >= num_gates:
            rightmost[node] = next(components)
        else:
            visit(2 * node + 1)
            rightmost[node] = visit(2 * node + 2)
        return rightmost[node]

    visit(0)
    return rightmost


def nodes_bottom_up(num_components: int) -> list:
    """The K−1 :class:`Node` with children, each after its children, the root last."""
    slots = rightmost_leaves(num_components)
    return [Node(j, slots[2 * j + 1], slots[2 * j + 2]) for j in reversed(range(num_components - 1))]
