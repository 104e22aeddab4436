"""The Helm chart: its manifests are valid, and its commands are options of our programs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tests.deploy.files import CHART, DEPLOY, PROGRAMS, VERSION, is_guarded, parse_options, tool
from tests.documents import blocks

KUBERNETES = ("1.31", "1.34", "1.37")
KUBERAY = DEPLOY / "kuberay" / "values.yaml"
CLUSTER = [*yaml.safe_load_all((DEPLOY / "kuberay" / "cluster.yaml").read_text())]
SECRETS = ("access.tokensSecret=tokens", "access.tlsSecret=tls")
SMALL = (*SECRETS, "teacher.model=Qwen/Qwen3-4B")
LARGE = (
    *(*SMALL, "networkPolicy.enabled=true", "images.repository=registry.example/team"),
    *("images.pullSecrets[0]=registry", "server.slots=2", "server.gpus=8", "server.runsClaim=runs"),
    *("server.modelsClaim=models", "server.serviceType=LoadBalancer", "server.nodeSelector.pool=a"),
    *("server.extraArgs[0]=--retries=5", "server.env[0].name=HF_HOME", "server.env[0].value=/data"),
    *("server.tolerations[0].operator=Exists", "server.storage.className=fast"),
    *("teacher.model=/models/teacher", "teacher.modelsClaim=models", "teacher.engine=vllm"),
    *("teacher.gpus=4", "teacher.replicas=3"),
    *("teacher.redisUrl=rediss://rows@redis:6379/0", "teacher.extraArgs[0]=--metrics-port=9464"),
    *("teacher.extraArgs[1]=--metrics-host=0.0.0.0", "teacher.resources.limits.memory=64Gi"),
)
NO_TEACHER = (*SECRETS, "teacher.enabled=false", "server.gpus=0", "networkPolicy.enabled=true")
RELEASES = {"small": SMALL, "large": LARGE, "no teacher": NO_TEACHER, "ray": ()}


def helm(*values: str, file: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [tool("helm"), "template", "team", str(CHART)]
    command += [] if file is None else ["--values", str(file)]
    command += [word for value in values for word in ("--set", value)]
    return subprocess.run(command, capture_output=True, text=True)


def render_release(name: str) -> list[dict[str, Any]]:
    process = helm(*RELEASES[name], file=KUBERAY if name == "ray" else None)
    assert process.returncode == 0, process.stderr
    return [manifest for manifest in yaml.safe_load_all(process.stdout) if manifest]


def pods(name: str) -> list[dict[str, Any]]:
    return [
        manifest["spec"]["template"]["spec"]
        for manifest in render_release(name)
        if "template" in manifest["spec"]
    ]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_options_of_the_templates_exist(program: str) -> None:
    """Needs no helm: reads the option names from the templates."""
    text = (CHART / "templates" / f"{program.removeprefix('distill-')}.yaml").read_text()
    option_names = set(re.findall(r"- (--[a-z-]+)=", text))
    assert {"--host", "--port", "--tls-cert", "--tls-key"} <= option_names
    options = typer.main.get_command(PROGRAMS[program]).params
    assert option_names <= {option for parameter in options for option in parameter.opts}


def test_the_version_is_ours() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_every_value_has_a_type() -> None:
    """The schema rejects unknown values, so it must name every value."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for table, keys in values.items():
        assert set(schema[table]["properties"]) == set(keys), table
        assert schema[table]["additionalProperties"] is False


@pytest.mark.parametrize("name", RELEASES)
def test_the_commands_are_ours(name: str) -> None:
    release_pods = pods(name)
    assert len(release_pods) == (1 if name in ("ray", "no teacher") else 2)
    for pod in release_pods:
        (container,) = pod["containers"]
        (program,) = container["command"]
        options = parse_options(program, container["args"])
        assert options["host"] == "0.0.0.0"
        assert is_guarded(options)
        # Tokens come from the environment, since a mounted secret is readable by the pod's group.
        variables = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        assert {"DISTILL_TOKENS", "DISTILL_TLS_CA"} <= set(variables)
        address = f"https://localhost:{options['port']}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container[probe]["exec"]["command"]
            assert command == ["python", "-P", "-m", "protos.rpc.health", address]
        if program == "distill-server":
            is_local = name != "ray"
            assert options["on_stop"] == ("checkpoint" if is_local else "leave")
            grace = float(str(options["stop_grace"])) if is_local else 0
            assert pod["terminationGracePeriodSeconds"] >= grace + 30
        if name == "ray":
            assert options["ray"] == "http://distill-ray-head-svc:8265"
            assert str(options["runs"]) == "/runs"


@pytest.mark.parametrize("name", RELEASES)
def test_every_path_is_mounted(name: str) -> None:
    for pod in pods(name):
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volume_names = {volume["name"] for volume in pod["volumes"]}
        assert volume_names | {"data"} == set(mounts)
        option_values = [word.partition("=")[2] for word in container["args"]]
        option_values += [str(entry.get("value", "")) for entry in container["env"]]
        for path in (word for word in option_values if word.startswith("/")):
            assert any(f"{path}/".startswith(f"{mount_path}/") for mount_path in mounts.values()), (
                path
            )


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", RELEASES)
def test_kubernetes_takes_it(name: str, version: str, tmp_path: Path) -> None:
    manifest_path = tmp_path / "made.yaml"
    manifest_path.write_text(yaml.safe_dump_all(render_release(name)))
    assert validate_strictly(manifest_path, version) == 0


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_pods_of_ray(version: str, tmp_path: Path) -> None:
    """A RayCluster is a KubeRay type; its pod templates are Kubernetes pods."""
    claim, cluster = CLUSTER
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    pod_manifests = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"node-{n}"}, **group["template"]}
        for n, group in enumerate(groups)
    ]
    file = tmp_path / "pods.yaml"
    file.write_text(yaml.safe_dump_all([claim, *pod_manifests]))
    assert validate_strictly(file, version) == 0


