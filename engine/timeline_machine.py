"""The state machine as an inline SVG, drawn from its table, with how often each transition was taken. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from attrs import frozen

from ..fsm.guard import S, Trigger
from .timeline import Transition

_WIDTH, _HEIGHT = 640, 400
_NODE_WIDTH, _NODE_HEIGHT = 132, 46
_RADIUS_X, _RADIUS_Y = 210, 118


@frozen
class _Point:
    x: float
    y: float

    def __str__(self) -> str:
        return f"{self.x:.1f},{self.y:.1f}"


def machine_svg(triggers: Sequence[Trigger[S]], initial: S, counts: Mapping[Transition, int]) -> str:
    """States on an ellipse, one arrow for each pair of states, its triggers with their counts beside it."""
    states = list(type(initial))
    places = {
        state.name: _Point(
            _WIDTH / 2 + _RADIUS_X * math.sin(2 * math.pi * index / len(states)),
            _HEIGHT / 2 + 22 - _RADIUS_Y * math.cos(2 * math.pi * index / len(states)),
        )
        for index, state in enumerate(states)
    }
    arrows: dict[tuple[str, str], list[str]] = {}
    for trigger in triggers:
        for source in trigger.sources:
            target = source if trigger.target is None else trigger.target
            arrows.setdefault((source.name, target.name), []).append(trigger.name)
    drawn = [_arrow(pair, names, places, counts) for pair, names in arrows.items()]
    boxes = [_box(name, place, is_initial=name == initial.name) for name, place in places.items()]
    marker = (
        '<defs><marker id="arrowhead" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0L10,5L0,10z"/></marker></defs>'
    )
    label = f"State machine: {', '.join(places)}"
    return (
        f'<svg class="machine" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{marker}{''.join(drawn)}{''.join(boxes)}</svg>"
    )


def _box(name: str, place: _Point, *, is_initial: bool) -> str:
    left, top = place.x - _NODE_WIDTH / 2, place.y - _NODE_HEIGHT / 2
    size = f'width="{_NODE_WIDTH}" height="{_NODE_HEIGHT}" rx="12"'
    return (
        f'<g class="state{" initial" if is_initial else ""}"><rect x="{left:.1f}" y="{top:.1f}" {size}/>'
        f'<text x="{place.x:.1f}" y="{place.y + 5:.1f}">{escape(name)}</text></g>'
    )


def _arrow(
    pair: tuple[str, str], names: Sequence[str], places: Mapping[str, _Point], counts: Mapping[Transition, int]
) -> str:
    """A bent arrow, so that there and back lie apart; a loop on the outside for a state that stays."""
    source, target = places[pair[0]], places[pair[1]]
    centre = _Point(_WIDTH / 2, _HEIGHT / 2 + 22)
    taken = [counts.get((*pair, name), 0) for name in names]
    if source == target:
        path, at, anchor = _loop(source, centre)
    else:
        path, at, anchor = _bow(source, target, centre)
    lines = "".join(
        f'<tspan x="{at.x:.1f}" dy="{0 if index == 0 else 15}" class="{"taken" if count else "untaken"}">'
        f"{escape(name)}{f' × {count:,}' if count else ''}</tspan>"
        for index, (name, count) in enumerate(zip(names, taken, strict=True))
    )
    kind = "taken" if any(taken) else "untaken"
    return (
        f'<g class="arrow {kind}"><path d="{path}" marker-end="url(#arrowhead)"/>'
        f'<text x="{at.x:.1f}" y="{at.y:.1f}" text-anchor="{anchor}">{lines}</text></g>'
    )


def _bow(source: _Point, target: _Point, centre: _Point) -> tuple[str, _Point, str]:
    """A curve that bends to its left: going round clockwise, to the outside."""
    dx, dy = target.x - source.x, target.y - source.y
    length = math.hypot(dx, dy)
    bend = _Point((source.x + target.x) / 2 + dy / length * 46, (source.y + target.y) / 2 - dx / length * 46)
    start, end = _edge(source, bend), _edge(target, bend)
    along = 0.5 if abs(dy) < length / 3 else 0.36 if dy > 0 else 0.64  # nearer to the upper end, where there is room
    parts = ((1 - along) ** 2, 2 * along * (1 - along), along**2)
    middle = _Point(
        sum(part * point.x for part, point in zip(parts, (start, bend, end), strict=True)),
        sum(part * point.y for part, point in zip(parts, (start, bend, end), strict=True)),
    )
    out = _Point(middle.x + dy / length * 14, middle.y - dx / length * 14 + 4)
    anchor = "middle" if abs(dy) < abs(dx) / 3 else "end" if out.x < middle.x else "start"
    return f"M{start}Q{bend} {end}", out, anchor


def _loop(place: _Point, centre: _Point) -> tuple[str, _Point, str]:
    """A loop on the side that looks away from the centre."""
    if abs(place.x - centre.x) < _NODE_WIDTH / 2:  # above
        y = place.y - _NODE_HEIGHT / 2
        path = f"M{place.x - 24:.1f},{y:.1f}C{place.x - 46:.1f},{y - 46:.1f} {place.x + 46:.1f},{y - 46:.1f}"
        return f"{path} {place.x + 24:.1f},{y:.1f}", _Point(place.x + 44, y - 34), "start"
    side = 1 if place.x > centre.x else -1
    y = place.y + _NODE_HEIGHT / 2
    path = f"M{place.x - 24:.1f},{y:.1f}C{place.x - 46:.1f},{y + 46:.1f} {place.x + 46:.1f},{y + 46:.1f}"
    return f"{path} {place.x + 24:.1f},{y:.1f}", _Point(place.x + side * 46, y + 26), "start" if side > 0 else "end"


def _edge(place: _Point, towards: _Point) -> _Point:
    """Where the line from a box's middle to a point leaves the box."""
    dx, dy = towards.x - place.x, towards.y - place.y
    across = (_NODE_WIDTH / 2 + 3) / abs(dx) if dx else math.inf
    along = (_NODE_HEIGHT / 2 + 3) / abs(dy) if dy else math.inf
    factor = min(across, along)
    return _Point(place.x + dx * factor, place.y + dy * factor)
