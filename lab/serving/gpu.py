"""Real vLLM on one GPU, with its own model and with this plugin, in one run:

    python -m lab.serving.gpu --out vllm.json --parts nccl+ipc,tp1,parity
    python -m lab.serving.gpu --parts nccl --dry-run          # what would run, how long, how much memory

Engines of a part start together and are measured in turn, one while the others idle. Parts joined by ``+`` share their start. Whatever
fails is recorded and the rest goes on. The machine needs what ``lab.serving.gpu_unpack`` unpacks. With several ranks on the card absolute
times are those of a card that does all ranks' work; ratios within a part are what counts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.serving import one_card
from lab.serving.gpu_parts import PARTS, Engine, Measurement, Part, write_checkpoints
from ladder_residual.distributed.launch import run_command

CARD_GB = 130.0  # of 139 GiB, less what contexts take
MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mpslog"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def gpu(
    out: Annotated[Path, typer.Option(help="The JSON result; the engines' log lies beside it.")] = Path("vllm.json"),
    parts: Annotated[
        str, typer.Option(help=f"Of {', '.join(PARTS)}; joined by + they start together.")
    ] = "nccl+ipc,tp1,parity",
    engines: Annotated[str | None, typer.Option(help="Only engines whose name ends so, separated by commas.")] = None,
    rounds: Annotated[int, typer.Option(help="Measurements of each engine.")] = 3,
    budget: Annotated[float, typer.Option(help="Seconds after which nothing new begins.")] = 540,
    sm_share: Annotated[int, typer.Option(help="Percent of the SMs each of several ranks may use.")] = 50,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and end.")] = False,
) -> None:
    """Time per token, time to first token and tokens of real vLLM on one GPU, its own model against the plugin."""
    waves = [_chosen(names.split("+"), engines) for names in parts.split(",")]
    _print_plan(waves, rounds)
    if dry_run:
        return
    run = Run(out, time.monotonic() + budget, rounds, sm_share)
    with tempfile.TemporaryDirectory(prefix="vllm-gpu-") as scratch, multi_process_service():
        run.scratch = Path(scratch)
        for wave in waves:
            run.wave(wave)
    run.result["environment"] = _environment()
    run.write()
    _print_result(run.result)


def _chosen(names: list[str], engines: str | None) -> list[Part]:
    wave = []
    for name in names:
        if name not in PARTS:
            raise ValueError(f"--parts: unknown part {name!r}; choose from {', '.join(PARTS)}")
        part = PARTS[name]
        if engines is not None:
            kept = [engine for engine in part.engines if engine.name.endswith(tuple(engines.split(",")))]
            part = Part(part.name, kept, part.measurements, part.judge)
        wave.append(part)
    gigabytes = sum(engine.gigabytes for part in wave for engine in part.engines)
    if gigabytes > CARD_GB:
        raise ValueError(
            f"--parts: {'+'.join(names)} needs {gigabytes:.0f} GB at once of {CARD_GB:.0f}: separate them by a comma"
        )
    return wave


def _print_plan(waves: list[list[Part]], rounds: int) -> None:
    total = 0.0
    for wave in waves:
        engines = [engine for part in wave for engine in part.engines]
        start = 45 + 6 * sum(engine.tp for engine in engines)
        measured = sum(
            each.seconds * ((each.rounds or rounds) + 1) * len(part.engines) for part in wave for each in part.measurements
        )
        judged = sum(10 + 3 * len(part.engines) for part in wave if part.judge)
        total += start + measured + judged + 5
        names, gigabytes = "+".join(part.name for part in wave), sum(engine.gigabytes for engine in engines)
        seconds = f"about {start + measured + judged:.0f} s, {start} of them to start"
        print(f"{names}: {len(engines)} engines, {gigabytes:.0f} GB, {seconds}")
        for engine in engines:
            print(f"  {engine.name}: {engine.described()}")
    print(f"about {total:.0f} s of GPU time")


@dataclass
class Running:
    engine: Engine
    process: subprocess.Popen[bytes]
    parent: Connection | None = None
    error: str | None = None
    start_s: float = 0.0
    chose: str | None = None  # of VLLM_LADDER_OVERLAP

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The engine's answer; a failure ends its part in the run."""
        if self.error or self.parent is None:
            return {"message": self.error or "not started"}
        try:
            self.parent.send(dict(request))
            deadline = time.monotonic() + seconds
            while not self.parent.poll(0.2):
                if self.process.poll() is not None:
                    raise EOFError(f"the engine ended with code {self.process.returncode}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer within {seconds:.0f} s")
            answer: dict[str, Any] = self.parent.recv()
        except (EOFError, OSError) as error:
            self.error = f"{request.get('do')}: {error}"
            return {"message": self.error}
        return answer


