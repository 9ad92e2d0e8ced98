"""The image: linted, and its steps carried out in a clean environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.control.running_daemon import daemon
from tests.deploy.build_stage import instructions, run_first_stage

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
ENGINES = ROOT / "deploy" / "vllm.Dockerfile"
TOOLS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first stage put what the image copies from it."""
    scratch = tmp_path_factory.mktemp("image")
    run_first_stage(ROOT, scratch)
    return scratch


def output(*command: str | Path) -> str:
    """What a command printed; it must succeed."""
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True, cwd="/"
    ).stdout.strip()


@pytest.mark.parametrize("file", [DOCKERFILE, ENGINES], ids=["kvd", "vllm"])
def test_hadolint_finds_nothing(file: Path) -> None:
    found = subprocess.run([TOOLS / "hadolint", file], check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_does_not_run_as_root() -> None:
    users = [step.rest for step in instructions(DOCKERFILE) if step.name == "USER"]
    assert users == ["10001:10001"]


def test_every_base_image_is_pinned_to_a_release() -> None:
    steps = instructions(DOCKERFILE)
    assert {step.rest.split()[0] for step in steps if step.name == "FROM"} == {"${PYTHON_IMAGE}"}
    base = next(step.rest for step in steps if step.name == "ARG")
    _, _, tag = base.partition("=")[2].partition(":")
    assert tag.split("-")[0].count(".") == 2


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ({"GPU": "", "EXTRAS": ""}, ""),
        ({"GPU": "cuda12", "EXTRAS": ""}, "[cuda12]"),
        ({"GPU": "", "EXTRAS": "s3,mooncake"}, "[s3,mooncake]"),
        ({"GPU": "cuda13", "EXTRAS": "s3"}, "[cuda13,s3]"),
    ],
)
def test_the_build_arguments_ask_for_the_extras_of_their_names(
    tmp_path: Path, arguments: dict[str, str], extra: str
) -> None:
    (install,) = (
        step
        for step in instructions(DOCKERFILE)
        if step.name == "RUN" and "/build/wheels/kvd_client" in step.rest
    )
    extras, _, _ = install.rest.partition("&&")
    _, _, words = install.rest.partition("pip install")
    for name in ("kvd-1-py3-none-any.whl", "kvd_client-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    command = extras + "&& echo" + words.partition("&&")[0].replace("/build/wheels", str(tmp_path))
    environment = {"PATH": "/usr/bin:/bin", **arguments}
    printed = subprocess.run(
        ["/bin/bash", "-euc", command],
        check=True, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    asked = [word for word in printed.stdout.split() if word.startswith(str(tmp_path))]
    assert asked == [
        f"{tmp_path}/kvd_client-1-py3-none-any.whl",
        f"{tmp_path}/kvd-1-py3-none-any.whl{extra}",
    ]


@pytest.mark.parametrize(
    ("extras", "is_asked"), [("", False), ("s3", False), ("mooncake", True), ("s3,mooncake", True)]
)
def test_the_image_has_the_libraries_of_mooncakes_client_where_it_has_the_client(
    tmp_path: Path, extras: str, is_asked: bool
) -> None:
    (step,) = (step.rest for step in instructions(DOCKERFILE) if "apt-get" in step.rest)
    step = step.replace("/var/lib/apt", str(tmp_path))
    (tmp_path / "apt-get").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "apt-get").chmod(0o755)
    printed = subprocess.run(
        ["/bin/sh", "-euc", step], check=True, capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "EXTRAS": extras},
    ).stdout  # fmt: skip
    assert ("libibverbs1 libnuma1 libcurl4" in printed) is is_asked


def test_every_extra_for_gpus_has_a_cuda_version_and_brings_cupy_and_nvml_alone() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for version in ("12", "13"):
        cupy, nvml = extras[f"cuda{version}"]
        assert cupy.startswith(f"cupy-cuda{version}x>=")
        assert nvml.startswith("nvidia-ml-py>=")


@pytest.mark.slow
def test_the_steps_build_an_environment_in_which_kvd_runs(image: Path) -> None:
    version = importlib.metadata.version("kvd")
    assert version in output(image / "opt/kvd/bin/kvd", "version")


@pytest.mark.slow
def test_the_image_has_the_wheels_of_both_distributions_and_no_more_of_ours(image: Path) -> None:
    version = importlib.metadata.version("kvd")
    wheels = sorted(path.name for path in (image / "build/wheels").iterdir())
    assert len(wheels) == 2
    assert wheels[0].startswith(f"kvd-{version}-py3-none-linux_")
    assert wheels[1] == f"kvd_client-{version}-py3-none-any.whl"
    code = "import kvd, kvd_client, kvd_proto.v1.engine_pb2 as p; print(kvd.__file__, p.__file__)"
    for path in output(image / "opt/kvd/bin/python", "-c", code).split():
        assert path.startswith(f"{image}/opt/kvd/"), path


def test_what_the_image_is_built_from_reaches_docker() -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for step in (*instructions(DOCKERFILE), *instructions(ENGINES)):
        if step.name == "COPY" and not step.rest.startswith("--from"):
            for source in step.rest.split()[:-1]:
                assert f"!{source.split('/')[0]}" in allowed


