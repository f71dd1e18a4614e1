"""Values with which the chart is rendered, and what must be refused."""

from __future__ import annotations

from typing import Any

LONG: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "policy": {"name": "kara", "args": {"window": 512, "ratio": 0.5}},
    "pool": {"dtype": "k8v4", "memory": "5GiB"},
    "gpus": 2,
    "settings": {"max-num-seqs": 64, "max-model-len": "16k", "reasoning-parser": "deepseek_r1"},
    "shutdown": {"preStopSeconds": 5, "timeout": 120},
    "apiKey": {"secret": "keys"},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "ingress": {"enabled": True, "host": "llm.acme.org", "tlsSecret": "acme"},
    "networkPolicy": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
    "hubToken": {"secret": "hub"},
    "models": {"claim": "weights"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}
NUMBERS: dict[str, Any] = {
    "image": {"tag": 20261126},
    "model": 7,
    "pool": {"memory": 5368709120},
    "sharedMemory": 8589934592,
    "settings": {"max-num-batched-tokens": 16777216, "gpu-memory-utilization": 0.85},
    "resources": {"requests": {"cpu": 4, "memory": 34359738368}, "limits": {"memory": 68719476736}},
    "nodeSelector": {"gpus": 8},
    "podAnnotations": {"build": 20261126, "reviewed": True},
    "extraEnv": [{"name": "SECONDS", "value": 1500000}, {"name": "SHARE", "value": 0.5}],
    "ingress": {
        "enabled": True,
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": 7200},
    },
    "autoscaling": {"enabled": True, "waitingPerReplica": 1000000},
    "serviceMonitor": {"enabled": True, "labels": {"shard": 1}},
}
PRIVATE: dict[str, Any] = {
    "image": {"repository": "registry.acme.org/llm/kvserve"},
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "serving",
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "fullnameOverride": "chat",
    "apiKey": {"secret": "keys", "key": "all.txt"},
    "serviceMonitor": {"enabled": True},
    "extraEnv": [
        {"name": "HF_ENDPOINT", "value": "https://hub.acme.org"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "extraVolumes": [{"name": "authority", "configMap": {"name": "authority"}}],
    "extraVolumeMounts": [{"name": "authority", "mountPath": "/etc/ssl/acme", "readOnly": True}],
}
SPREAD: dict[str, Any] = {
    "replicas": 4,
    "podDisruptionBudget": {"maxUnavailable": "50%"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]}
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "kvserve"}},
        }
    ],
}
VALUE_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "long": LONG,
    "cpu": {"gpus": 0, "replicas": 3, "allowedHosts": ["gateway.internal"]},
    "two": {"replicas": 2, "apiKey": {"secret": "keys"}, "networkPolicy": {"enabled": True}},
    "autoscaled": {"autoscaling": {"enabled": True}, "prometheusRule": {"enabled": True}},
    "numbers": NUMBERS,
    "private": PRIVATE,
    "spread": SPREAD,
}
SURGE = {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}
WRONG: dict[str, dict[str, Any]] = {
    "replica": {"replica": 2},
    "polices": {"pool": {"polices": "kara"}},
    "replicas": {"replicas": "two"},
    "preStopSecond": {"shutdown": {"preStopSecond": 5}},
    "secretName": {"apiKey": {"secretName": "keys"}},
    "fullnameOverride": {"fullnameOverride": "Chat_1"},
    "extraEnv": {"extraEnv": [{"name": "A"}]},
    "port": {"service": {"port": 70000}},
}
"""By a word of the error."""
