"""What the alerts and the dashboard of `deploy/` ask for exists in the metrics of a server."""

import json
import re
from collections import defaultdict

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.running_server import ROOT, RunningServer


def test_every_metric_label_and_value_of_a_query_is_served(server: RunningServer):
    served = defaultdict[str, dict[str, set[str]]](dict, up={})  # the values of each label, by metric
    for path in ("/health", "/live", "/metrics"):  # responses of others than engines are counted from the first
        assert server.get(path).status == 200
    for family in text_string_to_metric_families(server.get("/metrics").body):
        for sample in family.samples:
            for label, value in sample.labels.items():
                served[sample.name].setdefault(label, set()).add(value)

    # Queries, and the texts that show labels of what they return.
    alerts = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    queries = [(rule["expr"], rule["annotations"]["summary"]) for rule in alerts]
    queries += [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]
    of_prometheus, num_selectors = {"instance", "job", "le"}, 0
    for query, text in queries:
        metrics = re.findall(r"\bmini_engine:\w+|\bhttp_\w+|\bprocess_\w+|\bup\b", query)
        assert metrics and served.keys() >= {*metrics}, query
        named = {*re.findall(r"(?:{{|\$labels\.)(\w+)", text)}
        for part in re.findall(r"\bby \(([^)]*)\)", query):
            named |= {*part.split(", ")}
        for metric in metrics:
            assert served[metric].keys() | of_prometheus >= named, query
        for metric, matchers in re.findall(r"((?:mini_engine:|http_|process_)\w+){([^}]*)}", query):
            num_selectors += 1
            for label, pattern in re.findall(r'(\w+)[=!]~?"([^"]*)"', matchers):
                if label not in of_prometheus:
                    for part in pattern.split("|"):
                        assert any(re.fullmatch(part, value) for value in served[metric][label]), (query, part)
    assert num_selectors > 40
