"""Fragments: the parts of a model that are exchanged one after the other (Streaming DiLoCo, Douillard et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping


def balanced_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Split layers into ``count`` fragments of nearly equal size.

    Layers are placed by decreasing size, each into the smallest fragment so far; layers of equal size therefore go to
    the fragments in turn, which is the strided pattern that the paper prefers (section 3.3). Within a fragment layers
    keep their order. The result depends on names and sizes alone, so all ranks make the same one.

    Args:
        sizes: elements by layer name, in the order of the model.
        count: number of fragments.

    Returns:
        The names of each fragment. No fragment is empty.

    Raises:
        ValueError: there are fewer layers than fragments.
    """
    if not 1 <= count <= len(sizes):
        raise ValueError(f"fragments must be between 1 and the number of parameters, {len(sizes)}, not {count}")
    fragments: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        smallest = min(range(count), key=lambda i: (loads[i], len(fragments[i]), i))
        fragments[smallest].append(name)
        loads[smallest] += sizes[name]
    order = {name: i for i, name in enumerate(sizes)}
    return [sorted(names, key=order.__getitem__) for names in fragments]
