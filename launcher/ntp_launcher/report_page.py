"""The report as one HTML page without any outside file: figures first, then plots, then what happened."""

import re
from collections.abc import Iterator, Sequence
from html import escape
from time import localtime, strftime

from ntp.errors import PlanError
from ntp.plan import make_plan
from ntp_launcher.live import duration, quantity
from ntp_launcher.progress import RECOVERY_PARTS
from ntp_launcher.report_data import Line, Run
from ntp_launcher.svg import Series, Span, lines, stacked, timeline

_MOST_EVENTS = 200
_CSS = """
:root{--paper:#fff;--ink:#1c1f24;--soft:#6a717c;--rule:#dfe3e8;--mark:#c8372d;
--c0:#2563b0;--c1:#c2701c;--c2:#2e8b57;--c3:#8a4fb0;--c4:#b0375f;--c5:#5f6b1f}
@media (prefers-color-scheme:dark){:root{--paper:#14171c;--ink:#e6e8eb;--soft:#9aa2ad;--rule:#2d333b;
--mark:#ff7a6e;--c0:#6ea8f0;--c1:#e8a45c;--c2:#66c290;--c3:#c39ae0;--c4:#e58aa8;--c5:#b9c46a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:1rem;font:16px/1.45 system-ui,sans-serif;background:var(--paper);
color:var(--ink)}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 1.5rem}
svg{width:100%;max-width:520px;height:auto;display:block;font-size:12px}svg text{fill:var(--soft)}
.grid{stroke:var(--rule)}.mark{stroke:var(--mark);stroke-dasharray:4 3}.line{fill:none;stroke-width:1.8}
.s1,.s3,.s5{stroke-dasharray:6 4}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}
.s5{stroke:var(--c5)}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}
.f5{fill:var(--c5)}
.up{fill:var(--c2)}.down{fill:var(--mark)}.idle{fill:var(--c0)}
.key span{white-space:nowrap;margin-right:1rem}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem}
th,td{padding:.25rem .9rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{font-weight:600;color:var(--soft)}td.t{white-space:nowrap;color:var(--soft)}.none,.small{color:var(--soft)}
td.x{overflow-wrap:anywhere}
@media (max-width:600px){.events tr{display:block;border-bottom:1px solid var(--rule);padding:.25rem 0}
.events td{display:inline;border:0}.events td.x{display:block}}
"""


def page(runs: Sequence[Run]) -> str:
    """The report of one run, or of several beside each other."""
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    body = "".join(_body(runs))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _body(runs: Sequence[Run]) -> Iterator[str]:
    yield _figures(runs)
    if len(runs) > 1:
        yield _key([(run.name, f"--c{place % 6}") for place, run in enumerate(runs)])
        yield f'<p class="small">{escape(_same_losses(runs))}</p>'
    yield '<div class="plots">'
    for heading, key in (
        ("Loss", "loss"),
        ("Tokens per second", "tokens_per_s"),
        ("Peak memory, bytes", "memory_bytes"),
    ):
        yield f"<section><h2>{heading}</h2>{lines(_series(runs, key), 'step', _loss_marks(runs))}</section>"
    yield f"<section><h2>Where a step's time goes</h2>{_shares(runs)}</section></div>"
    for run in runs:
        of = f" of {escape(run.name)}" if len(runs) > 1 else ""
        yield f"<h2>Recoveries{of}</h2>{_recoveries(run)}<h2>Mesh{of}</h2>{_mesh(run)}"
        yield f"<h2>Events{of}</h2>{_events(run)}"