@dataclass
class Run:
    out: Path
    deadline: float
    rounds: int
    sm_share: int
    scratch: Path = Path()
    result: dict[str, Any] = field(default_factory=lambda: {"benchmark": "vllm-gpu", "parts": {}})

    def wave(self, parts: list[Part]) -> None:
        """Start the engines of all these parts, then measure part by part."""
        if self.remaining() < 60:
            for part in parts:
                self.result["parts"][part.name] = {"message": f"skipped: {self.remaining():.0f} s were left"}
            self.write()
            return
        running: dict[str, list[Running]] = {}
        try:
            write_checkpoints(self.scratch, parts)
            for part in parts:
                running[part.name] = [self.launch(engine) for engine in part.engines]
            self.wait_for_all([each for some in running.values() for each in some])
            for part in parts:
                self.measure(part, running[part.name])
        except Exception as error:
            for part in parts:
                self.result["parts"].setdefault(part.name, {})["message"] = f"{type(error).__name__}: {error}"
        finally:
            for each in [each for some in running.values() for each in some]:
                end(each)
            self.write()

    def launch(self, engine: Engine) -> Running:
        environment = os.environ | MPS | engine.environment
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CACHE_ROOT": str(self.scratch / "cache" / engine.name),
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor" / engine.name),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "2",  # all engines compile at once
        }
        if engine.transport:
            environment |= one_card.environment(engine.transport)
        if engine.tp > 1:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.sm_share)
        address = str(self.scratch / f"{engine.name}.socket")
        listener = Listener(address)
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.serving.gpu_engine", address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running = Running(engine, process)
        threading.Thread(target=self._log, args=(running,), daemon=True).start()
        threading.Thread(target=self._greet, args=(running, listener), daemon=True).start()
        return running

    def _greet(self, running: Running, listener: Listener) -> None:
        with suppress(OSError):
            connection = listener.accept()
            options = running.engine.arguments(self.scratch)
            connection.send(options)
            running.parent = connection
        listener.close()

    def _log(self, running: Running) -> None:
        """All engines write one file, so that few files come back from another machine."""
        name, output = running.engine.name, running.process.stdout
        assert output is not None
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.with_suffix(".log").open("ab", buffering=0) as log:
            for line in output:
                log.write(f"[{name}] ".encode() + line)
                running.chose = choice_in(line.decode(errors="replace")) or running.chose

    def wait_for_all(self, running: list[Running]) -> None:
        deadline = min(time.monotonic() + 300, self.deadline)
        for each in running:
            while each.parent is None or not each.parent.poll(0.2):
                if each.process.poll() is not None:
                    each.error = f"ended with code {each.process.returncode} while it started"
                elif time.monotonic() > deadline:
                    each.error = "did not start in time"
                else:
                    time.sleep(0.1)
                    continue
                break
            else:
                try:
                    answer = each.parent.recv()
                except (EOFError, OSError) as error:
                    answer = {"message": f"ended while it started ({error!r})"}
                each.error, each.start_s = answer.get("message"), answer.get("start_s", 0.0)
            print(f"{each.engine.name}: {each.error or f'started in {each.start_s:.0f} s'}", file=sys.stderr, flush=True)

    def measure(self, part: Part, running: list[Running]) -> None:
        found: dict[str, Any] = {"engines": {}, "rows": []}
        self.result["parts"][part.name] = found
        for each in running:
            found["engines"][each.engine.name] = each.engine.described() | {"start_s": round(each.start_s, 1)}
            if each.chose:
                found["engines"][each.engine.name]["chose"] = each.chose
            if each.error:
                found["engines"][each.engine.name]["message"] = each.error
        if part.judge:
            answers = {each.engine.name: each.ask(part.judge.request(), 90) for each in running}
            found["tokens"] = part.judge.verdict(self.scratch, {each.engine.name: each.engine for each in running}, answers)
            self.write()
        for measurement in part.measurements:
            found["rows"].append(self.measure_in_turn(measurement, running))
            self.write()

    def measure_in_turn(self, measurement: Measurement, running: list[Running]) -> dict[str, Any]:
        samples: dict[str, list[dict[str, Any]]] = {each.engine.name: [] for each in running}
        errors: dict[str, str] = {}
        if self.remaining() < measurement.seconds * len(running):
            return measurement.described() | {"message": "no time was left"}
        for each in running:  # set what the measurement wants, and warm up
            warm_up = () if measurement.rounds == 1 else (measurement.request | {"seed": 99},)
            for request in (*measurement.before, *warm_up):
                answer = each.ask(request, 90)
                if "message" in answer:
                    errors[each.engine.name] = answer["message"]
        for number in range(measurement.rounds or self.rounds):
            if self.remaining() < measurement.seconds * len(running):
                break
            for each in running[:: 1 if number % 2 else -1]:
                answer = each.ask(measurement.request | {"seed": number}, 90)
                if "message" in answer:
                    errors[each.engine.name] = answer["message"]
                else:
                    samples[each.engine.name].append(answer)
        row = measurement.described()
        row["ms"] = {name: statistics.median(one["ms"] for one in some) for name, some in samples.items() if some}
        row["samples"] = samples
        if errors:
            row["errors"] = [{"engine": name, "message": message} for name, message in errors.items()]
        print(
            json.dumps({**measurement.described(), "ms": row["ms"], **({"errors": errors} if errors else {})}),
            file=sys.stderr,
            flush=True,
        )
        return row

    def remaining(self) -> float:
        return self.deadline - time.monotonic()

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def choice_in(line: str) -> str | None:
    """What a line of the log says of the plugin's choice."""
    found = re.search(r"All-reduces run (.*) \(VLLM_LADDER_OVERLAP=", line)
    return found[1] if found else None