def test_kubernetes_does_not_take_everything(tmp_path: Path) -> None:
    manifests = render_release("small")
    manifests[1]["spec"]["prots"] = []
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    assert validate_strictly(file, KUBERNETES[0]) != 0


def validate_strictly(file: Path, version: str) -> int:
    command = [tool("kubernetes-validate"), "--strict", "--kubernetes-version", version, str(file)]
    process = subprocess.run(command, capture_output=True, text=True)
    print(process.stdout + process.stderr)
    return process.returncode


def test_the_server_and_the_ray_cluster_fit_together() -> None:
    claim, cluster = CLUSTER
    values = yaml.safe_load(KUBERAY.read_text())
    server = values["server"]
    assert parse_options("distill-server", server["extraArgs"])["threads_per_job"] == 4
    assert claim["metadata"]["name"] == server["runsClaim"]
    assert server["ray"] == f"http://{cluster['metadata']['name']}-head-svc:8265"
    assert cluster["spec"]["authOptions"]["secretName"] == server["raySecret"]
    workers = cluster["spec"]["workerGroupSpecs"]
    gpus = 0
    for group in [cluster["spec"]["headGroupSpec"], *workers]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f"/distill-trainer:{VERSION}")
        gpus += group.get("replicas", 1) * container["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert group["template"]["spec"]["securityContext"]["runAsUser"] == 10001
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert mounts["runs"] == "/runs"
        secrets = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in group["template"]["spec"]["volumes"]
            if "secret" in volume
        }
        assert secrets == {"token": server["raySecret"], "authority": values["access"]["tlsSecret"]}
    assert gpus == server["gpus"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((), "tokensSecret"),
        ((*SECRETS,), "model"),
        ((*SMALL, "server.slots=0"), "slots"),
        ((*SMALL, "server.replicas=2"), "replicas"),
        ((*SMALL, "teacher.engine=sglang"), "engine"),
        ((*SMALL, "server.ray=http://head:8265"), "runsClaim"),
        ((*SMALL, "server.sharedMemory=8"), "sharedMemory"),
    ],
)
def test_a_wrong_value_is_refused(values: tuple[str, ...], message: str) -> None:
    process = helm(*values)
    assert process.returncode != 0
    assert message in process.stderr


def test_a_policy_lets_nobody_else_in() -> None:
    policies = [
        manifest["spec"]
        for manifest in render_release("large")
        if manifest["kind"] == "NetworkPolicy"
    ]
    assert [policy["policyTypes"] for policy in policies] == [["Ingress"]] * 2
    services = [
        manifest["spec"] for manifest in render_release("large") if manifest["kind"] == "Service"
    ]
    for policy in policies:
        selected = policy["podSelector"]["matchLabels"]
        (service,) = (candidate for candidate in services if candidate["selector"] == selected)
        open_ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert open_ports == {port["port"] for port in service["ports"]}


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """docs/kubernetes.md without a cluster: `create --dry-run` and `template` only print."""
    for program in ("kubectl", "helm"):
        tool(program)
    (secrets,) = blocks("docs/containers.md", "secrets")
    chart, ray = blocks("docs/kubernetes.md", "kubernetes")
    for path in (CHART, KUBERAY.parent):
        shutil.copytree(path, tmp_path / path.relative_to(DEPLOY.parent))
    search_path = f"{DEPLOY.parent / '.venv-deploy' / 'bin'}:{os.environ['PATH']}"
    outputs = []
    for block in (secrets, chart, ray):
        text = block.body.replace("helm install", "helm template")
        text = text.replace(
            "kubectl create secret", "kubectl create --dry-run=client -oyaml secret"
        )
        text = text.replace("kubectl apply -f", "cat")
        # Each block starts in `tmp_path`, since the first one changes the directory.
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text.replace("chown", ": chown")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": search_path, "KUBECONFIG": os.devnull},
        )
        assert process.returncode == 0, process.stderr
        outputs.append(process.stdout)
    manifests = [manifest for text in outputs[1:] for manifest in documents(text)]
    secret_manifests = {
        manifest["metadata"]["name"]: manifest
        for manifest in manifests
        if manifest["kind"] == "Secret"
    }
    assert set(secret_manifests) == {"distill-tokens", "distill-tls", "distill-ray"}
    keys = {(name, key) for name, manifest in secret_manifests.items() for key in manifest["data"]}
    secret_references = [
        variables(manifest["spec"]["template"]["spec"])
        for manifest in manifests
        if "Set" in manifest["kind"]
    ]
    secret_references += [
        variables(manifest["spec"]["template"]["spec"])
        for manifest in manifests
        if "Depl" in manifest["kind"]
    ]
    assert len(secret_references) == 3
    assert set().union(*secret_references) == {key for key in keys if key[0] == "distill-tokens"}


def documents(text: str) -> list[dict[str, Any]]:
    """Split the output of several commands, some without a `---` separator, into documents."""
    separate = re.sub(r"^(?=apiVersion)", "---\n", text, flags=re.MULTILINE)
    return [document for document in yaml.safe_load_all(separate) if document]


def variables(pod: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the (secret, key) pairs that the pod's variables refer to."""
    entries = [entry for container in pod["containers"] for entry in container["env"]]
    references = [entry["valueFrom"]["secretKeyRef"] for entry in entries if "valueFrom" in entry]
    return {(reference["name"], reference["key"]) for reference in references}
