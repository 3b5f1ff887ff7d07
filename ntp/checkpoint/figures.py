"""What the checkpoints of a run have cost, for `summary.json`."""

from dataclasses import dataclass

_PLACES = 3


def gbytes_s(count: int, seconds: float) -> float:
    """Bandwidth in 10^9 bytes a second."""
    return count / max(seconds, 1e-9) / 1e9


@dataclass(slots=True)
class Figures:
    """Of one worker in its present generation; bytes are those of all workers together.

    Attributes:
        saves: how many have succeeded; `save_bytes` and `save_s` are their sums.
        stall_s, longest_stall_s: how long training stood still for saves: in all, and for one.
        load_bytes, load_s: of the checkpoint that the worker went on from; 0 where there was none.
    """

    saves: int = 0
    save_bytes: int = 0
    save_s: float = 0.0
    stall_s: float = 0.0
    longest_stall_s: float = 0.0
    load_bytes: int = 0
    load_s: float = 0.0

    def saved(self, count: int, seconds: float, stall_s: float) -> None:
        """A save has succeeded."""
        self.saves += 1
        self.save_bytes += count
        self.save_s += seconds
        self.stall_s += stall_s
        self.longest_stall_s = max(self.longest_stall_s, stall_s)

    def to_json(self) -> dict[str, float]:
        """Plain values, of what there was."""
        told: dict[str, float] = {}
        if self.saves:
            told |= {"saves": self.saves, "save_bytes": self.save_bytes, "save_s": self.save_s}
            told |= {"save_gbytes_s": gbytes_s(self.save_bytes, self.save_s)}
            told |= {"stall_s": self.stall_s, "longest_stall_s": self.longest_stall_s}
        if self.load_bytes:
            told |= {"load_bytes": self.load_bytes, "load_s": self.load_s}
            told |= {"load_gbytes_s": gbytes_s(self.load_bytes, self.load_s)}
        return {name: round(value, _PLACES) for name, value in told.items()}
