"""The supervisor with tiny real processes: start, restart, stop, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.cli.supervisor import ChildFailed, Policy, Restarts, Stop, Supervisor
from tests.unit.services.cli import fakes
from tests.unit.services.cli.fakes import Recorder, events, fake, is_ready, survivors

QUICK = Policy(restart_pause_s=0.01, ready_interval_s=0.01, stop_s=20.0)


def _supervisor(
    folder: Path,
    bodies: dict[str, str],
    display: Recorder,
    *,
    policy: Policy = QUICK,
    echo: Callable[[str, str], None] | None = None,
) -> Supervisor:
    specs = [fake(name, body, folder) for name, body in bodies.items()]
    return Supervisor(specs, folder, display=display, is_ready=is_ready, policy=policy, echo=echo)


def _once_ready(action: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def act() -> None:
        action()

    return act


async def test_all_children_run_until_stop_and_none_is_left(tmp_path: Path) -> None:
    """Every child is ready before the caller is told, and gone after the stop."""
    display, stop = Recorder(), Stop()
    seen: list[tuple[str, str, int]] = []

    def ready() -> None:
        seen.extend(events(tmp_path))
        stop.ask()

    bodies = {"prefill": fakes.RUN, "decode": fakes.RUN, "router": fakes.RUN}
    await _supervisor(tmp_path, bodies, display).run(stop, _once_ready(ready))

    assert sorted(bodies) == sorted(name for name, what, _ in seen if what == "started")
    assert [] == survivors(tmp_path)


async def test_the_front_stops_before_the_workers(tmp_path: Path) -> None:
    """The router drains while its workers still run."""
    stop = Stop()
    bodies = {"prefill": fakes.RUN, "decode": fakes.RUN, "router": fakes.RUN}
    await _supervisor(tmp_path, bodies, Recorder()).run(stop, _once_ready(stop.ask))

    order = [name for name, what, _ in events(tmp_path) if what == "stopped"]
    assert ("router", {"prefill", "decode"}) == (order[0], set(order[1:]))


async def test_a_child_that_fails_at_start_fails_the_run(tmp_path: Path) -> None:
    """It is not restarted, its last lines are told, and the others are stopped."""
    stop, display = Stop(), Recorder()
    bodies = {"prefill": fakes.FAIL_AT_START, "router": fakes.RUN}
    with pytest.raises(ChildFailed, match=re.escape("prefill ended with status 3")) as caught:
        await _supervisor(tmp_path, bodies, display).run(stop, _once_ready(stop.ask))

    assert ["loading", "no such model"] == caught.value.lines
    assert 1 == sum(name == "prefill" and what == "started" for name, what, _ in events(tmp_path))
    assert [] == survivors(tmp_path)


async def test_a_command_that_does_not_exist_fails_the_run(tmp_path: Path) -> None:
    """An error of starting itself ends the run like any other, with nothing left."""
    spec = fake("router", fakes.RUN, tmp_path)
    broken = type(spec)(spec.role, "decode", ("/nonexistent/python",), spec.environ, spec.ready_url)
    supervisor = Supervisor([broken, spec], tmp_path, display=Recorder(), is_ready=is_ready, policy=QUICK)
    with pytest.raises(FileNotFoundError):
        await supervisor.run(Stop(), _once_ready(lambda: None))
    assert [] == survivors(tmp_path)


async def test_a_child_that_is_killed_later_is_restarted(tmp_path: Path) -> None:
    """The same child comes up again and the others go on."""
    stop, display, up = Stop(), Recorder(), asyncio.Event()
    bodies = {"decode": fakes.RUN, "router": fakes.RUN}
    run = asyncio.create_task(_supervisor(tmp_path, bodies, display).run(stop, _once_ready(up.set)))
    await up.wait()
    first = next(pid for name, _, pid in events(tmp_path) if name == "decode")
    (tmp_path / "decode.ready").unlink()
    os.kill(first, signal.SIGKILL)
    await display.seen("decode", "ready", times=2)
    stop.ask()
    await run

    starts = [name for name, what, _ in events(tmp_path) if what == "started"]
    assert (2, 1) == (starts.count("decode"), starts.count("router"))
    assert ("decode", "restarting") in display.updates
    assert [] == survivors(tmp_path)


async def test_a_child_that_keeps_dying_fails_the_run(tmp_path: Path) -> None:
    """After as many restarts as the policy allows the run ends with the child's fault."""
    stop = Stop()
    dying = "ready()\nwhile not os.path.exists(f'{folder}/go'): time.sleep(0.01)\nsys.exit(4)"
    supervisor = _supervisor(tmp_path, {"decode": dying, "router": fakes.RUN}, Recorder())
    with pytest.raises(ChildFailed, match="decode ended with status 4"):
        await supervisor.run(stop, _once_ready((tmp_path / "go").touch))

    starts = [name for name, what, _ in events(tmp_path) if what == "started"]
    assert 1 + QUICK.max_restarts == starts.count("decode")
    assert [] == survivors(tmp_path)


