"""Draws passes.svg: what two pipeline stages do with three passes of four micro-batches.

    python docs/pictures/passes.py > docs/pictures/passes.svg

The order on each stage is that of megatron-core's interleaved schedule; when something can start follows from what it
waits for.  A forward takes one unit of time, a backward two.
"""

from __future__ import annotations

STAGES, PASSES, BATCHES, GROUP = 2, 3, 4, 2
UNIT, HEIGHT, LEFT, TOP = 20, 34, 84, 190
FORWARD = ["#9ecae1", "#a1d99b", "#fdd0a2"]
BACKWARD = ["#3182bd", "#31a354", "#e6850e"]
Work = tuple[bool, int, int]  # (whether forward, pass, micro-batch)


def order(stage: int) -> list[Work]:
    """What a stage does, one after the other: warm-up, one forward and one backward in turn, the rest."""
    groups = [range(i, i + GROUP) for i in range(0, BATCHES, GROUP)]
    ahead = (STAGES - stage - 1) * 2 + (PASSES - 1) * GROUP
    forward = [(True, p, b) for group in groups for p in range(PASSES) for b in group]
    backward = [(False, p, b) for group in groups for p in reversed(range(PASSES)) for b in group]
    work = forward[:ahead]
    for f, b in zip(forward[ahead:], backward, strict=False):
        work += [f, b]
    return work + backward[len(forward) - ahead :]


def needs(stage: int, work: Work) -> tuple[int, Work] | None:
    """(stage, work) that must be done before: the message comes from there."""
    forward, p, b = work
    if forward:
        if stage > 0:
            return stage - 1, work
        return (STAGES - 1, (True, p - 1, b)) if p > 0 else None
    if stage < STAGES - 1:
        return stage + 1, work
    return (0, (False, p + 1, b)) if p < PASSES - 1 else (stage, (True, p, b))


def times() -> dict[tuple[int, Work], int]:
    """When each stage starts each piece of work."""
    starts: dict[tuple[int, Work], int] = {}
    queues, free = [order(s) for s in range(STAGES)], [0] * STAGES
    while any(queues):
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            before = needs(stage, queue[0])
            if before is not None and before not in starts:
                continue
            ready = 0 if before is None else starts[before] + length(before[1])
            starts[stage, queue[0]] = max(free[stage], ready)
            free[stage] = starts[stage, queue[0]] + length(queue.pop(0))
    return starts


def length(work: Work) -> int:
    """Units of time."""
    return 1 if work[0] else 2


def text(x: float, y: float, what: str, **style: str) -> str:
    rest = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}"{rest}>{what}</text>'


def box(x: float, y: float, w: float, h: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="#555"/>'


def arrow(*points: tuple[float, float]) -> str:
    return (
        '<polyline points="'
        + " ".join(f"{x:g},{y:g}" for x, y in points)
        + '" fill="none" stroke="#333" stroke-width="1.4" marker-end="url(#tip)"/>'
    )


def flow() -> list[str]:
    """The way of one micro-batch: through both stages, and back to the first one for the next pass."""
    out, width, step = [], 96, 250
    for p in range(PASSES):
        left = 60 + p * step
        out.append(text(left + width + 8, 22, f"pass {p} = chunk {p}", text_anchor="middle", font_weight="bold"))
        for stage in range(STAGES):
            x = left + stage * (width + 16)
            out.append(box(x, 34, width, 46, FORWARD[p]))
            out.append(text(x + width / 2, 54, f"stage {stage}", text_anchor="middle"))
            layers = "layers 0 to 5" if stage == 0 else "layers 6 to 11"
            out.append(text(x + width / 2, 70, layers, text_anchor="middle", font_size="11"))
        out.append(arrow((left + width, 57), (left + width + 14, 57)))
        end = left + 2 * width + 16
        if p < PASSES - 1:
            out.append(arrow((end, 57), (left + step - 2, 57)))
            out.append(text((end + left + step) / 2, 98, "feedback", text_anchor="middle", font_size="11"))
    out.append(arrow((22, 57), (58, 57)))
    out.append(text(20, 50, "tokens", font_size="11"))
    out.append(arrow((end, 57), (end + 26, 57)))
    out.append(text(end + 6, 50, "loss", font_size="11"))
    out.append(text(60, 122, "The weights of a stage are the same in every pass: there is one copy of them."))
    return out


def timetable() -> list[str]:
    """Both stages over time."""
    out = [text(20, TOP - 36, "Both stages over time, four micro-batches (numbers); light: forward, dark: backward")]
    starts = times()
    for stage in range(STAGES):
        y = TOP + stage * (HEIGHT + 12)
        out.append(text(20, y + 21, f"stage {stage}"))
        for (where, work), start in starts.items():
            if where == stage:
                forward, p, b = work
                out.append(
                    box(LEFT + start * UNIT, y, length(work) * UNIT, HEIGHT, (FORWARD if forward else BACKWARD)[p])
                )
                middle = LEFT + (start + length(work) / 2) * UNIT
                ink = "#000" if forward else "#fff"
                out.append(text(middle, y + 21, str(b), text_anchor="middle", fill=ink, font_size="12"))
    y = TOP + STAGES * (HEIGHT + 12) + 14
    for p in range(PASSES):
        out += [box(LEFT + p * 110, y - 11, 14, 14, FORWARD[p]), box(LEFT + 16 + p * 110, y - 11, 14, 14, BACKWARD[p])]
        out.append(text(LEFT + 36 + p * 110, y + 1, f"pass {p}", font_size="12"))
    return out


def picture() -> str:
    """The whole SVG."""
    starts = times()
    width = LEFT + UNIT * max(start + length(work) for (_, work), start in starts.items()) + 20
    height = TOP + STAGES * (HEIGHT + 12) + 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="13">',
            "<title>Three passes of four micro-batches on two pipeline stages</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#333"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *flow(),
            *timetable(),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    print(picture(), end="")
