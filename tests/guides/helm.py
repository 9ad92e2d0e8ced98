"""`helm install` for guides: renders the chart with the values as written, and installs nothing."""

from __future__ import annotations

import argparse
import sys

import helm_python as helm
import kubernetes_validate
import yaml


def main() -> int:
    """0 where Kubernetes would take what is rendered."""
    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("command", choices=["install", "upgrade"])
    parser.add_argument("name")
    parser.add_argument("chart")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--reset-then-reuse-values", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    values = helm.parse_set_string(",".join(given.set))
    with helm.Chart.load(given.chart) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name=given.name, namespace=given.namespace)
    for path, text in rendered.items():
        for document in () if path.endswith(".txt") else yaml.safe_load_all(text):
            if document:
                kubernetes_validate.validate(document, "1.37", strict=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
