"""The section `elastic`: how a job notices the loss of a rank, goes on without it and takes it back."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ntp.section import Count, Positive, Section, Timeout

Pause = Annotated[float, Field(ge=0.05, le=1e8)]  # seconds; an agent looks at its processes as often
Command = Annotated[tuple[str, ...], Field(min_length=1)]


class ElasticConfig(Section):
    """Time-outs count seconds without a sign of life; each leaves time for the one below it to act first."""

    enabled: bool = True  # false: the death of a rank ends the job
    step_timeout_s: Timeout = 180.0  # in one phase of a step, or of a change of membership
    checkpoint_timeout_s: Timeout = 600.0  # in a save
    startup_timeout_s: Timeout = 900.0  # from the start of a process until it is ready
    agent_timeout_s: Timeout = 1200.0  # for the agents to meet, or for a late one to find a place
    snapshot_every: Count = 0  # steps between snapshots in host memory; 0 = none
    agree_timeout_s: Timeout = 60.0  # from the end of a hung peer until a new generation is heard of
    lease_s: Timeout = 5.0  # an agent that cannot reach the store for so long kills its workers
    max_recoveries_without_progress: Positive = 10  # losses in a row without a committed step
    rejoin: Literal["auto", "never"] = "auto"  # whether a rank whose process died is started again
    rejoin_after_s: Pause = 1.0  # first pause before that; doubles with every failure of its own
    max_restarts_per_rank: Count = 3  # after its own errors, or deaths before it was ready
    probe: Literal["auto"] | Command | None = "auto"  # what a device must pass first; or a command, or none
    probe_timeout_s: Timeout = 60.0
    rehearse: bool = True  # a worker on a GPU does alone, before it is ready, what others would wait for

    @property
    def patience_s(self) -> float:
        """How long a worker that has lost a peer waits for a new generation; another peer may be hanging."""
        longest = max(self.step_timeout_s, self.checkpoint_timeout_s)
        return longest + self.agree_timeout_s if self.enabled else 0.0

    @model_validator(mode="after")
    def _timeouts_nest(self) -> Self:
        below(self, "step_timeout_s", self, "startup_timeout_s")
        below(self, "startup_timeout_s", self, "agent_timeout_s")
        return self


def below(
    small: Section, inner: str, large: Section, outer: str, prefixes: tuple[str, str] = ("", "")
) -> None:
    """Raises ValueError unless one time-out is less than another."""
    less, more = getattr(small, inner), getattr(large, outer)
    if less >= more:
        raise ValueError(f"{prefixes[0]}{inner}={less} must be less than {prefixes[1]}{outer}={more}")
