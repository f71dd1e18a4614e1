"""What Helm makes of the chart: argument 1 is the chart, 2 a file with sets of values by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

chart_path, sets_path = sys.argv[1:]
found: dict[str, dict[str, Any]] = {}
with helm.Chart.load(chart_path) as chart:
    for name, values in json.loads(Path(sets_path).read_text()).items():
        # As `helm install -f` reads them: by YAML, where numbers become floats.
        read = helm.values_from_yaml(yaml.safe_dump(values))
        try:
            chart.validate_schema(read)
            texts = chart.render(read, name="llm", namespace="models")
        except helm.HelmError as error:
            found[name] = {"error": str(error)}
        else:
            found[name] = {"texts": {Path(path).name: text for path, text in texts.items()}}
report = helm.lint(chart_path, namespace="models")
print(json.dumps({"version": helm.helm_sdk_version(), "sets": found, "lint": report}))