@pytest.mark.slow
def test_the_installation_has_the_guide_that_the_unit_names(image: Path) -> None:
    unit = (ROOT / "deploy/systemd/kvd.service").read_text()
    (named,) = re.findall(r"^Documentation=.*file://(/opt/kvd/.+)$", unit, re.MULTILINE)
    guide = image / named.lstrip("/")
    assert "kvd status" in (image / "opt/kvd/share/man/man1/kvd.1").read_text()
    assert guide.read_text() == (ROOT / "deploy/README.md").read_text()
    for link in re.findall(r"\]\((\.\./docs/[^)#]+)", guide.read_text()):
        assert (guide.parent / link).exists()


@pytest.mark.slow
def test_the_image_copies_by_the_native_library(image: Path) -> None:
    code = "from kvd import native; print(native.why_not() or 'it is there')"
    assert output(image / "opt/kvd/bin/python", "-c", code) == "it is there"


@pytest.mark.slow
def test_the_client_alone_needs_no_daemon(image: Path, tmp_path: Path) -> None:
    (wheel,) = (image / "build/wheels").glob("kvd_client-*.whl")
    fresh = tmp_path / "engine"
    output(sys.executable, "-m", "venv", "--without-pip", fresh)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", fresh / "bin/python"]
    constraints = ROOT / "requirements/constraints.txt"
    output(*pip, "install", "-q", "--no-compile", "-c", constraints, wheel)
    listed = output(*pip, "list", "--format=freeze")
    names = {line.split("==")[0].lower().replace("_", "-") for line in listed.splitlines()}
    assert names == {
        "kvd-client", "numpy", "grpcio", "protobuf", "typing-extensions",
    }  # fmt: skip
    output(fresh / "bin/python", "-c", "import kvd_client, kvd_proto.v1.worker_pb2_grpc")


def test_the_connector_goes_into_vllms_image_and_changes_nothing_else_there(
    tmp_path: Path,
) -> None:
    """The step of deploy/vllm.Dockerfile, in an environment that has what vLLM brings."""
    output(sys.executable, "-m", "venv", "--without-pip", tmp_path / "engine")
    python = tmp_path / "engine/bin/python"
    pip = f"{sys.executable} -m pip --python {python}"
    (site,) = (tmp_path / "engine/lib").glob("python3*/site-packages")
    (site / "vllms.pth").write_text(str(Path(grpc.__file__).parents[1]) + "\n")
    (step,) = (step.rest for step in instructions(ENGINES) if step.name == "RUN")
    shutil.copytree(ROOT / "client", tmp_path / "kvd-client")
    step = step.replace("/tmp/kvd-client", str(tmp_path / "kvd-client"))
    step = step.replace("python3 -m pip", pip).replace("python3 -c", f"{python} -c")
    step = step.replace("pip install", "pip install --no-build-isolation", 1)
    output("/bin/sh", "-euc", step)
    named = output(
        python, "-c",
        "from importlib.metadata import entry_points as e;"
        " print([p.value for p in e(group='vllm.general_plugins') if p.name == 'kvd'])",
    )  # fmt: skip
    assert "kvd_client.integrations.vllm" in named
    assert sorted(path.name for path in site.glob("*.dist-info")) == [
        f"kvd_client-{importlib.metadata.version('kvd-client')}.dist-info"
    ]


def test_docker_asks_whether_the_daemon_answers(shared_directory: Path) -> None:
    (check,) = (step.rest for step in instructions(DOCKERFILE) if step.name == "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "kvd"

    def ask(socket: Path) -> int:
        asked = [sys.executable, "-m", "kvd", *command[1:]]
        environment = {**os.environ, "KVD_SOCKET": str(socket)}
        return subprocess.run(asked, check=False, capture_output=True, env=environment).returncode

    with daemon() as running:
        assert ask(Path(running.socket)) == 0
    assert ask(Path(running.socket)) == 1


@pytest.mark.slow
def test_the_daemon_of_the_image_serves_and_stops_in_order(
    image: Path, shared_directory: Path
) -> None:
    kvd = image / "opt/kvd/bin/kvd"
    socket = shared_directory / "kvd.sock"
    serve: list[str | Path] = [
        kvd,
        "serve",
        "--socket",
        socket,
        "--pool-directory",
        shared_directory / "pool",
    ]
    small = ["--pool-bytes", "64MiB", "--extent-bytes", "16MiB", "--http-port", "0"]
    log = shared_directory / "log"
    with log.open("w") as errors, subprocess.Popen([*serve, *small], stderr=errors, cwd="/") as run:
        try:
            report = status(kvd, socket, seconds=30)
            assert report["state"] == "ready", log.read_text()
        finally:
            run.terminate()
    assert run.returncode == 0, log.read_text()
    assert not socket.exists()
    assert (shared_directory / "pool").exists()


def status(kvd: Path, socket: Path, seconds: float) -> Any:
    """What `kvd status` says as soon as the daemon answers; {"state": "absent"} if it doesn't."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        asked = subprocess.run(
            [kvd, "status", "--json", "--socket", socket], check=False, capture_output=True
        )
        if asked.returncode == 0:
            return json.loads(asked.stdout)
        time.sleep(0.1)
    return {"state": "absent"}