async def test_a_child_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    """The stop is bounded."""
    stop = Stop()
    policy = Policy(ready_interval_s=0.01, stop_s=3.0)
    bodies = {"decode": fakes.STUBBORN, "router": fakes.RUN}
    await _supervisor(tmp_path, bodies, Recorder(), policy=policy).run(stop, _once_ready(stop.ask))

    assert "refused" in [what for _, what, _ in events(tmp_path)]
    assert [] == survivors(tmp_path)


async def test_a_second_request_to_stop_kills_at_once(tmp_path: Path) -> None:
    """Who presses Ctrl-C twice does not wait for the drain."""
    stop, display = Stop(), Recorder()
    policy = Policy(ready_interval_s=0.01, stop_s=3600.0)
    bodies = {"decode": fakes.RUN, "router": fakes.STUBBORN}
    run = asyncio.create_task(
        _supervisor(tmp_path, bodies, display, policy=policy).run(stop, _once_ready(stop.ask))
    )
    await display.seen("router", "stopping")
    stop.ask()
    async with asyncio.timeout(20):
        await run
    assert [] == survivors(tmp_path)


async def test_a_stop_while_starting_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C during a long load ends the children that never became ready."""
    stop, display = Stop(), Recorder()
    bodies = {"decode": "signal.pause()", "router": fakes.RUN}
    run = asyncio.create_task(
        _supervisor(tmp_path, bodies, display).run(stop, _once_ready(lambda: pytest.fail("not ready")))
    )
    await display.seen("router", "ready")
    stop.ask()
    await run
    assert [] == survivors(tmp_path)


async def test_echoed_output_is_also_kept(tmp_path: Path) -> None:
    """With echo each line is passed on with its child's name, and the log file still has all of them."""
    stop, lines = Stop(), list[tuple[str, str]]()
    body = "print('a', flush=True)\nprint('b', end='', flush=True)\n" + fakes.RUN
    supervisor = _supervisor(
        tmp_path, {"router": body}, Recorder(), echo=lambda name, line: lines.append((name, line))
    )
    await supervisor.run(stop, _once_ready(stop.ask))

    assert [("router", "a"), ("router", "b")] == lines
    assert "a\nb" == (tmp_path / "router.log").read_text()


def test_restarts_are_bounded_per_window() -> None:
    """Three a minute with growing pauses; a quiet minute gives them back."""
    restarts = Restarts(Policy(max_restarts=3, restart_window_s=60.0, restart_pause_s=0.5))
    assert [0.5, 1.0, 2.0, None] == [restarts.next_pause_s(now) for now in (0.0, 1.0, 2.0, 59.0)]
    assert 0.5 == restarts.next_pause_s(70.0)


_SUPERVISE = """
import asyncio, sys
from pathlib import Path
from services.cli.supervisor import Policy, Stop, Supervisor
from tests.unit.services.cli.fakes import Recorder, fake, is_ready
body = "from services.cli.lifeline import stop_at_eof\\nstop_at_eof(0, grace_s=5)\\n" + sys.argv[2]
async def main():
    folder = Path(sys.argv[1])
    spec = fake("router", body, folder)
    spec = type(spec)(spec.role, spec.name, (spec.argv[0], *spec.argv[2:]), spec.environ, spec.ready_url)
    supervisor = Supervisor([spec], folder, display=Recorder(), is_ready=is_ready, policy=Policy())
    async def tell():
        print("ready", flush=True)
    await supervisor.run(Stop(), tell)
asyncio.run(main())
"""


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves the supervisor no time to say anything; the closed pipe says it."""
    with subprocess.Popen(
        [sys.executable, "-c", _SUPERVISE, str(tmp_path), fakes.RUN], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert "ready\n" == supervisor.stdout.readline()
        child = os.pidfd_open(next(pid for _, what, pid in events(tmp_path) if what == "started"))
        supervisor.kill()
    ended, _, _ = select.select([child], [], [], 20)
    os.close(child)
    assert [child] == ended
