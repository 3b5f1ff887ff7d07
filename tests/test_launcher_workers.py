"""Workers as processes: those that a fork server makes are what those are that import for themselves."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ntp_launcher.crew import Crew, Recipe
from ntp_launcher.events import Kill, Start, WorkerExited
from ntp_launcher.fork_server import ForkServer

from tests.test_launcher_agent import ROOT, is_running, wait

MODULE = "tests.telling_worker"
Make = Callable[..., Crew]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes crews, whose workers end as they are told by rank."""
    crews: list[Crew] = []
    parts = os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "launcher"))

    def crew(forks: bool, *ends: str, module: str = MODULE) -> Crew:
        log_dir = tmp_path / ("forked" if forks else "new")

        def environ(rank: int, incarnation: int) -> dict[str, str]:
            told = {
                "TELL_TO": str(log_dir / f"about{rank}.{incarnation}"),
                "TELL_END": ends[rank],
                "NO ": "=é\n",
            }
            return {"PATH": os.environ["PATH"], "PYTHONPATH": parts, "PYTHONUNBUFFERED": "1", **told}

        crews.append(Crew(Recipe(module, environ, log_dir, lambda rank: 0, False, forks, (), 1.0)))
        return crews[-1]

    yield crew
    for each in crews:
        each.stop(signal.SIGKILL, 1.0)


def exits(crew: Crew, count: int) -> dict[int, WorkerExited]:
    """The next ends of workers, by rank."""
    seen: list[WorkerExited] = []

    def look() -> bool:
        seen.extend(news for news in crew.news() if isinstance(news, WorkerExited))
        return len(seen) >= count

    wait(look, seconds=30)
    return {news.rank: news for news in seen}


def about(path: Path) -> dict[str, object]:
    wait(path.exists, seconds=30)
    return json.loads(path.read_text())


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()


def children() -> set[int]:
    """Every child of this process, zombies too."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def test_a_forked_worker_is_what_a_new_process_is(make: Make, tmp_path: Path) -> None:
    told: list[dict[str, object]] = []
    for forks, folder in ((True, "forked"), (False, "new")):
        crew = make(forks, "stay", "stay")
        crew.obey(Start(0, 0))
        crew.obey(Start(1, 0))
        each = about(tmp_path / folder / "about1.0")
        pid = crew.pids[1]
        assert command_of(pid).endswith(f" -m {MODULE} rank1")
        assert each.pop("parent") == os.getpid()
        assert each["leads"]
        told.append(json.loads(json.dumps(each).replace(f"/{folder}/", "/HERE/")))
        assert (tmp_path / folder / "rank1" / "stdout.log").read_text() == "told\n"
    for each in told:
        del each["child"]
    assert told[0] == told[1]


@pytest.mark.parametrize("forks", [True, False])
def test_ends_are_told_as_they_were(make: Make, forks: bool) -> None:
    crew = make(forks, "exit:0", "exit:7", f"kill:{signal.SIGKILL}", "raise:the cause")
    for rank in range(4):
        crew.obey(Start(rank, 0))
    ends = exits(crew, 4)
    assert [ends[rank].code for rank in range(4)] == [0, 7, -signal.SIGKILL, 1]
    assert ends[3].error == "ValueError: the cause"


@pytest.mark.parametrize("forks", [True, False])
def test_what_a_worker_has_started_ends_with_it_and_leaves_no_zombie(
    make: Make, forks: bool, tmp_path: Path
) -> None:
    before = children()
    crew = make(forks, "stay")
    crew.obey(Start(0, 0))
    grandchild = about(tmp_path / ("forked" if forks else "new") / "about0.0")["child"]
    assert isinstance(grandchild, int)
    crew.obey(Kill(0, 0))
    exits(crew, 1)
    wait(lambda: not is_running(grandchild), seconds=5)

    def nothing_is_left() -> bool:
        crew.news()
        return children() <= before | servers(crew)

    wait(nothing_is_left, seconds=5)


def servers(crew: Crew) -> set[int]:
    return {crew._server._process.pid} if crew._server else set()


def test_workers_outlive_a_server_that_is_killed_and_the_next_one_starts_anew(make: Make) -> None:
    crew = make(True, "stay", "stay", "exit:3")
    crew.obey(Start(0, 0))
    (server,) = servers(crew)
    os.kill(server, signal.SIGKILL)
    wait(lambda: not is_running(server), seconds=5)
    crew.obey(Start(1, 0))
    crew.obey(Start(2, 0))
    assert exits(crew, 1)[2].code == 3
    assert sorted(crew.pids) == [0, 1]
    assert not servers(crew)


def test_a_server_that_cannot_import_leaves_it_to_the_worker_to_say_so(make: Make) -> None:
    crew = make(True, "stay", module="tests.no_such_worker")
    crew.obey(Start(0, 0))
    end = exits(crew, 1)[0]
    assert end.code == 1
    assert "no_such_worker" in end.error


def test_a_server_that_does_not_answer_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ntp_launcher.fork_server._FIRST_S", 0.5)
    crew = make(True, "exit:0", "exit:5")
    crew._server = ForkServer(MODULE, crew._recipe.environ(0, 0), crew._recipe.log_dir / "log")
    os.kill(crew._server._process.pid, signal.SIGSTOP)
    started = time.monotonic()
    crew.obey(Start(1, 0))
    assert exits(crew, 1)[1].code == 5
    assert time.monotonic() - started < 20


def test_nothing_is_forked_where_it_is_not_asked_for(make: Make) -> None:
    crew = make(False, "exit:0")
    crew.obey(Start(0, 0))
    exits(crew, 1)
    assert not servers(crew)
