"""What a worker does about checkpoints in the course of a run: start, save when due, end."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ntp.checkpoint.figures import Figures
from ntp.checkpoint.load import Loaded, load
from ntp.checkpoint.save import Saver, SaveReport
from ntp.checkpoint.store import CheckpointStore, checkpoint_directory
from ntp.collectives import Mesh, PeerLostError
from ntp.config import Config
from ntp.errors import CheckpointError
from ntp.hugging_face import import_weights
from ntp.messages import leaders_value
from ntp.trainer import Trainer

_SNAPSHOTS_KEPT = 2
"""One may be under way when it is needed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a save goes, the last step up to now after which one was due, and how many stay there."""

    store: CheckpointStore
    due: int
    keep: int


class Checkpoints:
    """The checkpoints of one worker's run, and its snapshots: checkpoints in host memory, for the run alone.

    Args:
        snapshots: a directory in host memory that outlives the worker.
        say: takes a line for the user; does nothing on all ranks but one.

    Attributes:
        figures: what saves and loads have cost so far.
    """

    def __init__(
        self, config: Config, run_dir: Path, snapshots: Path, mesh: Mesh, say: Callable[[str], None]
    ):
        self.directory = checkpoint_directory(config, run_dir)
        self._config, self._mesh, self._say = config, mesh, say
        self._saver = Saver(mesh.host, config)
        self._store, self._snapshots = CheckpointStore(self.directory), CheckpointStore(snapshots)
        self._last: SaveReport | None = None
        self.figures = Figures()

    def start(self, trainer: Trainer, resume: str | None, strict: bool) -> int:
        """Give the trainer its state and return the step after which it goes on; collective.

        Args:
            resume: see `ntp.checkpoint.load`; None = a new run.

        Raises:
            CheckpointError: nothing can be loaded. HuggingFaceError: `model.init_from` does not fit.
        """
        self._prepare(trainer)
        loaded = None if resume is None else self._load(trainer, resume, self.directory, strict)
        self._take_over(loaded and loaded.path)
        if loaded is not None and loaded.path is not None:
            trainer.publish()
            return loaded.step
        if self._config.model.init_from is not None:
            import_weights(Path(self._config.model.init_from), self._config.model, trainer.optimizer)
            trainer.publish()
        return 0

    def go_back(self, trainer: Trainer) -> tuple[int, str]:
        """Load the newest sound state of this run; collective.

        Returns:
            The step after which it goes on, and `snapshot` or `checkpoint`; 0 and `start` where nothing has
            been saved yet, and nothing is loaded.

        Raises:
            CheckpointError: what was saved is all damaged.
        """
        places = [("snapshot", self._snapshots), ("checkpoint", self._store)]
        latest = leaders_value(self._mesh.host, [store.newest() for _, store in places])
        order = sorted(zip(latest, places, strict=True), key=lambda item: -item[0])
        for _, (name, store) in [item for item in order if item[0]]:
            try:
                step = self._load(trainer, "auto", store.directory).step
                self._prepare(trainer)
                return step, name
            except CheckpointError as error:
                self._say(f"no {name} to go back to: {error}")
        if any(latest):
            raise CheckpointError("nothing that was saved can be loaded")
        return 0, "start"

    def before_commit(self) -> None:
        """Wait until the state of the save under way may change."""
        self._saver.wait_staged()

    def after(self, trainer: Trainer, step: int) -> None:
        """Start a save if one is due after `step`, and tell how earlier ones ended."""
        for place in self._places(step):
            if place.due == step:
                self._saver.save(trainer.optimizer, step, place.store, place.keep)
                break
        self._tell()

    def make_up(self, trainer: Trainer) -> None:
        """Start a save if the last one that was due is not there: a loss has cut it short. Collective.

        It is what a generation begins with that goes on from the state of another.
        """
        self._prepare(trainer)
        saved = 0
        for place in self._places(trainer.committed):
            saved = max(saved, leaders_value(self._mesh.host, place.store.latest() or 0))
            if place.due > saved:
                self._saver.save(trainer.optimizer, trainer.committed, place.store, place.keep)
                break

    def end(self, trainer: Trainer) -> None:
        """Wait for the last save; one that has failed is made once more, since none comes after it.

        Raises:
            CheckpointError: it has failed again, on every rank alike.
            PeerLostError: another rank has gone in the middle.
        """
        last = self._outcome()
        if last is not None and last.error is not None:
            self._saver.save(trainer.optimizer, last.step, self._store, self._config.checkpoint.keep)
            last = self._outcome()
        if last is not None and last.error is not None:
            raise CheckpointError(f"the last checkpoint, of step {last.step}, failed: {last.error}")

    def _prepare(self, trainer: Trainer) -> None:
        """Begin what the first save of this generation needs, if there will be one."""
        checkpoint, elastic, train = self._config.checkpoint, self._config.elastic, self._config.train
        if checkpoint.every or elastic.snapshot_every or train.stop_after is not None:
            self._saver.prepare(trainer.optimizer)

    def _load(self, trainer: Trainer, resume: str, directory: Path, strict: bool = False) -> Loaded:
        loaded = load(resume, directory, self._config, trainer.optimizer, self._mesh.host, strict)
        for note in loaded.notes:
            self._say(note)
        self.figures.load_bytes, self.figures.load_s = loaded.bytes, loaded.seconds
        return loaded

    def _take_over(self, checkpoint: Path | None) -> None:
        """Leave nothing in the directory that this run could take for its own but what it goes on from."""
        if not self._mesh.host.leads:
            return
        try:
            away = self._store.belong_to(checkpoint)
        except OSError as error:
            self._say(f"checkpoints in {str(self.directory)!r} stay as they are: {error.strerror}")
            return
        if away is not None:
            self._say(f"checkpoints of an earlier run have been moved to {away}")

    def _outcome(self) -> SaveReport | None:
        """How the last checkpoint ended; None where there was none. Raises PeerLostError."""
        self._saver.finish()
        self._tell()
        if self._last is not None and self._last.lost_touch:
            raise PeerLostError(self._last.error)
        return self._last

    def _places(self, step: int) -> list[_Place]:
        """Where saves go; a checkpoint makes a snapshot of the same step needless."""
        checkpoint, train = self._config.checkpoint, self._config.train
        ends = step == train.last_step and (checkpoint.every > 0 or train.stop_after is not None)
        places = [
            _Place(self._store, step if ends else _last_due(step, checkpoint.every), checkpoint.keep),
            _Place(self._snapshots, _last_due(step, self._config.elastic.snapshot_every), _SNAPSHOTS_KEPT),
        ]
        return [place for place in places if place.due or ends]

    def _tell(self) -> None:
        for report in self._saver.poll():
            if report.error is None:
                self.figures.saved(report.bytes, report.seconds, report.stall_s)
            if report.directory == self.directory:
                self._last = report
                self._say(report.line())
            elif report.error is not None:
                self._say(f"snapshot of step {report.step} failed, training goes on: {report.error}")


def _last_due(step: int, every: int) -> int:
    return step - step % every if every else 0
