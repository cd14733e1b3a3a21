"""What is no number, URL, file or name ends `handoff bench`, `kv` and `doctor` at once, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from services.cli.bench import bench_app
from services.cli.bench_options import write_json
from services.cli.bench_transfer import parse_sizes, parse_transports
from services.cli.host import why_not_listen
from services.cli.kv_sizes import named_architecture
from services.cli.main import app
from services.cli.model import model_app
from services.cli.options import checked_url
from shared.kv.size import UnknownArchitecture

URL = "http://127.0.0.1:9"  # nobody listens there


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", "--json", "{folder}/missing/x.json"],
        ["load", "--json", "{folder}/file/x.json"],
        ["load", "--json", "{folder}"],
        ["load", "--prompt-tokens", "99999999999999999999"],
        ["load", "--concurrency", "99999999999999999999"],
        ["load", "--rate", "inf"],
        ["load", "--slo-ttft-ms", "inf"],
        ["load", "--url", "http://127.0.0.1:99999"],
        ["stages", "--pd-url", "here"],
        ["structured", "--url", "http://[::1"],
        ["kv-quant", "--threads", "99999999999999"],
        ["transfer", "--sizes", "inf"],
        ["transfer", "--sizes", "1,0"],
        ["transfer", "--transports", "shm,foo"],
    ],
)
def test_a_bad_option_of_bench_is_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    """Some were once told by a traceback, and a file that cannot be written only after the measurement."""
    (tmp_path / "file").touch()
    told = CliRunner().invoke(bench_app, [word.format(folder=tmp_path) for word in arguments])
    assert 2 == told.exit_code
    assert isinstance(told.exception, SystemExit)
    assert [tmp_path / "file"] == list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", ["inf", "nan", "1e308", "0"])
def test_a_scale_that_is_none_is_one_line(scale: str) -> None:
    """An infinite length was once an OverflowError."""
    arguments = ["load", "--url", URL, "--trace", "mooncake", "--length-scale", scale]
    told = CliRunner().invoke(bench_app, arguments)
    assert 1 == told.exit_code
    assert "handoff bench load: a trace is scaled by positive numbers up to 1000\n" == told.stderr


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
@pytest.mark.parametrize("value", ["NaN", "1e400", "9" * 400])
def test_a_trace_with_a_number_that_cannot_be_is_one_line(field: str, value: str, tmp_path: Path) -> None:
    """Infinity and numbers too large for a float were once an OverflowError; NaN was taken for a time."""
    numbers = {"timestamp": "0", "input_length": "3", "output_length": "3", "hash_ids": "[1]"} | {
        field: value
    }
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{" + ", ".join(f'"{name}": {number}' for name, number in numbers.items()) + "}\n")
    told = CliRunner().invoke(bench_app, ["load", "--url", URL, "--trace", str(trace)])
    assert 1 == told.exit_code
    assert told.stderr.startswith("handoff bench load: line 1: not a Mooncake trace line")
    assert 1 == len(told.stderr.splitlines())


@pytest.mark.parametrize("text", ["inf", "nan", "-inf", "1e400", "0", "-1", "1e12", "", ",", "1,,", "abc"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Also one that this host has no memory for, which once ended the receiving process and an empty reason."""
    with pytest.raises(ValueError, match=r"size|memory"):
        parse_sizes(text)


def test_sizes_and_transports_are_read() -> None:
    """Spaces after commas do no harm."""
    assert (1.0, 3.5) == parse_sizes("1, 3.5")
    assert ("shm", "tcp") == parse_transports("shm, tcp")


@pytest.mark.parametrize("text", ["", ",", "foo", "shm,foo", "SHM"])
def test_what_is_no_transport_is_named(text: str) -> None:
    """It once was a KeyError in a child process, and an empty reason."""
    with pytest.raises(ValueError, match="there are nixl, shm, unix, tcp"):
        parse_transports(text)


def test_a_result_that_cannot_be_kept_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The disk may become full while it is measured; what was printed remains."""
    with pytest.raises(typer.Exit) as ended:
        write_json(Path("/dev/full"), {"a": 1})
    assert 1 == ended.value.exit_code
    assert "handoff bench: cannot write /dev/full: No space left on device\n" == capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "here", "ftp://a", "http://", "http://a:99999", "http://a:x", "http://[::1"]
)
def test_what_is_no_url_is_a_usage_error(url: str) -> None:
    """A port above 65535 was once an OverflowError of the network library."""
    with pytest.raises(typer.BadParameter):
        checked_url(url)
    assert 2 == CliRunner().invoke(app, ["doctor", "--prefill", URL, "--decode", url]).exit_code


def test_urls_are_passed_on() -> None:
    """As they are given; none is none."""
    assert ("https://[::1]:8/a", None) == (checked_url("https://[::1]:8/a"), checked_url(None))


def test_a_config_that_is_nested_too_deeply_is_one_line(tmp_path: Path) -> None:
    """It once was a RecursionError."""
    config = tmp_path / "config.json"
    config.write_text("[" * 200_000)
    with pytest.raises(UnknownArchitecture, match="nested too deeply"):
        named_architecture(str(config))


def test_names_that_are_too_long_are_one_line() -> None:
    """Of a host for `up` and of a model for `model path`."""
    assert "this is no host name" == why_not_listen("a" * 300, 8000)
    told = CliRunner().invoke(model_app, ["path", "a" * 5000])
    assert (1, "handoff: File name too long\n") == (
        told.exit_code,
        told.stderr,
    )