def end(running: Running) -> None:
    """The engine and everything it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(3)


@contextmanager
def multi_process_service() -> Iterator[None]:
    """CUDA's Multi-Process Service for the duration of the block, unless it runs already or is not there."""
    environment = os.environ | MPS
    control = "nvidia-cuda-mps-control"
    if _service_runs(control, environment):
        yield
        return
    for folder in MPS.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    started = False
    try:
        none = subprocess.DEVNULL  # the daemon outlives us and would hold our pipes open
        daemon = subprocess.run([control, "-d"], env=environment, stdin=none, stdout=none, stderr=none, timeout=20, check=False)
        started = daemon.returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        print(f"no Multi-Process Service: {error}", file=sys.stderr)
    if not started:
        print("the ranks' kernels will take turns: their times mean nothing", file=sys.stderr)
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input=b"quit\n", env=environment, timeout=60, check=False, capture_output=True)


def _service_runs(control: str, environment: dict[str, str]) -> bool:
    try:
        asked = subprocess.run(
            [control], input=b"get_server_list\n", env=environment, capture_output=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and b"Cannot find" not in asked.stdout + asked.stderr


def _environment() -> dict[str, Any]:
    from lab.serving.servers import environment_with_vllm

    try:
        return environment_with_vllm()
    except Exception as error:
        return {"message": f"{type(error).__name__}: {error}"}


def _print_result(result: dict[str, Any]) -> None:
    for name, part in result["parts"].items():
        print(f"## {name}", part.get("message", ""))
        for engine, facts in part.get("engines", {}).items():
            print("  ", engine, facts.get("message", f"started in {facts['start_s']} s"))
        for engine, facts in part.get("tokens", {}).items():
            print("  ", engine, facts)
        for row in part.get("rows", []):
            print("  ", {key: value for key, value in row.items() if key != "samples"})


if __name__ == "__main__":
    run_command(app)
