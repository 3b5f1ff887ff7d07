"""The plan of the launcher, asked through a cache: units at a degree, microbatches of a set of degrees."""

from collections.abc import Mapping, Sequence
from functools import cache

from ntp.config import Config
from ntp.plan import Plan, make_plan
from ntp.units import UnitKind


class Plans:
    """`make_plan` of one job, remembered.

    Attributes:
        config: the job's, without standbys.
    """

    def __init__(self, config: Config):
        self.config = config.model_copy(
            update={"parallel": config.parallel.model_copy(update={"standbys": 0, "rank_map": None})}
        )
        self.units_at = cache(self._units_at)
        self.microbatches_of = cache(self._microbatches_of)

    @property
    def calls(self) -> int:
        """How often a plan was made rather than remembered."""
        return self.units_at.cache_info().misses + self.microbatches_of.cache_info().misses

    def with_one_at(self, degree: int) -> Plan:
        """The plan where the first replica has this degree and all others are whole."""
        parallel = self.config.parallel
        return self._plan((degree, *[parallel.tp] * (parallel.dp - 1)))

    def _units_at(self, degree: int) -> Mapping[UnitKind, tuple[int, ...]]:
        """Units of each kind at each position of a replica of `degree`."""
        owners = self._plan((degree,)).replicas[0].owners
        return {kind: tuple(len(units) for units in ranges) for kind, ranges in owners.items()}

    def _microbatches_of(self, degrees: tuple[int, ...]) -> tuple[int, ...]:
        """Microbatches of each replica. `degrees` is one per replica, 0 for a dropped one, not all 0."""
        shares = {replica.index: len(replica.microbatches) for replica in self._plan(degrees).replicas}
        return tuple(shares.get(index, 0) for index in range(len(degrees)))

    def _plan(self, degrees: Sequence[int]) -> Plan:
        parallel = self.config.parallel.model_copy(update={"dp": len(degrees), "min_degree": 1})
        config = self.config.model_copy(update={"parallel": parallel})
        failed = [
            index * parallel.tp + position
            for index, degree in enumerate(degrees)
            for position in range(degree, parallel.tp)
        ]
        return make_plan(config, failed)
