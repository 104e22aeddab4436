"""Alerts, dashboard and documents name metrics that the services expose; without Prometheus."""

from __future__ import annotations

import re

import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from tests.deploy.monitoring.files import FILES, ROOT, metrics, panels, rules


def documented_metrics() -> set[str]:
    """Return the metrics in the documents' tables; other tests compare them with real services."""
    pages = ("docs/operations.md", "docs/teacher.md")
    text = "\n".join((ROOT / page).read_text() for page in pages)
    return set(re.findall(r"^\| `(distill_\w+)` \|", text, re.MULTILINE))


def process_metrics() -> set[str]:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return {sample.name for family in registry.collect() for sample in family.samples}


def test_every_metric_that_rules_and_board_name_is_exposed() -> None:
    metric_names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in metrics()}
    assert metric_names
    assert metric_names <= documented_metrics() | process_metrics() | {"up"}


def test_the_document_has_every_alert() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert {name for name, _ in rules()} == set(re.findall(r"`(Distill[A-Z]\w+)`", page))


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load((FILES / "rules_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    }
    assert tested == {name for name, _ in rules()}
    for group in yaml.safe_load((FILES / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"].keys() == {"summary", "description"}
            assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_board_has_no_panel_without_an_expression() -> None:
    titles = [title for title, _ in panels()]
    assert len(set(titles)) == 24
    assert all(expr.strip() for _, expr in panels())


@pytest.mark.parametrize(("program", "job"), [("server", "server"), ("teacher", "teacher")])
def test_the_ports_are_those_of_the_document(program: str, job: str) -> None:
    config = yaml.safe_load((FILES / "prometheus.yml").read_text())
    [scrape_config] = [
        candidate
        for candidate in config["scrape_configs"]
        if candidate["job_name"] == f"distill-{job}"
    ]
    port = scrape_config["static_configs"][0]["targets"][0].rpartition(":")[2]
    page = (ROOT / "docs/operations.md").read_text()
    assert f"`--metrics-port {port}` of the {program}" in page
    unit = ROOT / "deploy" / "systemd" / f"distill-{program}.service"
    assert f"--metrics-port {port}" in unit.read_text()