def _figures(runs: Sequence[Run]) -> str:
    """A table with a column per run."""
    columns = [list(_facts(run)) for run in runs]
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><th>{escape(cells[0][0])}</th>"
        + "".join(f"<td>{_breakable(cell[1])}</td>" for cell in cells)
        + "</tr>"
        for cells in zip(*columns, strict=True)
    )
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _breakable(text: str) -> str:
    """Lets a hash go on in a second line where columns are narrow."""
    return f"{text[:8]}<wbr>{text[8:]}" if re.fullmatch(r"[0-9a-f]{16}", text) else escape(text)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    newest, parallel, ended = run.steps[-1], run.config.parallel, run.summary
    rates = sorted(line["tokens_per_s"] for line in run.steps if line["tokens_per_s"])
    yield "ended", run.ending
    yield "steps", f"{newest['step']} of {run.config.train.steps}"
    yield "loss", f"{newest['loss']:.4f}"
    yield "tokens/s (median)", quantity(rates[len(rates) // 2]) if rates else "-"
    yield (
        "base mesh",
        f"{parallel.dp} x TP{parallel.tp}" + f" + {parallel.standbys}" * bool(parallel.standbys),
    )
    yield "ranks lost", str(sum(len(_newly_failed(run, event)) for event in run.losses))
    yield "generations", str(ended.get("generations", newest["generation"] + 1))
    yield "goodput", f"{ended['goodput']:.1%}" if "goodput" in ended else "-"
    yield "saves", _saves(ended.get("checkpoints", {}))
    yield "wall time", duration(ended["wall_s"]) if "wall_s" in ended else "-"
    yield "weights sha256", str(ended.get("weights_sha256", "-"))[:16]


def _saves(told: Line) -> str:
    """How many checkpoints, how fast, and the longest time that training stood still for one."""
    if not {"saves", "save_gbytes_s", "longest_stall_s"} <= told.keys():
        return "-"
    return (
        f"{told['saves']} at {told['save_gbytes_s']:.3g} GB/s, stall {told['longest_stall_s']:.3f} s at most"
    )


def _newly_failed(run: Run, event: Line) -> set[int]:
    before: set[int] = set()
    for other in run.events:
        if other is event:
            break
        if "failed" in other:
            before = set(other["failed"])
    return set(event["failed"]) - before


def _same_losses(runs: Sequence[Run]) -> str:
    """Whether the bits agree wherever all runs have computed a step."""
    bits = [{line["step"]: line["loss_bits"] for line in run.steps} for run in runs]
    common = sorted(set.intersection(*(set(one) for one in bits)))
    if not common:
        return "No step in common."
    first = next((step for step in common if len({one[step] for one in bits}) > 1), None)
    if first is None:
        return f"The losses of all {len(common)} common steps are the same bits."
    return f"The losses differ from step {first} on."


def _series(runs: Sequence[Run], key: str) -> list[Series]:
    return [
        Series(run.name, [(line["step"], line[key]) for line in run.steps if line.get(key)], f"s{place % 6}")
        for place, run in enumerate(runs)
    ]


def _loss_marks(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """At the first step of every generation that a loss began."""
    marks: list[tuple[float, str]] = []
    for run in runs:
        firsts: dict[int, int] = {}
        for line in run.steps:
            firsts.setdefault(line["generation"], line["step"])
        marks += [(firsts[e["generation"]], e["text"]) for e in run.losses if e["generation"] in firsts]
    return marks


def _shares(runs: Sequence[Run]) -> str:
    names = list(
        dict.fromkeys(name for run in runs for line in run.steps for name in line.get("phases_s", {}))
    )
    rows: list[tuple[str, list[tuple[str, float, str]]]] = []
    for run in runs:
        timed = [line["phases_s"] for line in run.steps if line.get("phases_s")]
        if timed:
            means = [(name, sum(line.get(name, 0.0) for line in timed) / len(timed)) for name in names]
            rows.append(
                (run.name[-13:], [(n, mean, f"f{place % 6}") for place, (n, mean) in enumerate(means)])
            )
    return stacked(rows, "s") + _key([(name, f"--c{place % 6}") for place, name in enumerate(names)])


def _recoveries(run: Run) -> str:
    changes = run.recoveries
    rows = [
        (
            f"generation {change['generation']}",
            [(part, float(change.get(part, 0.0)), f"f{place}") for place, part in enumerate(RECOVERY_PARTS)],
        )
        for change in changes
    ]
    key = _key([(part, f"--c{place}") for place, part in enumerate(RECOVERY_PARTS)])
    return stacked(rows, "s") + (key if rows else "")


def _mesh(run: Run) -> str:
    """Which rank worked when: a row per rank, green with a shard, blue standing by, red lost."""
    opened = [event for event in run.events if "failed" in event]
    if not opened:
        return '<p class="none">this run has no events.jsonl</p>'
    began, stop = opened[0]["time"], max(run.events[-1]["time"], run.steps[-1].get("time", 0.0))
    spans: list[Span] = []
    for event, following in zip(opened, [*opened[1:], None], strict=True):
        start, end = event["time"] - began, (following["time"] if following else stop) - began
        spans += _spans(run, event, start, end)
    ranks = [f"rank {rank}" for rank in range(run.config.parallel.world_size)]
    key = _key([("with a shard", "--c2"), ("standby", "--c0"), ("lost", "--mark")])
    return timeline(ranks, spans, "seconds") + key


def _spans(run: Run, event: Line, start: float, end: float) -> Iterator[Span]:
    try:
        workers = set(make_plan(run.config, event["failed"]).workers)
    except PlanError:
        workers = set[int]()
    for rank in range(run.config.parallel.world_size):
        lost = rank in event["failed"]
        style, word = (
            ("down", "lost") if lost else ("up", "with a shard") if rank in workers else ("idle", "standby")
        )
        yield Span(rank, start, end, style, f"rank {rank} {word}, generation {event['generation']}")


def _events(run: Run) -> str:
    rows = "".join(
        f'<tr><td class="t">{strftime("%m-%d %H:%M:%S", localtime(event["time"]))}</td>'
        f'<td>{escape(event["kind"])}</td><td class="x">{escape(event["text"])}</td></tr>'
        for event in run.events[-_MOST_EVENTS:]
    )
    more = len(run.events) - _MOST_EVENTS
    note = f'<p class="small">{more} earlier ones are in events.jsonl</p>' if more > 0 else ""
    return f'{note}<table class="events">{rows}</table>' if rows else '<p class="none">none</p>'


def _key(names: Sequence[tuple[str, str]]) -> str:
    spans = "".join(f'<span><i style="background:var({c})"></i>{escape(name)}</span>' for name, c in names)
    return f'<p class="key">{spans}</p>'
