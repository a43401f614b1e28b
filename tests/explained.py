"""A check of any space: refusals give reasons, and what legal knobs imply are finite numbers."""

from __future__ import annotations

import numpy as np

from kt.spaces.space import Space


def check_rules_and_features(space: Space, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws points of a space of one family; returns the derived features of the legal ones."""
    (part,) = space.parts
    points = part.draw(rng, 2000)
    reasons = {part.why_illegal(int(p)) for p in points[~part.legal(points)][:200]}
    assert all(reason and len(reason) > 15 for reason in reasons)
    values = part.columns(part.indices(points[part.legal(points)]))
    derived = part.family.derive(space.workload, space.target, values)
    assert all(np.isfinite(column).all() for column in derived.values())
    return derived
