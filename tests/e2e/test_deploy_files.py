"""What the alerts and the dashboard of `deploy/` ask for exists in the metrics of a server."""

import json
import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.running_server import ROOT, RunningServer

OF_PROMETHEUS = {"instance", "job", "le"}
ALERTS = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
# Queries, and the texts that show labels of what they return.
QUERIES = [(rule["expr"], rule["annotations"]["summary"]) for rule in ALERTS]
QUERIES += [(target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]


@pytest.fixture(scope="module")
def labels(server: RunningServer) -> dict[str, dict[str, set[str]]]:
    """The values of each label, by metric."""
    found: dict[str, dict[str, set[str]]] = {"up": {}}
    for path in ("/health", "/live", "/metrics"):  # responses of others than engines are counted from the first
        assert server.get(path).status == 200
    for family in text_string_to_metric_families(server.get("/metrics").body):
        for sample in family.samples:
            of_metric = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                of_metric.setdefault(label, set()).add(value)
    return found


def test_every_metric_and_label_of_a_query_is_served(labels):
    for query, text in QUERIES:
        metrics = re.findall(r"\bmini_engine:\w+|\bhttp_\w+|\bprocess_\w+|\bup\b", query)
        assert metrics and labels.keys() >= {*metrics}, query
        named = {*re.findall(r"(?:{{|\$labels\.)(\w+)", text)}
        for part in re.findall(r"\bby \(([^)]*)\)", query):
            named |= {*part.split(", ")}
        for metric in metrics:
            assert labels[metric].keys() | OF_PROMETHEUS >= named, query


def test_every_value_that_a_query_selects_is_served(labels):
    selector = re.compile(r"((?:mini_engine:|http_|process_)\w+){([^}]*)}")
    selectors = [match for query, _ in QUERIES for match in selector.findall(query)]
    assert len(selectors) > 40
    for metric, matchers in selectors:
        for label, pattern in re.findall(r'(\w+)[=!]~?"([^"]*)"', matchers):
            if label not in OF_PROMETHEUS:
                for part in pattern.split("|"):
                    assert any(re.fullmatch(part, value) for value in labels[metric][label]), (metric, label, part)
