"""The chart, rendered by Helm's engine: valid for Kubernetes, and its commands do what they say."""

import base64
import subprocess
import time

import httpx
import pytest
import yaml

from rankscope.server.demo.processes import RANKSCOPE, Process, free_port
from tests.support import doc_blocks, helm
from tests.test_containers import command

pytestmark = pytest.mark.skipif(not helm.PYTHON.exists(), reason=helm.HOW_TO_INSTALL)

POSTGRES = {
    "replicas": 2,
    "database": {
        "url": "postgresql://rankscope@db.example.org/rankscope",
        "passwordSecret": {"name": "db", "key": "password"},
    },
}
EVERYTHING = POSTGRES | {
    "image": {"repository": "registry.example.org/rankscope", "tag": "x", "pullSecrets": ["pull"]},
    "token": {"existingSecret": "mine"},
    "service": {"type": "LoadBalancer", "port": 80},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "rankscope.example.org",
        "tlsSecret": "tls",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "32m"},
    },
    "otlp": "http://collector:4318",
    "arguments": ["--keep", "90d"],
    "environment": [{"name": "OTEL_SERVICE_NAME", "value": "watcher"}],
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "cpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
}
CASES = {"sqlite": {}, "postgres": POSTGRES, "everything": EVERYTHING}


def rendered(values):
    """Kind -> document."""
    texts = [text for name, text in helm.render(values).items() if name.endswith(".yaml")]
    documents = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return {one["kind"]: one for one in documents}


def pod_of(documents):
    [owner] = [documents[kind] for kind in ("StatefulSet", "Deployment") if kind in documents]
    assert owner["spec"]["selector"]["matchLabels"].items() <= (
        owner["spec"]["template"]["metadata"]["labels"].items()
    )
    return owner["spec"]["template"]["spec"]


def test_helm_has_nothing_against_it():
    said = helm.lint()
    assert said["errors"] == []
    assert [m["error"] for m in said["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", ["1.25.0", "1.37.0"])
@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_it(case, version):
    documents = list(rendered(CASES[case]).values())
    assert len(documents) >= 3
    helm.validate(documents, version)
    documents[0]["spec"] = {"no": "such member"}
    with pytest.raises(helm.Refused):
        helm.validate(documents, version)


def test_what_belongs_together_has_one_name():
    documents = rendered(EVERYTHING)
    assert "Secret" not in documents
    service, pod = documents["Service"], pod_of(documents)
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    [port] = service["spec"]["ports"]
    [server] = pod["containers"]
    assert port["targetPort"] in [p["name"] for p in server["ports"]]
    [rule] = documents["Ingress"]["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    for container in (*pod["containers"], *pod["initContainers"]):
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}
    [secret] = [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "token"]
    assert secret == "mine"
    assert server["args"][2:] == [
        *("--public-url", "https://rankscope.example.org"),
        *("--otlp", "http://collector:4318"),
        *("--keep", "90d"),
    ]
    names = {one["name"] for one in server["env"]}
    assert names == {"HOME", "PGPASSWORD", "OTEL_SERVICE_NAME"}


def test_the_values_that_the_page_shows_are_taken():
    page = (helm.REPOSITORY / "docs" / "deployment.md").read_text(encoding="utf-8")
    [shown] = [block for block in doc_blocks.blocks(page) if block.title == "values.yaml"]
    documents = rendered(yaml.safe_load(shown.text))
    assert set(documents) == {"Deployment", "Ingress", "Secret", "Service"}
    helm.validate(list(documents.values()), "1.37.0")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"replicas": 2}, "needs database.url"),
        ({"replicas": 0}, "replicas"),
        ({"replica": 2}, "replica"),
        # A password in the open.
        ({"database": {"url": "postgresql://me:secret@db/rankscope"}}, "url"),
        ({"otlp": "collector:4317"}, "otlp"),
    ],
)
def test_values_that_cannot_work_are_refused(values, why):
    with pytest.raises(helm.Refused, match=why):
        helm.render(values)


def test_its_commands_make_the_token_and_serve(tmp_path):
    documents = rendered({})
    pod = pod_of(documents)
    [made], [server] = pod["initContainers"], pod["containers"]
    token = base64.b64decode(documents["Secret"]["data"]["token"]).decode()
    file = tmp_path / "token"
    file.write_text(token)
    port = free_port()
    database = f"sqlite:///{tmp_path / 'rankscope.db'}"

    def here(words):
        places = {
            "/run/secrets/rankscope/token": str(file),
            "sqlite:////var/lib/rankscope/rankscope.db": database,
        }
        return [places.get(word, word) for word in words]

    program, *create = here(made["command"])
    entry, *options = here(command("ENTRYPOINT"))
    assert program == entry == "rankscope"
    # A pod that starts again makes no second one.
    for _ in range(2):
        subprocess.run([*RANKSCOPE, *create], check=True, timeout=120)
    serve = [*RANKSCOPE, *options, *here(server["args"]), "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    with Process(serve, log=tmp_path / "server.log") as running:
        until = time.monotonic() + 120
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = server[probe]["httpGet"]
            assert asked["port"] == server["ports"][0]["name"]
            # As the kubelet asks: by the pod's address, which is no name that the server was given.
            headers = {"Host": f"10.0.0.7:{server['ports'][0]['containerPort']}"}
            while True:
                assert running.exit_code is None, running.tail()
                assert time.monotonic() < until, running.tail()
                try:
                    if httpx.get(address + asked["path"], headers=headers).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
        assert httpx.get(f"{address}/api/v1/runs").status_code == 401
        bearer = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{address}/api/v1/runs", headers=bearer).status_code == 200
