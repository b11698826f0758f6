"""The Grafana dashboard of the manual asks for metrics that exist, as counters or gauges, and its panels fit."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

from dali_pipes.monitoring.metrics import METRICS

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
NAMES = {f"dali_pipes_{metric.name}{'_total' * (metric.kind == 'counter')}": metric.kind for metric in METRICS}


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def test_every_query_is_of_metrics_that_exist() -> None:
    dashboard = load()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 8
    for query in queries:
        names = re.findall(r"dali_pipes_\w+", query)
        assert names
        assert set(names) <= NAMES.keys(), query
        of_counters = re.findall(r"(?:rate|increase)\((\w+)", query)
        assert all(NAMES[name] == "counter" for name in of_counters), query
        assert query.startswith("label_values") or {name for name in names if NAMES[name] == "counter"} == set(
            of_counters
        ), f"{query}: a counter is shown as a rate"
        assert query.count("(") == query.count(")")


def test_every_panel_has_its_place_and_data_source() -> None:
    panels = load()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
